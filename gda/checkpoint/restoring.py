"""The restore of a tree: its leaves are matched with the checkpoint, then read.

Each chunk that this process needs is read once, and checked. The chunks are compared with the sizes
of the files before they are read; where this process reads alone, before memory is allocated.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np

from gda.arrays.buffers import Buffers
from gda.arrays.transport.exchanging import exchange
from gda.checkpoint.format.files_at import FileKind, kind_at
from gda.checkpoint.format.manifest import Manifest
from gda.checkpoint.reading.checked_files import (
    Files,
    check_not_replaced,
    load_complete,
)
from gda.checkpoint.reading.chunk_parts import (
    ArrivedChunks,
    processes_together,
    read_chunks,
    shared_reads,
    uses_of,
)
from gda.checkpoint.step_folders.folder import path_of
from gda.checkpoint.tree_at import open_tree, recorded
from gda.layout.boundary import set_module
from gda.layout.cover import BoxMove, cover, groups_within
from gda.layout.indices import sizes_of
from gda.mesh import MeshLike
from gda.multihost.agreement import (
    check_same_call,
    communicates,
    tells_alone,
    timeout_of_calls,
    watching,
)
from gda.storage import tasks
from gda.storage.options import Options, ProgressLike, counting
from gda.storage.sources import source_of
from gda.storage.stores import checksums
from gda.storage.stores.errors import CheckpointNotFoundError, CorruptionError
from gda.storage.stores.opening import Store, open_store, options_for
from gda.trees.leaves import are_keys
from gda.trees.per_process import PerProcess, merged
from gda.trees.records.arrivals import Arrival
from gda.trees.records.recorded_tree import Path, PerProcessLeaf, format_path, noting_path
from gda.trees.records.requests import Request

log = logging.getLogger("gda")

_NAME = "gda.checkpoint.restore"
MAX_BYTES = 128 * 2**20


@set_module("gda.checkpoint")
@communicates(_NAME, lambda given: [given["mesh"], given["like"]] if given["read_once"] else None)
def restore(
    path: Any,
    like: Any = None,
    *,
    mesh: MeshLike | Any = None,
    specs: Any = None,
    at: Iterable[str | int] = (),
    partial: bool = False,
    missing: Literal["error", "keep"] = "error",
    cast: bool = False,
    pad: bool = False,
    plain: bool | None = None,
    merge: Callable[[list[Any], int], Sequence[Any]] | None = None,
    read_once: bool = False,
    max_workers: int | None = None,
    max_bytes: int = MAX_BYTES,
    timeout: float = 600,
    progress: ProgressLike = False,
) -> Any:
    """Restore a tree, onto any mesh, with any specs, in any number of processes.

    Each process reads the blocks of its devices. Communicates only with ``read_once``.

    Args:
      path: as for ``save``; or a step of a run, as ``runs/a@100``, ``@latest`` or ``@best``.
        Each process looks for itself which step is the latest: in several, while the run goes on,
        name the step. Or the checkpoint of Orbax, or one item of it, of which each process reads
        its blocks by itself. If ``like`` has several children, which all are items of it, the tree
        is the dict of these items, with a ``PerProcess`` for the state of a grain iterator.
      like: the tree to restore. ``GlobalArray``s, ``PaddedArray``s, ``jax.Array``s and
        ``ShapeDtypeStruct``s with a sharding give shape, dtype and layout; their data is not
        needed. Each leaf comes back as its example is, so that a jitted step is not traced again:
        with its weak type and kind of memory, committed or not. A ``ShapeDtypeStruct`` gives a
        ``jax.Array``. An array of one number becomes a Python number where ``like`` has one, and a
        Python number an array. Named tuples and dataclasses come back as such only with ``like``.
        A key matches one with the same text: Orbax writes the key ``0`` as ``"0"``.
      mesh, specs: make every array a ``GlobalArray`` over the mesh, also one saved as NumPy, unless
        JAX does not have its dtype, as float64 without x64: that stays a NumPy array.
        ``specs`` is a ``PartitionSpec`` for all, a tree of them that is a prefix of the saved tree,
        or a function ``(path, leaf)`` that returns one; a path is such as ``'params/layers/0'``,
        and a leaf is a ``jax.ShapeDtypeStruct``, with ``shape``, ``dtype``, ``ndim`` and ``size``.
        A ``NamedSharding``, or a tree of them, can replace both; pass it as ``mesh``. With
        ``like``, they override its layouts only. Without any of the three every array becomes a
        NumPy array, whole, whatever it was saved from. NumPy numbers come back as such.
        PRNG keys come back as keys, in a container if they were saved in one.
      at: restore only the subtree at this path, such as ``['params']``; ``like`` and ``specs`` are
        for that subtree.
      partial: omit leaves that ``like`` does not have.
      missing: ``"keep"`` returns the leaf of ``like`` itself where the checkpoint has none, for a
        model that has grown by a layer. By default, a missing leaf is an error.
      cast: convert arrays to the dtypes of ``like``. A value that the new dtype cannot hold is an
        error, as in ``gda.load_tree``.
      pad: return a ``PaddedArray``, padded with 0, where the mesh does not divide the shape of an
        array. The other arrays are as without it. A ``PaddedArray`` in ``like`` needs no ``pad``.
      plain: return ``jax.Array``s in place of ``GlobalArray``s, those of ``like`` too. By default,
        shardings in place of mesh and specs make ``jax.Array``s, a mesh with specs makes
        containers, and ``like`` makes the kinds of its leaves.
      merge: make the values of a ``PerProcess`` if another number of processes saved it, which is
        an error otherwise. ``merge(values, count)`` takes the list of the saved values, in the
        order of the processes, and the number of processes now; it returns the new values, one for
        each process. Every process reads all values and calls it, so its result must not depend on
        the process.
      read_once: ``True`` reads a chunk that several processes need in one of them only, and sends
        its bytes to the others. Communicates: all processes with devices of the meshes must call
        this, or without a mesh all processes, with the same ``max_bytes``. Arrays on one device are
        read by its process.
      max_workers: number of files read at a time; by default the number of cores, from 2 to 32, and
        32 on an object store.
      max_bytes: bound on host memory beyond the arrays themselves; one chunk is always allowed.
        With ``read_once``, parts of chunks that were read for other processes come on top.
      timeout: seconds to wait for the other processes, and for each answer of an object store, as
        for ``save``.
      progress: ``True`` shows bytes and rate of the reads of this process on stderr, which needs
        the extra ``progress``; or a function ``(nbytes_done, nbytes_total)``.

    Returns:
      the tree.

    Raises:
      CheckpointNotFoundError: there is no complete checkpoint; it is a ``FileNotFoundError``.
      CorruptionError: a file is damaged or missing; the message names array, chunk and file.
      ValueError: the checkpoint does not fit ``like`` or ``specs``, such as a leaf of another
        shape, dtype or kind; or ``plain`` is given with ``pad`` or a ``PaddedArray`` in ``like``;
        nothing was read.
      DoesNotFitError: with ``cast``, a value does not fit its new dtype.
      KeyError: there is nothing at ``at``.
      ImportError: fastcrc is not installed, or rich for ``progress=True``.
      RuntimeError: the checkpoint was replaced while it was read.
      OSError: reading failed for another reason; the message names the file.
      DisagreementError, LateProcessError: with ``read_once``, another process failed, did not
        arrive in time, or restores something else.

    >>> import gda, jax, numpy as np, tempfile
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> w = gda.GlobalArray.from_callback((8, 2), mesh, P('x'), lambda i: np.ones((2, 2)))
    >>> folder = tempfile.TemporaryDirectory()
    >>> gda.checkpoint.save(folder.name, {'w': w, 'step': 3})
    >>> tree = gda.checkpoint.restore(folder.name, mesh=mesh, specs={'w': P(None, 'y')})
    >>> tree['w']
    GlobalArray(shape=(8, 2), dtype=float32, mesh={'x': 4, 'y': 2}, spec=P(None, 'y'))
    >>> tree['step']
    3
    >>> folder.cleanup()
    """
    checksums.require_crc32c()
    if missing not in ("error", "keep"):
        raise ValueError(f"missing must be 'error' or 'keep', not {missing!r}")
    path = path_of(path, timeout)
    options = Options(max_workers, max_bytes, progress, read_once=read_once)
    request = Request(like, mesh, specs, at, partial, pad, plain, cast, missing == "keep", merge)
    try:
        return restored(open_store(path, timeout), request, options, timeout, path)
    finally:
        if not read_once:
            tells_alone(_NAME, "read_once is False")


def restored(
    store: Store, request: Request, options: Options, timeout: float, path: Any = None
) -> Any:
    """Return the requested tree of the checkpoint in a store; its path is for one of Orbax."""
    return _Restore(path, store, options, request, timeout).tree()


@dataclass
class _Restore:
    """A restore, whose methods are its steps in order; processes ``together`` share reads."""

    path: Any
    store: Store
    options: Options
    request: Request
    timeout: float
    # The processes that read each chunk once for all of them.
    together: tuple[int, ...] = field(default=(), init=False)

    def tree(self) -> Any:
        """Return the restored tree."""
        try:
            manifest = load_complete(self.store)
        except CheckpointNotFoundError:
            if kind_at(self.store) is not FileKind.ORBAX:
                raise
            manifest = None
        restored = self._tree_of_orbax() if manifest is None else self._tree_of(manifest)
        if self.wanted.difference and jax.process_index() == 0:
            log.info("restored %s in part: %s", self.store.url, self.wanted.difference)
        return restored

    def _tree_of(self, manifest: Manifest) -> Any:
        self.files = Files(self.store, manifest)
        self.wanted = self.request.match(manifest)
        if self.options.read_once:
            self.together = processes_together(self.wanted.arrivals)
        try:
            # Before the processes meet, so that all learn of a damaged file of one process.
            for leaf in self.wanted.per_process:
                value_of = functools.partial(self.files.value_of, leaf)
                self.wanted.values[leaf.path] = PerProcess(self._value_of(leaf, value_of))
            if self.options.read_once:
                self._compare_calls()
            self._read_all(options_for(self.store, self.options))
        except CorruptionError:
            check_not_replaced(self.store, manifest)
            raise
        return self.wanted.tree()

    def _tree_of_orbax(self) -> Any:
        like = None if self.request.at else self.request.like
        tree, leaves = recorded(open_tree(self.path, self.timeout, like))
        wanted = self.wanted = self.request.match(tree)
        for leaf in wanted.per_process:
            wanted.values[leaf.path] = PerProcess(self._value_of(leaf, leaves[leaf.path]))
        options = options_for(self.store, self.options, least=4)
        for group in self._groups(options):
            self._allocate(group)
            tasks.run([task for each in group for task in _reads(each, leaves)], options)
            _finish(group)
        return wanted.tree()

    def _value_of(self, leaf: PerProcessLeaf, value_of: Callable[[int], Any]) -> Any:
        """Return the value of this process, merged if another number of processes saved it."""
        merge, here = self.request.merge, jax.process_index()
        saved, count = len(leaf.files), jax.process_count()
        if saved == count or merge is None:
            return value_of(here)
        values = [value_of(process) for process in range(saved)]
        with noting_path(leaf.path):
            made = merged(merge, values, count)
        if here == 0:
            where = f"{format_path(leaf.path)} of {self.store.url}"
            log.info("%s: merged the values of %d processes for %d", where, saved, count)
        return made[here]

    def _compare_calls(self) -> None:
        arguments = {
            "checkpoint": self.files.manifest.data,
            # It decides the groups.
            "max_bytes": self.options.max_bytes if self.together else None,
        }
        seconds = min(self.timeout, timeout_of_calls())
        check_same_call(_NAME, self.wanted.layouts, arguments, self.together, seconds)

    def _read_all(self, options: Options) -> None:
        """Read the needed chunks, of as many arrays at a time as the bound on memory allows."""
        manifest, together = self.files.manifest, self.together
        groups = [(group, uses_of(group, manifest)) for group in self._groups(options)]
        chunks = [chunk for _, uses in groups for chunk in uses]
        if not together:  # before memory is allocated
            self.files.check_sizes(chunks, options)
        total = sum(manifest.arrays[array].nbytes_per_chunk for array, _ in chunks)
        with counting(options.progress, "restore", total) as add:
            for group, uses in groups:
                arrived = ArrivedChunks(manifest, {*uses}, add)
                self._allocate(group)
                if together:
                    self._read_once(group, options, arrived)
                else:
                    read_chunks(self.files, uses, options, arrived)
                arrived(*uses)  # those that other processes have read too
                _finish(group)

    def _groups(self, options: Options) -> list[list[Arrival]]:
        """Return the arrays in groups, the same in all processes that read together."""
        # Only bytes that pass through the host: memory that becomes an array needs no bound.
        every, together = self.wanted.arrivals, self.together
        sizes = [each.most_passing_nbytes if together else each.passing_nbytes for each in every]
        return [*groups_within(every, sizes, options.max_bytes)]

    def _allocate(self, group: Sequence[Arrival]) -> None:
        buffers = Buffers(sum(len(arrival.boxes) for arrival in group))
        for arrival in group:
            with noting_path(arrival.record.path):
                arrival.allocate(buffers, () if self.together else arrival.made_of_chunks)

    def _read_once(
        self, group: Sequence[Arrival], options: Options, arrived: ArrivedChunks
    ) -> None:
        """Read the chunks of this process, for itself and others, and exchange them."""
        shared = shared_reads(self.files.manifest, group, self.together)
        with watching(_NAME, self.together) as watch:
            self.files.check_sizes([*shared.own], options)
            read_chunks(self.files, shared.own, options, arrived)
            exchange(shared.sent, shared.memory, watch)


def _reads(arrival: Arrival, leaves: Mapping[Path, Any]) -> Iterator[tasks.Task]:
    """Yield the reads of an array of an opened tree; elements of several blocks are read once."""
    leaf, itemsize = leaves[arrival.record.path], arrival.record.dtype.itemsize
    source = jax.random.key_data(leaf) if are_keys(leaf) else leaf
    chunks, box_bytes = source_of(source).chunks, source_of(source).read_bytes

    def read(move: BoxMove) -> Any:
        with noting_path(arrival.record.path):
            return np.asarray(source[move.box])

    def fill(move: BoxMove, box: Any) -> None:
        for part in move.parts:
            arrival.blocks[part.block][part.in_block] = box[part.in_box]

    blocks, shape = arrival.boxes, arrival.record.shape
    for moves in cover(blocks, shape, chunks, itemsize, box_bytes=box_bytes, splits_blocks=False):
        for move in moves:
            nbytes = math.prod(sizes_of(move.box)) * itemsize
            yield tasks.Task(nbytes, functools.partial(read, move), functools.partial(fill, move))


def _finish(group: Sequence[Arrival]) -> None:
    for arrival in group:
        with noting_path(arrival.record.path):
            arrival.finish()
    # Blocks on the host must live until they are transferred.
    jax.block_until_ready([arrival.value for arrival in group if not arrival.stays_on_host])
