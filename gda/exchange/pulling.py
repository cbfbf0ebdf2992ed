"""The pull of an offered tree: every process gets the blocks of its devices, or none does.

The first process asks for the catalog, and keeps its version alive for all. Each process matches
the catalog with the request, asks each process of the offer for many pieces at a time, and receives
them in the memory that becomes the arrays.
"""

from __future__ import annotations

import contextlib
import gc
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from gda.arrays.buffers import Buffers
from gda.arrays.dtypes import dtype_in_tree, dtype_of_floats
from gda.arrays.transport.connection import Address, Deadline, check_token
from gda.exchange.asking import OfferToPull, PiecesToPull
from gda.exchange.catalog import catalog_of
from gda.exchange.pieces import own_pieces
from gda.exchange.serving import ERRORS, MOST_PIECES, MOST_SECONDS
from gda.layout.boundary import set_module
from gda.layout.cover import groups_within
from gda.mesh import MeshLike
from gda.multihost.agreement import (
    call_fields,
    check_same_call,
    communicates,
)
from gda.multihost.descriptions import Description
from gda.multihost.places import machine
from gda.multihost.steps import all_do
from gda.storage.options import Options, check_count
from gda.trees.leaves import Tree
from gda.trees.records.arrivals import Arrival
from gda.trees.records.recorded_tree import ArrayLeaf, noting_path
from gda.trees.records.requests import Request

_NAME = "gda.pull"
_MAX_BYTES = 128 * 2**20
_SECONDS = 60
_GRACE = 5.0  # seconds, at the end of the timeout, for processes to learn of errors of others
_LEAST = 0.01  # seconds of a meeting that begins after its deadline


@set_module("gda")
@communicates(_NAME)
def pull(
    address: str,
    mesh: MeshLike | Tree = None,
    specs: Tree = None,
    *,
    like: Tree = None,
    at: Iterable[str | int] = (),
    name: str | None = None,
    dtype: npt.DTypeLike | None = None,
    pad: bool = False,
    plain: bool | None = None,
    partial: bool = False,
    min_version: int | None = None,
    token: str | None = None,
    max_bytes: int = _MAX_BYTES,
    timeout: float = _SECONDS,
) -> Tree:
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
      min_version: wait until the offer has the version of this number or a later one. A program
        that is started again counts from 1.
      token: that of the offer.
      max_bytes: bound on host memory beyond the arrays, for blocks on their way to an accelerator;
        one array is always allowed. On CPU devices the bytes arrive in the memory of the arrays.
      timeout: seconds until the whole call has succeeded or failed; 5 more if another process of
        this program does not come, and 10 if its process 0 is stopped.

    Returns:
      the tree.

    Raises, in every process:
      ConnectionError: no offer is there, it has ended or was closed, or something else listens at
        the address. The message names the process.
      TimeoutError: the offer, or one of its processes, did not answer or send in time.
      PermissionError: the token is not that of the offer.
      LookupError: the offer has another name, or there is nothing at ``at``.
      ValueError: the offered tree does not fit ``like``, ``specs`` or ``dtype``.
      DisagreementError, LateProcessError: a process asks for something else, or is late.

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
    cast = None if dtype is None else dtype_of_floats(dtype)
    if min_version is not None:
        check_count(min_version, "min_version")
    begun = _Pull(
        offer=OfferToPull(Address.of(address), token, Deadline(timeout)),
        request=Request(like, mesh, specs, at, partial, pad, plain),
        name=name,
        least=int(min_version or 1),
        cast=cast,
        options=Options(max_bytes=max_bytes),
        meeting=Deadline(timeout + _GRACE),
    )
    arguments = {"address": address, "at": begun.request.at, "name": name, "dtype": cast}
    arguments |= {"min_version": min_version, "timeout": timeout}
    check_same_call(_NAME, None, arguments, timeout=begun.meeting.left())
    return begun.tree()


@dataclass
class _Pull:
    """A pull, whose methods are its steps in order; all processes run each, or all raise."""

    offer: OfferToPull
    request: Request
    name: str | None
    least: int  # version
    cast: np.dtype[Any] | None
    options: Options
    meeting: Deadline  # until which processes wait for each other

    def tree(self) -> Any:
        """Return the pulled tree."""
        with contextlib.ExitStack() as self.held:
            text = self._done_by_all(self._catalog_text)
            seconds = self.meeting.left() or _LEAST
            all_do(lambda: self._match(text), what=_NAME, timeout=seconds, agreed=self._in_words)
            self._done_by_all(self._receive)
        return self.wanted.tree()

    def _done_by_all(self, work: Callable[[], str | None]) -> Any:
        """Do ``work`` in all processes, or raise in all; return the result of process 0."""
        done = all_do(
            work,
            decide=lambda parts: parts[0],
            what=f"{_NAME} from {self.offer.address}",
            timeout=self.meeting.left() or _LEAST,
            shared=(*ERRORS.values(), TypeError),
        )
        return done.decision

    def _catalog_text(self) -> str:
        """Return the catalog, which process 0 gets; its connection keeps the version alive."""
        if jax.process_index() != 0:
            return ""
        return self.offer.catalog(self.name, self.least, self.held)

    def _match(self, text: str) -> None:
        """Match the catalog with the request; the offer casts arrays if that makes them smaller."""
        self.catalog = catalog = catalog_of(text, self.offer.peer(0), self.offer.deadline)
        if self.name not in (None, catalog.name) or self.least > catalog.version:
            raise ConnectionError(
                f"{self.offer.peer(0)} sent version {catalog.version} of {catalog.name!r:.80}, "
                "which was not asked for"
            )
        leaves = [
            replace(leaf, dtype=dtype_in_tree(leaf.dtype, self.cast))
            if self.cast is not None and isinstance(leaf, ArrayLeaf)
            else leaf
            for leaf in catalog.leaves
        ]
        self.wanted = self.request.match(replace(catalog, leaves=tuple(leaves)))
        number_of = {leaf.path: number for number, leaf in enumerate(catalog.leaves)}
        self.numbers = [number_of[each.record.path] for each in self.wanted.arrivals]
        for arrival, number in zip(self.wanted.arrivals, self.numbers, strict=True):
            offered: Any = catalog.leaves[number]
            if arrival.record.dtype.itemsize >= offered.dtype.itemsize:
                arrival.record = offered

    def _in_words(self, _: None) -> Description:
        """Return the fields that must be the same in all processes."""
        version = self.catalog.run, self.catalog.version
        return call_fields(self.wanted.layouts, {"version": version})

    def _receive(self) -> None:
        """Receive the arrays of this process, as many at a time as the bound on memory allows."""
        # JAX releases adopted memory, such as that of the last pull, when Python collects garbage.
        gc.collect(0)
        catalog, offer = self.catalog, self.offer
        machines = [each.machine for each in catalog.servers]
        near = frozenset([n for n, each in enumerate(machines) if each == machine() != ""])
        arrivals = [*zip(self.numbers, self.wanted.arrivals, strict=True)]
        sizes = [arrival.passing_nbytes for _, arrival in arrivals]
        for group in groups_within(arrivals, sizes, self.options.max_bytes):
            buffers = Buffers(sum(len(arrival.boxes) for _, arrival in group))
            alike: defaultdict[Any, list[tuple[int, Arrival]]] = defaultdict(list)
            for number, arrival in group:
                record = arrival.record
                offer.deadline.check(offer.peer(0))
                with noting_path(record.path):
                    arrival.allocate(buffers)
                key = record.array, record.shape, arrival.plan, record.dtype
                alike[key].append((number, arrival))
            questions: defaultdict[int, list[PiecesToPull]] = defaultdict(list)
            for (*_, plan, dtype), some in alike.items():
                pieces = own_pieces(catalog.grid_of(some[0][1].record), plan, near)
                for part in groups_within(some, [1] * len(some), MOST_PIECES):
                    numbers, arrived = zip(*part, strict=True)
                    for piece in pieces:
                        each = PiecesToPull(piece, dtype.name, numbers, arrived)
                        questions[piece.server].append(each)
            offer.pull(catalog, questions)
            for _, arrival in group:
                arrival.finish()
