"""The pull of an offered tree: every process gets what its devices need, and all or none succeed.

The first process asks for the catalog, and holds the version that all then pull. Each process
matches the catalog with what the caller wants, asks each process of the offer for what it needs of
it, many pieces at a time, and receives them in the memory that becomes the arrays.
"""

from __future__ import annotations

import contextlib
import gc
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, Sharding

from gda.arrays.buffers import Buffers
from gda.arrays.dtypes import dtype_in_tree, dtype_of_floats
from gda.checkpoint.reading.blocks import Arrival
from gda.checkpoint.reading.fingerprints import check_fingerprints
from gda.checkpoint.reading.read_once import layout_to_share
from gda.exchange.asking import OfferToPull, PieceToPull
from gda.exchange.catalog import Catalog, catalog_of
from gda.exchange.connection import Address, Deadline, check_token
from gda.exchange.pieces import PulledPiece, needed_blocks, pulled_pieces, whole_array
from gda.exchange.serving import ERRORS, MOST_SECONDS
from gda.exchange.versions import Version
from gda.layout.boundary import public, set_module
from gda.mesh import MeshLike
from gda.multihost.agreement import (
    call_fields,
    check_same_call,
    communicates,
    done_by_all,
    user_location,
)
from gda.multihost.descriptions import Description
from gda.multihost.places import machine
from gda.multihost.settings import own_settings
from gda.multihost.steps import all_do
from gda.storage.options import Options, check_count
from gda.storage.tasks import groups_within
from gda.trees.records.recorded_leaves import ArrayLeaf, Leaf, Path
from gda.trees.records.restored_leaves import (
    RestoredLeaf,
    layout_of,
    leaves_like,
    leaves_of,
)
from gda.trees.records.structure import checked_path, noting_path, subtree, unflatten
from gda.trees.to_jax import check_not_padding, to_jax

T = TypeVar("T")

_NAME = "gda.pull"
_MAX_BYTES = 128 * 2**20
_SECONDS = 60
_GRACE = 5.0  # seconds for processes to hear what happened to others until the end of the timeout
_LEAST = 0.01  # seconds of a meeting that begins after its deadline


@set_module("gda")
@public
@communicates(_NAME)
def pull(
    address: str,
    mesh: MeshLike | Any = None,
    specs: Any = None,
    *,
    like: Any = None,
    at: Iterable[str | int] = (),
    name: str | None = None,
    dtype: npt.DTypeLike | None = None,
    pad: bool = False,
    plain: bool = False,
    partial: bool = False,
    min_version: int | tuple[str, int] | None = None,
    with_version: bool = False,
    verify: bool = False,
    token: str | None = None,
    max_bytes: int = _MAX_BYTES,
    timeout: float = _SECONDS,
) -> Any:
    """Pull a tree that another program offers by ``gda.offer``, onto any mesh, with any specs.

    Communicates: every process of this program must call it, with the same arguments. Each process
    gets what its devices need from the processes of the offer that have it, each byte once. The
    tree is of one version: either every process returns it, or every process raises an error.

    Args:
      address: ``offer.address``. A program that does not listen there yet is waited for.
      mesh, specs, like, at: as for ``gda.checkpoint.restore``. Without ``mesh`` and ``like`` every
        array becomes a NumPy array, whole.
      name: that of the offer; an error if it has another. By default any is right.
      dtype: cast arrays of floats to it, and those of complex numbers to its precision: before
        they are sent if that makes them smaller. The arrays of ``like`` must have it too. A value
        that the dtype cannot hold is an error.
      pad, plain, partial: as for ``gda.checkpoint.restore``.
      min_version: wait until the offer has this version or a later one: its number, or the pair of
        run and number. A program that is started again is another run, and counts from 1.
      with_version: return the tree and its version, a named tuple of ``run`` and ``number``.
      verify: compare the fingerprint of every array with that of the offered one. A checksum covers
        everything else in any case.
      token: that of the offer.
      max_bytes: bound on host memory beyond the arrays, for blocks on their way to an accelerator;
        one array is always allowed. On CPU devices the bytes arrive in the memory of the arrays.
      timeout: seconds until the whole call has succeeded or failed; 5 more if another process of
        this program does not come, and 10 if its process 0 is stopped.

    Returns:
      the tree; with ``with_version`` the tree and its version.

    Raises, in every process:
      ConnectionError: no offer is there, it has ended or was closed, or something else listens at
        the address. The message names the process.
      TimeoutError: the offer, or one of its processes, did not answer or send in time.
      PermissionError: the token is not that of the offer.
      LookupError: the offer has another name, it is another run than that of ``min_version``, or
        there is nothing at ``at``.
      ValueError, TypeError: the offered tree does not fit ``like``, ``specs`` or ``dtype``.
      DisagreementError, LateProcessError: a process asks for something else, or is late.
      CorruptionError: with ``verify``, an array is not what was offered.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> with gda.offer({'w': np.ones((8, 2), np.float32), 'step': 3}) as offer:
    ...     gda.pull(offer.address, mesh, P('x'))
    {'step': 3, 'w': GlobalArray(shape=(8, 2), dtype=float32, mesh={'x': 4, 'y': 2}, spec=P('x'))}
    """
    if not isinstance(timeout, int | float) or not 0 < timeout <= MOST_SECONDS:
        raise ValueError(
            f"timeout must be above 0 and at most {MOST_SECONDS:g} seconds, not {timeout!r}"
        )
    check_token(token)
    if not isinstance(name, str | None):
        raise TypeError(f"name must be a text, not {name!r:.80}")
    if isinstance(like, Mesh | Sharding):
        raise TypeError(f"like is the layout {like!r:.80}, and no tree; pass mesh and specs")
    if (pad or plain) and like is None and mesh is None:
        given = "pad" if pad else "plain"
        raise TypeError(f"{given} was given without a mesh; pass mesh and specs, or like=")
    if partial and like is None:
        raise TypeError("partial was given without like; pass like= too")
    check_not_padding(plain, pad)
    cast = None if dtype is None else dtype_of_floats(dtype)
    if verify and cast is not None:
        raise ValueError("a cast changes fingerprints; pull without dtype= or without verify=")
    deadline, meeting = Deadline(timeout), Deadline(timeout + _GRACE)
    offer = OfferToPull(Address.of(address), token, deadline)
    options, where = Options(max_bytes=max_bytes), checked_path(at)
    least = _checked_version(min_version)
    said = {"address": address, "at": where, "name": name, "dtype": cast, "verify": verify}
    said |= {"min_version": least, "timeout": timeout}
    check_same_call(_NAME, None, said, timeout=meeting.left())
    peer = offer.peer(0)
    with contextlib.ExitStack() as while_pulled:

        def ask() -> str:
            text = offer.catalog(name, least, while_pulled)
            if not verify:
                return text
            proven = offer.with_fingerprints(catalog_of(text, peer, deadline), where)
            return proven.to_json().decode()

        text = _together(lambda: ask() if jax.process_index() == 0 else "", meeting, str)

        def found() -> _Wanted:
            catalog = catalog_of(text, peer, deadline)
            if name not in (None, catalog.name) or (least and least.number > catalog.version):
                given = f"version {catalog.version} of {catalog.name!r:.80}"
                raise ConnectionError(f"{peer} sent {given}, which was not asked for")
            subtree(catalog.structure, where)
            tree = replace(catalog, leaves=tuple([_as_cast(x, cast) for x in catalog.leaves]))
            layout = layout_of(mesh, specs, tree, where)
            if like is None:
                return _Wanted(catalog, leaves_of(tree, where, layout, pad), None)
            wanted = to_jax(like) if plain else like
            return _Wanted(catalog, *leaves_like(tree, wanted, where, partial, False, layout, pad))

        wanted = done_by_all(found, _Wanted.described, _NAME, timeout=meeting.left() or _LEAST)
        _together(lambda: _pull(offer, wanted, options), meeting)
        if verify:
            leaves = [arrival.leaf for arrival in wanted.arrivals]
            values = [arrival.value for arrival in wanted.arrivals]
            check_fingerprints(peer, leaves, values, "offered", meeting.left())
    tree = wanted.tree(where)
    tree = to_jax(tree) if plain and like is None else tree
    return (tree, Version(wanted.catalog.run, wanted.catalog.version)) if with_version else tree


class _Wanted:
    """The leaves of an offer that a pull is to return; ``definition`` is the tree of ``like``."""

    def __init__(self, catalog: Catalog, leaves: list[RestoredLeaf | Any], definition: Any) -> None:
        self.catalog = catalog
        self._definition = definition
        number_of = {leaf.path: number for number, leaf in enumerate(catalog.leaves)}
        self._leaves: list[Arrival | Any] = []
        self.numbers: dict[Arrival, int] = {}
        for leaf in leaves:
            if isinstance(leaf, RestoredLeaf):
                number = number_of[leaf.saved.path]
                saved: Any = catalog.leaves[number]
                if leaf.dtype.itemsize < saved.dtype.itemsize:
                    saved = replace(saved, dtype=leaf.dtype)  # cast before it is sent
                arrival = Arrival(replace(leaf, saved=saved))
                self.numbers[arrival] = number
                self._leaves.append(arrival)
            else:
                self._leaves.append(leaf)

    @property
    def arrivals(self) -> list[Arrival]:
        """The arrays, in order."""
        return [*self.numbers]

    def described(self) -> Description:
        """Return what must be the same in all processes."""
        layouts = {
            "/".join(map(str, arrival.leaf.saved.path)): layout_to_share(arrival.leaf)
            for arrival in self.arrivals
        }
        return call_fields(layouts, {"version": (self.catalog.run, self.catalog.version)})

    def tree(self, at: Path) -> Any:
        """Return the tree, when the arrays have arrived."""
        values = [x.value if isinstance(x, Arrival) else x for x in self._leaves]
        if self._definition is not None:
            return jax.tree.unflatten(self._definition, values)
        return unflatten(self.catalog.structure, values, at)


def _pull(offer: OfferToPull, wanted: _Wanted, options: Options) -> None:
    """Get the arrays of this process, as many at a time as the bound on memory allows."""
    # JAX lets go of memory that it adopted, such as that of the last pull, when Python collects.
    gc.collect(0)
    arrivals, catalog = wanted.arrivals, wanted.catalog
    machines = [server.machine for server in catalog.servers]
    near = frozenset([n for n, each in enumerate(machines) if each and each == machine()])
    pieces_of: dict[Any, list[PulledPiece]] = {}  # arrays of one shape and layout have the same
    for group in groups_within(arrivals, [x.passing_nbytes for x in arrivals], options.max_bytes):
        buffers = Buffers(sum(len(arrival.boxes) for arrival in group))
        questions: defaultdict[int, list[PieceToPull]] = defaultdict(list)
        for arrival in group:
            leaf, plan = arrival.leaf.saved, arrival.leaf.plan
            offer.deadline.check(offer.peer(0))
            with noting_path(leaf.path):
                arrival.allocate(buffers)
            key = leaf.array, leaf.shape, plan
            if key not in pieces_of:
                needed = whole_array(leaf.shape) if plan is None else needed_blocks(plan)
                pieces_of[key] = pulled_pieces(catalog.grid_of(leaf), needed, near)
            for piece in pieces_of[key]:
                asked = PieceToPull(wanted.numbers[arrival], piece, leaf.dtype, arrival)
                questions[piece.server].append(asked)
        offer.pull(catalog, questions)
        with own_settings():
            for arrival in group:
                arrival.finish()


def _together(
    work: Callable[[], T], meeting: Deadline, first: Callable[[T], Any] = lambda _: None
) -> Any:
    """Do the work of all processes, or raise in all; return ``first`` of that of process 0."""
    done = all_do(
        work,
        share=first,
        decide=lambda parts: parts[0],
        what=f"{_NAME} ({user_location()})",
        timeout=meeting.left() or _LEAST,
        shared=(*ERRORS.values(), TypeError),
    )
    return done.decision


def _as_cast(leaf: Leaf, cast: np.dtype[Any] | None) -> Leaf:
    """Return the record of a leaf in the dtype that it is cast to."""
    if cast is None or not isinstance(leaf, ArrayLeaf):
        return leaf
    return replace(leaf, dtype=dtype_in_tree(leaf.dtype, cast))


def _checked_version(least: Any) -> Version | None:
    """Return the run and the number that a user gave; the run of a number alone is empty."""
    if least is None:
        return None
    given: Any = least if isinstance(least, tuple) and len(least) == 2 else ("", least)
    run, number = given
    if not isinstance(run, str):
        raise TypeError(f"min_version must be a number, or run and number, not {least!r:.80}")
    check_count(number, "min_version")
    return Version(run, int(number))
