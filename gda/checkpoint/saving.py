"""Saving: every process writes its chunks, then one of them commits by writing the manifest.

A save writes into a directory of its own. Until the manifest names that directory, whatever was at
the path before is what is there; from then on it is the new checkpoint. Nothing in between exists,
whenever a process dies.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import numpy as np

from gda import coordination, reading
from gda.agreement import check_processes_agree, join_some
from gda.checkpoint import manifest as manifests
from gda.checkpoint import zarr_format
from gda.checkpoint.chunks import ChunkGrid, chunk_shape_of
from gda.checkpoint.errors import CorruptionError, SaveError
from gda.checkpoint.found import load_manifest
from gda.checkpoint.manifest import ArrayLeaf, Manifest, Piece, StoredArray, ValueLeaf
from gda.checkpoint.packing import Pack, pack
from gda.checkpoint.sources import Block, Source, on_host, sources_of
from gda.checkpoint.stores import LOCK, Store, default_workers, open_store
from gda.checkpoint.structure import flatten
from gda.meeting import meet

T = TypeVar("T")

CHUNK_BYTES = 16 * 2**20
PACKED_BELOW = 2**20  # bytes of a whole array; an array each costs some files, and these some ms
MAX_BYTES = 64 * 2**20

_names = itertools.count()


def save(
    path: Any,
    tree: Any,
    *,
    overwrite: bool = False,
    compression: str | None = None,
    fingerprint: bool = True,
    max_workers: int | None = None,
    max_bytes: int = MAX_BYTES,
    timeout: float = 600,
) -> None:
    """Save a tree; when this returns, all of it is on disk, and every process knows.

    Communicates: every process of the program must call it, with the same tree. Each writes what no
    other writes.

    Args:
      path: a directory, a URL such as ``s3://bucket/run``, or a TensorStore key-value store or the
        spec of one. Directories that are missing are made.
      tree: ``GlobalArray``s, ``jax.Array``s, NumPy arrays, PRNG keys, numbers, strings, bytes and
        ``None`` in dicts with string or integer keys, lists, tuples, named tuples and registered
        dataclasses. NumPy arrays, values and arrays of one process alone are taken to be the same
        in all processes.
      overwrite: replace the checkpoint that is there. It stays whole until the new one is.
      compression: ``"zstd"``, or ``None``: weights hardly get smaller, and saving takes longer.
      fingerprint: record ``g.fingerprint()`` of every array, for ``restore`` to compare.
      max_workers: how many files are written at a time; by default as many as there are cores,
        2 to 32, and 32 on an object store.
      max_bytes: how much host memory may be held beyond the arrays themselves; at least a chunk, or
        on accelerators a block.
      timeout: seconds to wait for the other processes to finish.

    Raises:
      FileExistsError: there is a checkpoint, and not ``overwrite``; or something else is there.
      TypeError: a leaf cannot be saved; a note says which.
      SaveError: another process failed, or another save into the path is running.
      OSError: it names the file and says what is wrong.
      DisagreementError, LateProcessError: the processes have different trees, or one did not come.

    Whatever is raised, nothing was committed and the checkpoint that was there is whole; only where
    a process dies after the last barrier but one, the new one may be there already.

    >>> import gda, jax, numpy as np, tempfile
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('x',))
    >>> w = gda.GlobalArray.from_callback((8, 2), mesh, P('x'), lambda i: np.ones((1, 2)))
    >>> folder = tempfile.TemporaryDirectory()
    >>> gda.checkpoint.save(folder.name + '/run', {'w': w, 'step': 3})
    >>> gda.checkpoint.restore(folder.name + '/run', mesh=mesh, specs=P('x'))['step']
    3
    """
    options = _Options(overwrite, compression, fingerprint, max_workers, max_bytes, timeout)
    with _begin(path, tree, options) as saving:
        saving.write()
        saving.commit()


class Pending:
    """A save that goes on in the background."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._was_asked = False

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._thread is not None and not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is complete.

        Args:
          timeout: seconds to wait; by default as long as it takes.

        Raises:
          TimeoutError: it is not complete after so many seconds; it goes on.
          Exception: what ``save`` would have raised.
        """
        assert self._thread is not None
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"saving to {self._path} is not done after {timeout:g} s")
        self._was_asked = True
        if self._error is not None:
            raise self._error

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self._error else "complete"
        return f"<save to {self._path}: {state}>"

    def _start(self, work: Callable[[], None], name: str) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error
                logging.getLogger("gda").error(
                    "saving to %s failed in the background: %s: %s",
                    self._path,
                    type(error).__name__,
                    error,
                )

        # Not a daemon: a program that ends first finishes the save.
        self._thread = threading.Thread(target=run, name=name)
        self._thread.start()


def save_async(
    path: Any,
    tree: Any,
    *,
    overwrite: bool = False,
    compression: str | None = None,
    fingerprint: bool = True,
    max_workers: int | None = None,
    max_bytes: int = MAX_BYTES,
    timeout: float = 600,
) -> Pending:
    """Begin to save a tree; when this returns, its arrays may be changed, deleted or donated.

    As ``save``, but the caller waits only until this process has copied to the host what it will
    write. A save that fails is logged, and ``result`` raises.

    Returns:
      what tells whether it is complete: ``pending.result()`` waits for it.

    Raises:
      RuntimeError: there are several processes and JAX's coordination service, through which a
        thread in the background can meet those of the others, is not there.

    >>> import gda, numpy as np, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> pending = gda.checkpoint.save_async(folder.name + '/run', {'w': np.zeros(3)})
    >>> pending.result()
    >>> gda.checkpoint.restore(folder.name + '/run')
    {'w': array([0., 0., 0.])}
    """
    options = _Options(overwrite, compression, fingerprint, max_workers, max_bytes, timeout)
    if jax.process_count() > 1 and coordination.service() is None:
        raise RuntimeError(
            "save_async needs JAX's coordination service to meet the other processes in the "
            "background, and this version of JAX keeps it where gda does not find it; use save"
        )
    with contextlib.ExitStack() as stack:
        saving = stack.enter_context(_begin(path, tree, options))
        saving.copy_to_host()
        rest = stack.pop_all()

    def finish() -> None:
        with rest:
            saving.write()
            saving.commit()

    pending = Pending(saving.store.url)
    # Threads of one name meet; all processes begin their saves in the same order.
    pending._start(finish, f"gda-save-{next(_names)}")
    return pending


@dataclass(frozen=True)
class _Options:
    overwrite: bool
    compression: str | None
    fingerprint: bool
    max_workers: int | None
    max_bytes: int
    timeout: float

    def __post_init__(self) -> None:
        if self.compression not in (None, "zstd"):
            raise ValueError(f'compression is None or "zstd", not {self.compression!r}')
        if self.max_workers is not None and self.max_workers < 1:
            raise ValueError(f"max_workers must be at least 1, not {self.max_workers}")
        if self.max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, not {self.max_bytes}")
        zarr_format.require_crc32c()
        if self.compression:
            zarr_format.require_tensorstore("zstd compression")

    @property
    def codec(self) -> str:
        return self.compression or "bytes"

    def workers(self, store: Store) -> int:
        return default_workers(store) if self.max_workers is None else self.max_workers


@contextlib.contextmanager
def _begin(path: Any, tree: Any, options: _Options) -> Iterator[_Saving]:
    """Agree on what is saved and where, and keep other saves out until this one has ended."""
    structure, leaves = flatten(tree)
    sources = sources_of(leaves)
    store = open_store(path)
    check_processes_agree(tree, name=f"the tree saved to {store.url}")
    with contextlib.ExitStack() as stack:
        found = _Found("", ())

        def look() -> str:
            nonlocal found
            if jax.process_index() == 0:
                is_locked = stack.enter_context(store.lock())
                found = _look(store, options.overwrite, is_locked)
            return found.data

        data = _together(look, "the beginning", store, options.timeout)[0]
        saving = _Saving(store, options, structure, sources, replace(found, data=data))
        try:
            yield saving
        except BaseException as error:
            saving.abandon()
            error.add_note(
                f"gda: while saving to {store.url}; nothing was committed"
                + (", the checkpoint that was there is as it was" if found.old else "")
            )
            raise


@dataclass(frozen=True)
class _Found:
    """Where to save, and what was there: directories that no longer count once it is done."""

    data: str
    old: tuple[str, ...]


def _look(store: Store, overwrite: bool, is_locked: bool) -> _Found:
    """Return where to save; refuse a path with anything that must not be lost."""
    entries = store.entries()
    foreign = [name for name in entries if not _is_ours(name)]
    if foreign:
        raise FileExistsError(
            f"{store.url} is not empty and not a checkpoint: it has {join_some(foreign)}. "
            "Save into a directory of its own"
        )
    named = None
    if manifests.NAME in entries:
        if not overwrite:
            raise FileExistsError(
                f"there is a checkpoint at {store.url}; pass overwrite=True to replace it"
            )
        with contextlib.suppress(CorruptionError):
            named = load_manifest(store).data
    before = [name for name in entries if name not in (manifests.NAME, LOCK)]
    is_damaged = manifests.NAME in entries and named is None
    if is_locked and not is_damaged:
        # Left by a save that died. Without a lock they might be of one that goes on.
        for name in before:
            if name != named:
                store.remove(name)
        before = [named] if named else []
    return _Found(f"data-{uuid.uuid4().hex[:16]}", tuple(before))


def _is_ours(name: str) -> bool:
    return name in (manifests.NAME, f"{manifests.NAME}.new", LOCK) or bool(
        manifests.DATA_PATTERN.fullmatch(name)
    )


@dataclass
class _Saving:
    """One save, as this process sees it."""

    store: Store
    options: _Options
    structure: Any
    sources: list[Source | ValueLeaf]
    found: _Found
    parts: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        arrays = [source for source in self.sources if isinstance(source, Source)]
        self._own = {s.number: _Own(s) for s in arrays if s.nbytes >= PACKED_BELOW}
        self._small = [source for source in arrays if source.number not in self._own]

    def copy_to_host(self) -> None:
        """Copy what this process writes, so that nothing of the caller's is needed any more."""
        workers = self.options.workers(self.store)
        for own in self._own.values():
            for block in own.source.blocks:
                if isinstance(block.data, jax.Array):
                    block.data.copy_to_host_async()
        for own in self._own.values():
            own.source = on_host(own.source, workers)
        self._small = [on_host(source, max_workers=1) for source in self._small]

    def write(self) -> None:
        """Write the chunks of this process, and wait until all processes have."""
        self.parts = _together(self._write, "writing", self.store, self.options.timeout)

    def _write(self) -> dict[str, Any]:
        packs = pack(self._small, self.options.codec)
        reading.run(
            itertools.chain(self._tasks(), *map(self._pack_tasks, packs)),
            max_workers=self.options.workers(self.store),
            max_bytes=self.options.max_bytes,
        )
        self.store.flush()
        return {
            "arrays": {number: own.written() for number, own in self._own.items() if own.chunks},
            "packs": [each.written() for each in packs],
        }

    def _tasks(self) -> Iterator[reading.Task]:
        for own in self._own.values():
            if jax.process_index() == 0:
                document = own.metadata(self.options.codec)
                name = f"{self.found.data}/{own.name}/zarr.json"
                yield _write_task(self.store, name, document)
            for block in own.source.blocks:
                yield from self._block_tasks(own, block)
        if jax.process_index() == 0:
            yield _write_task(self.store, f"{self.found.data}/zarr.json", zarr_format.GROUP)

    def _block_tasks(self, own: _Own, block: Block) -> Iterator[reading.Task]:
        if isinstance(block.data, jax.Array):
            block.data.copy_to_host_async()
        host = _Once(block.on_host)
        for overlap in own.grid.overlaps(block.start, own.source.block_shape):

            def write(overlap: Any = overlap) -> None:
                chunk = np.ascontiguousarray(host()[overlap.in_block])
                own.chunks[overlap.chunk] = self._write_chunk(
                    own.name, own.grid, overlap.chunk, chunk
                )

            yield reading.Task(own.chunk_bytes, write)

    def _pack_tasks(self, packed: Pack) -> Iterator[reading.Task]:
        for chunk in range(packed.grid.num_chunks):

            def write(chunk: int = chunk) -> None:
                data = packed.fill(chunk)
                packed.chunks[chunk] = self._write_chunk(packed.name, packed.grid, chunk, data)

            yield reading.Task(packed.chunk_bytes, write)
        name = f"{self.found.data}/{packed.name}/zarr.json"
        yield _write_task(self.store, name, packed.metadata)

    def _write_chunk(
        self, array: str, grid: ChunkGrid, chunk: int, data: np.ndarray[Any, Any]
    ) -> tuple[int, int]:
        """Write a chunk; return its checksum and size, without the checksum at its end."""
        if self.options.codec == "zstd":
            data = zarr_format.compress(data)
        payload = data.reshape(-1).view(np.uint8)
        crc = zarr_format.crc32c(payload)
        name = f"{self.found.data}/{array}/{grid.key(chunk)}"
        self.store.write(name, [payload, crc.to_bytes(zarr_format.CRC_BYTES, "little")])
        return crc, payload.nbytes

    def commit(self) -> None:
        """Write the manifest, make sure that every process knows, and remove what is replaced."""

        def seal() -> None:
            if jax.process_index() == 0:
                self.store.replace(manifests.NAME, manifests.dump(self._manifest()))

        _together(seal, "the commit", self.store, self.options.timeout)
        if jax.process_index() == 0:
            for name in self.found.old:
                try:
                    self.store.remove(name)
                except OSError as error:
                    logging.getLogger("gda").warning(
                        "the checkpoint at %s is complete, but what it replaced could not be "
                        "removed: %s",
                        self.store.url,
                        error,
                    )

    def abandon(self) -> None:
        """Remove what was written, as far as that is possible."""
        if jax.process_index() == 0:
            with contextlib.suppress(Exception):
                if not _is_committed(self.store, self.found.data):
                    self.store.remove(self.found.data)

    def _manifest(self) -> Manifest:
        """Return what all processes have written together."""
        arrays: list[StoredArray] = []
        place: dict[int, int] = {}
        for number, own in self._own.items():
            place[number] = len(arrays)
            arrays.append(
                own.stored(
                    [part["arrays"].get(str(number)) for part in self.parts], self.options.codec
                )
            )
        pieces: dict[int, list[Piece]] = {}
        for part in self.parts:
            for each in part["packs"]:
                for number, offset, start, shape in each["pieces"]:
                    piece = Piece(len(arrays), offset, tuple(start), tuple(shape))
                    pieces.setdefault(number, []).append(piece)
                arrays.append(_stored_pack(each, self.options.codec))
        leaves = [
            source
            if isinstance(source, ValueLeaf)
            else ArrayLeaf(
                source.path,
                source.kind,
                source.shape,
                source.dtype,
                source.key_impl,
                source.spec,
                source.mesh,
                None,
                place.get(number),
                tuple(pieces.get(number, ())),
            )
            for number, source in enumerate(self.sources)
        ]
        about = {
            "gda": gda_version(),
            "jax": jax.__version__,
            "processes": jax.process_count(),
            "saved": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        return Manifest(self.found.data, tuple(arrays), tuple(leaves), self.structure, about)


def _is_committed(store: Store, data: str) -> bool:
    try:
        return load_manifest(store).data == data
    except FileNotFoundError:
        return False


def gda_version() -> str:
    import gda

    return gda.__version__


class _Own:
    """A leaf that is an array of its own on disk."""

    def __init__(self, source: Source) -> None:
        self.source = source
        chunk_shape = chunk_shape_of(source.block_shape, source.dtype.itemsize, CHUNK_BYTES)
        self.grid = ChunkGrid(source.shape, chunk_shape)
        self.chunk_bytes = math.prod(chunk_shape) * source.dtype.itemsize
        words = re.sub(r"[^0-9A-Za-z_-]+", ".", ".".join(map(str, source.path))).strip(".")
        self.name = f"{source.number:05}.{words[:80]}".rstrip(".")
        self.chunks: dict[int, tuple[int, int]] = {}

    def metadata(self, codec: str) -> bytes:
        return zarr_format.metadata(
            self.source.shape, self.grid.chunk_shape, self.source.dtype, codec
        )

    def written(self) -> list[list[int]]:
        """Return number, checksum and size of the chunks that this process wrote."""
        return [[number, *each] for number, each in sorted(self.chunks.items())]

    def stored(self, parts: Sequence[list[list[int]] | None], codec: str) -> StoredArray:
        crcs, sizes = [-1] * self.grid.num_chunks, [0] * self.grid.num_chunks
        for number, crc, size in itertools.chain(*[part for part in parts if part]):
            crcs[number], sizes[number] = crc, size
        missing = crcs.count(-1)
        if missing:
            raise SaveError(f"{missing} chunks of {self.name} were written by no process")
        document = self.metadata(codec)
        return StoredArray(
            self.name,
            self.source.shape,
            self.grid.chunk_shape,
            self.source.dtype,
            codec,
            (len(document), zarr_format.crc32c(np.frombuffer(document, np.uint8))),
            crcs,
            sizes if codec == "zstd" else None,
        )


def _stored_pack(part: dict[str, Any], codec: str) -> StoredArray:
    return StoredArray(
        part["name"],
        tuple(part["shape"]),
        tuple(part["chunk_shape"]),
        np.dtype(manifests.dtype_of(part["dtype"])),
        codec,
        tuple(part["metadata"]),
        [crc for crc, _ in part["chunks"]],
        [size for _, size in part["chunks"]] if codec == "zstd" else None,
    )


class _Once:
    """What a function returns, which is called when first asked for; by any thread."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._guard = threading.Lock()
        self._made: list[Any] = []

    def __call__(self) -> Any:
        with self._guard:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]


def _write_task(store: Store, name: str, data: bytes) -> reading.Task:
    return reading.Task(len(data), lambda: store.write(name, [data]))


def _together(work: Callable[[], T], what: str, store: Store, timeout: float) -> list[T]:
    """Do this process's part and wait for the others; return what all did, in process 0.

    Raises:
      Exception: what ``work`` raised here.
      SaveError: it raised in another process.
      LateProcessError: another did not come.
    """
    heard: list[T] = []

    def judge(payloads: dict[int, bytes]) -> bytes:
        entries = {process: json.loads(payload) for process, payload in payloads.items()}
        failed = [f"process {i} failed: {said}" for i, (said, _) in entries.items() if said]
        heard.extend(done for _, done in entries.values())
        return json.dumps(
            [join_some(failed), heard[0] if what == "the beginning" else None]
        ).encode()

    failure: BaseException | None = None
    said: str = ""
    done: Any = None
    try:
        done = work()
    except BaseException as error:  # the others must hear of it before this process goes
        failure, said = error, f"{type(error).__name__}: {error}"[:1000]
    where = f"{what} of saving to {store.url}"
    try:
        verdict = meet(
            json.dumps([said, done]).encode(), judge, kind=where, what=where, timeout=timeout
        )
    except Exception:
        if failure is None:
            raise
        raise failure from None
    if failure is not None:
        raise failure
    failed, first = json.loads(verdict)
    if failed:
        raise SaveError(f"{where}: {failed}")
    return heard or [first]
