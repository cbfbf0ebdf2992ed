"""The save: every process writes its chunks, then process 0 commits by writing the manifest.

A save writes into a new directory. Until the manifest names that directory, the path has its old
contents; from then on it has the new checkpoint. There is no state in between, whenever a process
dies.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self

import jax

from gda.checkpoint.format import manifest_json
from gda.checkpoint.format.manifest import Manifest
from gda.checkpoint.pending import Pending
from gda.checkpoint.reading.checked_files import load_complete
from gda.checkpoint.step_folders.folder import BEGUN
from gda.checkpoint.writing.linking import Links
from gda.checkpoint.writing.writer import Share, Writer
from gda.layout.boundary import set_module
from gda.layout.distribution import DISTRIBUTION
from gda.layout.text import join_some
from gda.multihost.agreement import check_same_call, communicates, timeout_of_checks
from gda.multihost.meeting import DisagreementError, LateProcessError
from gda.multihost.steps import Done, all_do
from gda.storage.options import Options, ProgressLike, Retry
from gda.storage.stores import checksums
from gda.storage.stores.directory import LOCK, FileStore
from gda.storage.stores.errors import (
    CheckpointNotFoundError,
    CorruptionError,
    NewerFormatError,
    SaveError,
)
from gda.storage.stores.opening import Store, open_store
from gda.trees.records.recorded_tree import flatten
from gda.trees.records.saved_leaves import check_same_values, saved_leaves, values_of

MAX_BYTES = 64 * 2**20
# Files. Most wait for the disk, together: fsync of one waits for the data of others in the journal
# of ext4. With 8, it was idle four times in 512 MiB while all copied.
_AT_A_TIME = 32

_NEW = f"{manifest_json.NAME}.new"  # of a save that is committing, in a directory
# In place of a base that cannot be read: it has no array, and another name than a readable one.
_EMPTY = Manifest(leaves=(), structure=None, data="", arrays=(), about={})


@set_module("gda.checkpoint")
@communicates("gda.checkpoint.save")
def save(
    path: Any,
    tree: Any,
    *,
    overwrite: bool = False,
    base: Any = None,
    max_workers: int | None = None,
    max_bytes: int = MAX_BYTES,
    retry: Retry | None = None,
    timeout: float = 600,
    progress: ProgressLike = False,
) -> None:
    """Save a tree. When this returns, all of it is on disk, and every process knows.

    Communicates: every process of the program must call it, with the same tree. Each block is
    written by one process.

    Args:
      path: a directory, a URL such as ``s3://bucket/run``, or a TensorStore key-value store or the
        spec of one. Missing directories are made.
      tree: ``GlobalArray``s, ``PaddedArray``s, ``jax.Array``s, NumPy arrays, PRNG keys, numbers,
        strings, bytes and ``None`` in dicts with string or integer keys, lists, tuples, named
        tuples and registered dataclasses, without their static fields. Of a ``PaddedArray`` the
        elements without the padding are saved. NumPy arrays, values and arrays that only one
        process holds must be the same in all processes. Sources are saved as NumPy arrays: memory
        maps, ``zarr.Array``, ``h5py.Dataset``, TensorStore, tensors of ``open_safetensors``, and
        other objects with shape, dtype and slices. Each process reads and writes its share of
        their blocks, which consist of whole chunks of the source. The values are not compared.
        A ``PerProcess`` has a value that may differ between processes.
      overwrite: replace the present checkpoint. It stays complete until the new one is.
      base: the path of another complete checkpoint, such as the one before. An array of 1 MiB or
        more that is equal to the one at the same place of its tree, in the same chunks, becomes
        hard links to the files there: it takes no space and no time to write. Fingerprints, shapes,
        and dtypes are compared before the values leave their devices. Sources, and all
        that cannot be linked, are written: files of another file system or user, or with a changed
        size, or changed after that checkpoint was complete. An object store has no links: there
        everything is written.
      max_workers: number of files written at a time; by default 32. Sources are read one block at a
        time unless it is given, because not every library is thread-safe. A TensorStore reads
        concurrently by itself.
      max_bytes: bound on host memory beyond the arrays themselves; one chunk, of the file or of a
        source, or on accelerators one block, is always allowed. A source may need memory of its own
        while it is read.
      retry: the errors after which a block is read and written again, and how often; see
        ``gda.Retry``. By default none is.
      timeout: seconds to wait for the other processes to finish, and for each answer of an object
        store, with all attempts. At the beginning the processes wait for each other as long as in
        ``gda.check_processes_agree``, by default 60 s.
      progress: ``True`` shows bytes and rate of the writes of this process on stderr, which needs
        the extra ``progress``; or a function ``(nbytes_done, nbytes_total)``.

    Raises:
      FileExistsError: the path has a checkpoint, without ``overwrite``, or other files.
      CheckpointNotFoundError: ``base`` has no complete checkpoint.
      TypeError: a leaf cannot be saved; a note has its path.
      SaveError: another process failed, or another save into the path is running.
      OSError: a file cannot be written; the message names it.
      Exception: any error of a source, or ``ValueError`` and ``TypeError`` if its block has another
        shape or dtype than it says; a note has path and index.
      DisagreementError, LateProcessError: the processes have different trees, or one is late.

    After an error nothing was committed, and the old checkpoint is complete. Only if the error
    comes after everything was written, the new one may be complete already.

    >>> import gda, jax, numpy as np, tempfile
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('x',))
    >>> w = gda.GlobalArray.from_callback((8, 2), mesh, P('x'), lambda i: np.ones((1, 2)))
    >>> folder = tempfile.TemporaryDirectory()
    >>> gda.checkpoint.save(folder.name + '/run', {'w': w, 'step': 3})
    >>> gda.checkpoint.restore(folder.name + '/run', mesh=mesh, specs=P('x'))['step']
    3
    >>> folder.cleanup()
    """
    agreed = {"overwrite": overwrite, "base": base}
    options = Options(max_workers, max_bytes, progress, retry)
    with Save("gda.checkpoint.save", path, agreed, options, timeout) as saving:
        saving.check_same_call(tree)
        saving.begin(tree)
        saving.link()
        saving.write()
        saving.commit()


@set_module("gda.checkpoint")
@communicates("gda.checkpoint.save_async")
def save_async(
    path: Any,
    tree: Any,
    *,
    overwrite: bool = False,
    base: Any = None,
    max_workers: int | None = None,
    max_bytes: int = MAX_BYTES,
    retry: Retry | None = None,
    timeout: float = 600,
) -> Pending:
    """Begin to save a tree. When this returns, its arrays may be changed, deleted or donated.

    As ``save``, but the caller waits only until the values are safe. Blocks on CPU devices are not
    copied: until they are written, a step to which an array is donated copies them instead, so the
    save takes the memory of what is donated or deleted meanwhile. Accelerators copy their blocks to
    pinned memory of the host, as much as this process writes, and NumPy arrays are copied at once.
    All of it is free again when the save is over. Sources are read in the background: keep them
    open and unchanged until ``result`` returns.

    With ``base``, the caller waits on accelerators until the devices have computed the arrays and
    the fingerprints of those that ``base`` has in this shape, and until the files of equal ones are
    linked: only the others are copied. On CPU it does not wait for that.

    A failure is logged, and ``result`` raises it. If the program ends without a call of ``result``,
    it logs the failure again, and under ``gda.launch`` it fails. A program that ends finishes its
    saves first. In a function of ``atexit`` the save is over when this returns, because no thread
    can start there.

    Returns:
      the save; ``pending.result()`` waits until it is complete.

    >>> import gda, numpy as np, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> pending = gda.checkpoint.save_async(folder.name + '/run', {'w': np.zeros(3)})
    >>> pending.result()
    >>> gda.checkpoint.restore(folder.name + '/run')
    {'w': array([0., 0., 0.])}
    >>> folder.cleanup()
    """
    agreed = {"overwrite": overwrite, "base": base}
    options = Options(max_workers, max_bytes, retry=retry)
    return in_background(Save("gda.checkpoint.save_async", path, agreed, options, timeout), tree)


def in_background(
    save: Save,
    tree: Any,
    after: Callable[[], None] = lambda: None,
    failed: Callable[[], None] = lambda: None,
) -> Pending:
    """Begin a save, whose thread calls ``after`` when the checkpoint is complete, or ``failed``."""
    with contextlib.ExitStack() as stack:
        saving = stack.enter_context(save)
        saving.check_same_call(tree)
        saving.begin(tree, keeps=True)
        pending = Pending(saving.store.url)
        save.held_until = time.monotonic()
        # The thread leaves the context; after Ctrl-C, this one must not remove what it writes.
        stack.pop_all()

    def finish() -> None:
        try:
            saving.finish()
        except BaseException:
            failed()
            raise
        after()

    # Threads of this name communicate.
    pending._start(finish, f"gda-save-{saving.claim.data}")
    return pending


class Save:
    """One save, in this process. Its methods stand in the order of its steps.

    Each of ``check_same_call``, ``begin``, ``link``, ``write`` and ``commit`` is a step that all
    processes do together: all succeed, or all raise. The context keeps other saves out, and after
    an error it removes the new data.

    Args:
      name: of the public function.
      agreed: the options that must be the same in all processes.
      before_commit: called in process 0 when all is written; if it raises, nothing is committed.
      needs_base: False to write everything if a process cannot read the manifest of the base. On
        CPU, the caller does not wait for the read then.
    """

    claim: _Claim  # after begin(): the new directory
    _writer: Writer
    nbytes_linked: int = 0  # after link(): by all processes
    _share: Share
    _structure: Any  # of the tree, as JSON
    _parts: Sequence[dict[str, Any]]  # after write(), in process 0: those of all processes
    held_until: float  # of a save in the background: when its caller goes on
    seconds: Sequence[float]  # after write(), in process 0: that each process wrote
    nbytes: int  # after commit(), in process 0: of all chunks, written and linked

    def __init__(
        self,
        name: str,
        path: Any,
        agreed: dict[str, Any],
        options: Options,
        timeout: float,
        before_commit: Callable[[], None] = lambda: None,
        needs_base: bool = True,
    ) -> None:
        checksums.require_crc32c()
        base = agreed.get("base")
        self.store = open_store(path, timeout)
        self._base = None if base is None else open_store(base, timeout)
        self._linkable = None  # an object store has no links
        if isinstance(self.store, FileStore) and isinstance(self._base, FileStore):
            self._linkable = self.store, self._base
        self._name, self._agreed, self._timeout = name, agreed, timeout
        self._options, self._before_commit = options, before_commit
        self._needs_base = needs_base
        self._lock = contextlib.ExitStack()
        self._has_begun = self._has_linked = False
        self._base_manifest: Manifest | None = None
        self._may_be_committed = False  # True as soon as the new manifest may be there

    def __enter__(self) -> Self:
        return self

    def check_same_call(self, tree: Any) -> None:
        """Check that all processes save the same tree; the first step, with nothing slow before."""
        base = None if self._base is None else self._base.url
        arguments = {"path": self.store.url, **self._agreed, "base": base}
        seconds = min(self._timeout, timeout_of_checks())
        try:
            check_same_call(self._name, tree, arguments, timeout=seconds)
        except LateProcessError as error:
            error.add_note("gda: every process of the program must call save, not process 0 alone")
            raise

    def begin(self, tree: Any, keeps: bool = False) -> None:
        """Take the values; process 0 claims the path and names the new directory.

        With ``keeps``, the caller may do anything with the arrays afterwards.
        """
        # An accelerator then copies only what is written. On CPU nothing is copied, and the sums
        # need not hold the caller.
        links_first = self._linkable is not None and jax.default_backend() != "cpu"
        begin = partial(self._begin, tree, keeps and not links_first)
        data = self._together("beginning", begin, _check_begun).decision
        if jax.process_index() != 0:
            self.claim = _Claim(data, ())
        self._writer = Writer(
            store=self.store,
            data=data,
            options=replace(self._options, max_workers=self._options.max_workers or _AT_A_TIME),
        )
        self._has_begun = True
        if keeps and links_first:
            self.link(keeps=True)

    def _begin(self, tree: Any, keeps: bool) -> dict[str, Any]:
        """Return what process 0 compares, and from process 0 the new directory."""
        if self._base is not None and self._needs_base:
            self._base_manifest = load_complete(self._base)
        self._structure, leaves = flatten(tree)
        self._share = Share(saved_leaves(leaves, self._options))
        values = values_of(self._share.leaves) if jax.process_count() > 1 else {}
        data = None
        if jax.process_index() == 0:
            claim = _claimed(self.store, self._agreed["overwrite"])
            self.claim = self._lock.enter_context(claim)
            data = self.claim.data
        if keeps:
            self._share = self._share.kept()
        return {"values": values, "data": data}

    def _read_base(self, base: Store) -> Manifest:
        try:
            return load_complete(base)
        except (OSError, ValueError) as error:
            logging.getLogger("gda").warning("nothing is linked to %s: %s", base.url, error)
            return _EMPTY

    def link(self, keeps: bool = False) -> None:
        """Link the arrays that are those of the base; then no block of them is left to write.

        ``keeps`` is that of ``begin``. Does nothing without a base, and when it is called again.
        """
        linkable = self._linkable
        if linkable is None or self._has_linked:
            return
        self._has_linked = True
        links: Any = None

        def compare() -> dict[str, Any]:
            nonlocal links
            base = self._base_manifest or self._read_base(linkable[1])
            links = Links(self._writer, *linkable, base)
            self._share, part = links.compared(self._share)
            return part

        def decide(parts: dict[int, dict[str, Any]]) -> list[int]:
            return links.unchanged(self._share, [*parts.values()])

        def link() -> int:
            self._share = links.linked(self._share, unchanged)
            if keeps:
                self._share = self._share.kept()
            return sum(each.nbytes for each in self._share.linked)

        unchanged = self._together("comparing", compare, decide).decision
        done = self._together("linking", link, lambda parts: sum(parts.values()))
        self.nbytes_linked = done.decision

    def finish(self) -> None:
        """Do the rest of the steps, and leave the context."""
        with self:
            self.link()
            self.write()
            self.commit()

    def write(self) -> None:
        """Write the chunks of this process."""
        self._parts = self._together("writing", self._write).parts
        self.seconds = [part.pop("seconds") for part in self._parts]

    def _write(self) -> dict[str, Any]:
        begun = time.monotonic()
        return {**self._writer.write(self._share), "seconds": time.monotonic() - begun}

    def commit(self) -> None:
        """Process 0 writes the manifest; when every process knows, it removes the old data."""
        self._together("committing", self._commit)
        for name in self.claim.replaced:
            _remove(self.store, name)

    def _commit(self) -> None:
        if jax.process_index() != 0:
            return
        self._before_commit()
        arrays, leaves = self._writer.records(self._share, self._parts)
        manifest = Manifest(
            data=self.claim.data,
            arrays=arrays,
            leaves=leaves,
            structure=self._structure,
            about=_about(),
        )
        self.nbytes = manifest.nbytes_of_chunks
        file = manifest_json.dump(manifest)
        try:
            with self.store.replacing(manifest_json.NAME, file, self.claim.version):
                self._writer.check_written(manifest)
                self._may_be_committed = True
        except SaveError:
            self._may_be_committed = False
            raise

    def _together(
        self,
        step: str,
        work: Callable[[], Any],
        decide: Callable[[dict[int, Any]], Any] = lambda parts: None,
    ) -> Done[Any]:
        """Do a step of all processes; ``decide`` gets the results of ``work`` in process 0."""
        return all_do(
            work,
            decide=decide,
            what=f"{step} the checkpoint {self.store.url}",
            timeout=self._timeout,
            # All processes raise the same error if a caller may want to catch it.
            failed=SaveError,
            shared=(FileExistsError, CheckpointNotFoundError, DisagreementError),
        )

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with self._lock:
            is_first = jax.process_index() == 0
            if error is None or not self._has_begun or not is_first or self._may_be_committed:
                return
            with contextlib.suppress(Exception):
                self.store.remove(self.claim.data)
            error.add_note(
                f"gda: nothing was committed to {self.store.url}; its old contents are unchanged"
            )


def _check_begun(parts: dict[int, dict[str, Any]]) -> str:
    """Check that processes have the same values; return the directory that process 0 names."""
    check_same_values([part["values"] for part in parts.values()])
    return parts[0]["data"]


# The path of a save.


@dataclass(frozen=True)
class _Claim:
    """The directory of a save, and the data to remove after the commit."""

    data: str  # a new directory
    replaced: tuple[str, ...]  # names at the top level
    version: bytes | None = None  # of the present manifest, for the store to detect a change


@contextlib.contextmanager
def _claimed(store: Store, overwrite: bool) -> Iterator[_Claim]:
    """Keep other saves out of the path, if the store has locks, and give the claim."""
    if not store.is_remote:
        # Before the lock file is made, which must not go into a directory of another program.
        try:
            _check_may_be_saved_into(store, store.entries(), overwrite)
        except FileNotFoundError:
            pass
        except NotADirectoryError:
            raise NotADirectoryError(
                f"{store.url} is a file, or below one; expected is a directory, or a path that "
                "does not exist. Choose another path"
            ) from None
    with store.lock() as is_locked:
        version = store.version(manifest_json.NAME)  # first, to detect later changes
        committed: str | None = ""
        try:
            committed = manifest_json.load_manifest(store).data
        except FileNotFoundError:
            pass
        except (CorruptionError, NewerFormatError):  # then the data in use is unknown
            committed = None
        entries = store.entries()
        _check_may_be_saved_into(store, entries, overwrite)
        if _NEW in entries and not store.is_remote:
            if not is_locked:
                raise SaveError(
                    f"another save into {store.url} is committing, or died while committing: "
                    f"{store.join(_NEW)} exists, and this file system has no locks. If no save is "
                    "running, remove that file"
                )
            _remove(store, _NEW)
        before = [name for name in entries if manifest_json.DATA_PATTERN.fullmatch(name)]
        # Left by saves that died. Without a lock one of them may still be running.
        if is_locked and committed is not None:
            for name in before:
                if name != committed:
                    _remove(store, name)
            before = [committed] if committed in before else []
        yield _Claim(f"data-{uuid.uuid4().hex[:16]}", tuple(before), version)


def _remove(store: Store, name: str) -> None:
    """Remove data that is no longer used; a failure is only logged."""
    try:
        store.remove(name)
    except OSError as error:
        logging.getLogger("gda").warning(
            "%s is no longer used and could not be removed: %s; remove it", store.join(name), error
        )


def _check_may_be_saved_into(store: Store, entries: list[str], overwrite: bool) -> None:
    is_data = manifest_json.DATA_PATTERN.fullmatch
    others = [name for name in entries if not is_data(name)]
    foreign = [name for name in others if name not in (manifest_json.NAME, _NEW, LOCK, BEGUN)]
    # Beside a checkpoint, complete or not, other files are ignored.
    if foreign and len(foreign) + (LOCK in entries) == len(entries):
        raise FileExistsError(
            f"{store.url} is not empty and not a checkpoint: it has {join_some(foreign)}. "
            "Save into a directory of its own"
        )
    if manifest_json.NAME not in entries:
        return
    where = store.join(manifest_json.NAME)
    try:
        begin = store.head(manifest_json.NAME, manifest_json.MOST_HEADER_BYTES)
    except ValueError as error:
        raise FileExistsError(f"{where} {error}; remove it") from None
    # Beside data of a save, it is a damaged manifest of gda.
    if others == entries and manifest_json.version_in(begin) is None:
        raise FileExistsError(
            f"{where} is of another program: it does not begin like a manifest of gda. Save into a "
            "directory of its own"
        )
    if not overwrite:
        raise FileExistsError(
            f"there is a checkpoint at {store.url}; pass overwrite=True to replace it"
        )


def _about() -> dict[str, Any]:
    try:
        gda_version = version(DISTRIBUTION)
    except PackageNotFoundError:  # run from its sources, or its metadata is unreadable
        gda_version = "unknown"
    return {
        "gda": gda_version,
        "jax": jax.__version__,
        "processes": jax.process_count(),
        "saved": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
