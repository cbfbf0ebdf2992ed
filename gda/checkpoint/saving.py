"""The save: every process writes its chunks, then process 0 commits by writing the manifest.

A save writes into a new directory. Until the manifest names that directory, the path has its old
contents; from then on it has the new checkpoint. There is no state in between, whenever a process
dies.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, Self, TypeVar

import jax

from gda.checkpoint.format import manifest_json
from gda.checkpoint.format.files_at import has_manifest, names_at
from gda.checkpoint.format.manifest import Manifest, StoredArray
from gda.checkpoint.pending import Pending
from gda.checkpoint.reading.checked_files import load_complete
from gda.checkpoint.step_folders.folder import BEGUN
from gda.checkpoint.writing.linking import Links
from gda.checkpoint.writing.writer import Share, Writer, is_packed
from gda.layout.boundary import set_module
from gda.layout.distribution import DISTRIBUTION
from gda.layout.text import join_some
from gda.multihost.agreement import (
    call_fields,
    communicates,
    timeout_of_checks,
    wait_for_arrays,
)
from gda.multihost.descriptions import Description
from gda.multihost.meeting import DisagreementError, LateProcessError
from gda.multihost.shared_folders import LATE_SECONDS, check_all_see, is_known, sees
from gda.multihost.steps import Done, all_do
from gda.storage.options import Options, ProgressLike, Retry
from gda.storage.stores import checksums
from gda.storage.stores.directory import FileStore
from gda.storage.stores.errors import CheckpointNotFoundError, SaveError
from gda.storage.stores.opening import Store, open_store
from gda.trees.files.step_names import check_names_no_step
from gda.trees.records.recorded_tree import Leaf, Path, flatten
from gda.trees.records.saved_leaves import (
    Given,
    GivenLeaf,
    SavedLeaf,
    check_same_values,
    given_leaves,
    values_of,
    with_blocks,
    without_ties,
)

T = TypeVar("T")

MAX_BYTES = 64 * 2**20
# Files. Most wait for the disk together: fsync of one waits for the data of others in the journal
# of ext4. With 8, it was idle four times in 512 MiB while all copied.
_AT_A_TIME = 32

_NEW = f"{manifest_json.NAME}.new"  # of a save that is committing, in a directory
# Stands for a base that cannot be read: no arrays, and a name that no readable one has.
_EMPTY = Manifest(leaves=(), structure=None, data="", arrays=(), about={})

# All processes raise these, because a caller may want to catch them.
_SHARED = (FileExistsError, CheckpointNotFoundError, DisagreementError)


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
      FileExistsError: the path has a checkpoint, without ``overwrite``, or other files, or it names
        a step of a run, as ``runs/a@100`` does.
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
        saving.commit(saving.link(saving.take(saving.begin(tree))))


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
    with Save("gda.checkpoint.save_async", path, agreed, options, timeout) as saving:
        return in_background(saving, saving.begin(tree))


def in_background(
    saving: Save,
    begun: Begun,
    completed: Callable[[CommittedSave, float], None] = lambda written, free_since: None,
    failed: Callable[[], None] = lambda: None,
) -> Pending:
    """Start a thread that finishes a save, and leaves its context in place of the caller.

    After an error it calls ``failed``. When the checkpoint is complete, process 0 calls
    ``completed`` with the time since which the caller goes on.
    """
    taken = saving.take(begun, keeps=True)
    pending = Pending(saving.store.url)
    free_since = time.monotonic()
    # After Ctrl-C, this thread must not remove the files that the other one writes.
    left = saving._held.pop_all()

    def finish() -> None:
        try:
            with left:
                written = saving.commit(saving.link(taken))
        except BaseException:
            failed()
            raise
        if jax.process_index() == 0:
            completed(written, free_since)

    # By its name, the thread is known to communicate.
    pending._start(finish, f"gda-save-{begun.claim.data}")
    error = taken.share.exception()
    if error is not None and not isinstance(error, Exception):
        raise error  # Ctrl-C, here and now; the thread tells the others
    return pending


@dataclass(frozen=True)
class Begun:
    """A save that all processes have begun: the leaves of its tree, and the claim of its path."""

    structure: Any  # of the tree, as JSON
    given: Sequence[Given]  # which has tied leaves once
    numbers: dict[Path, int]  # of each leaf among these
    claim: Claim
    base: Store | None
    looks: bool = False  # True to look if all processes see the folder
    compares: bool = False  # True to compare arrays that devices may still compute

    @property
    def has_large(self) -> bool:
        """True if one of its arrays is not packed."""
        return any(isinstance(x, GivenLeaf) and not is_packed(x.record) for x in self.given)


@dataclass(frozen=True)
class Taken:
    """A save with its values.

    Attributes:
      begun: without the leaves, which are the user's arrays.
      share: the part of this process, or its error, which the next meeting tells the others.
      linkable: this store and that of the base, if an array may be linked; equal in all processes.
    """

    begun: Begun
    share: Future[Share]
    linkable: tuple[FileStore, FileStore] | None


class CommittedSave(NamedTuple):
    """The bytes and the seconds of a save that is complete.

    Attributes:
      seconds: that each process wrote.
      nbytes: of all chunks, written and linked.
      nbytes_linked: those of linked ones.
    """

    seconds: list[float]
    nbytes: int
    nbytes_linked: int


class Save:
    """A save, whose methods are its steps in their order.

    Each step takes the result of the one before. ``begin`` and ``commit`` are one meeting each: all
    processes succeed, or all raise. So is ``take`` if something is left to compare, and ``link`` if
    something may be linked. The context keeps other saves out, and after an error it removes the
    new data.

    Args:
      name: of the public function.
      agreed: the options that must be the same in all processes.
      before_commit: called in process 0 when all is written; if it raises, nothing is committed.
    """

    is_shared = True  # False if each host has a folder of its own

    def __init__(
        self,
        name: str,
        path: Any,
        agreed: dict[str, Any],
        options: Options,
        timeout: float,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        checksums.require_crc32c()
        base = agreed.get("base")
        self.store = open_store(path, timeout)
        self._base = None if base is None else open_store(base, timeout)
        self._name, self._agreed, self._timeout = name, agreed, timeout
        self._options, self._before_commit = options, before_commit
        self._held = contextlib.ExitStack()  # the path, in process 0
        self._may_be_committed = False  # True as soon as the new manifest may be there

    def __enter__(self) -> Self:
        return self

    def begin(self, tree: Any) -> Begun:
        """Compare the calls of all processes; process 0 claims the path. Waits for no array."""
        seconds = min(self._timeout, timeout_of_checks())
        meet = partial(all_do, timeout=seconds, failed=SaveError, shared=_SHARED)
        begun, _ = self.begin_if(lambda _: (True, None), None, tree, meet)
        assert begun is not None
        return begun

    def begin_if(
        self,
        decide: Callable[[list[Any]], tuple[bool, Any]],
        brings: Any,
        tree: Any,
        meet: Callable[..., Done[Any]],
    ) -> tuple[Begun | None, Any]:
        """Begin as ``begin``, if process 0 decides so.

        Args:
          decide: called in process 0 with the ``brings`` of all processes, before it claims the
            path. Returns False to begin nothing, and a value of JSON that this returns in all.
          brings: a value of JSON for ``decide``.
          meet: ``all_do`` with its timeout and errors.
        """
        base = None if self._base is None else self._base.url
        arguments = {"path": self.store.url, **self._agreed, "base": base}
        claim: Claim | None = None

        def work() -> Begun:
            structure, leaves = flatten(tree)
            given, numbers = without_ties(leaves, given_leaves(leaves, self._options))
            paths = (path for path, _ in leaves)
            of_paths = dict(zip(paths, numbers, strict=True))
            return Begun(structure, given, of_paths, Claim(""), self._base)

        def agreed(begun: Begun) -> Description:
            values, numbers = values_of(begun.given), begun.numbers
            tied = len(begun.given) < len(numbers)
            told = {**arguments, "tied arrays": [*numbers.values()]} if tied else arguments
            return call_fields(tree, told) | {(p, "value"): text for p, text in values.items()}

        def share(begun: Begun) -> dict[str, Any]:
            if jax.process_count() == 1:
                return {"brings": brings, "compares": False, "looks": False}
            compares = any(isinstance(x, GivenLeaf) and x.is_on_own_device for x in begun.given)
            is_folder = self.is_shared and isinstance(self.store, FileStore)
            looks = is_folder and not is_known(self.store.url)
            return {"brings": brings, "compares": compares, "looks": looks}

        def begin(parts: dict[int, Any]) -> dict[str, Any]:
            nonlocal claim
            begins, told = decide([part["brings"] for part in parts.values()])
            looks, compares = [
                any(part[what] for part in parts.values()) for what in ("looks", "compares")
            ]
            claim = self._claimed(looks) if begins else None
            data = None if claim is None else claim.data
            return {"data": data, "told": told, "looks": looks, "compares": compares}

        try:
            begun, decision = meet(
                work,
                what=self._name,
                agreed=agreed,
                share=share,
                decide=begin,
                deciding=self._timeout,
            )
        except LateProcessError as error:
            error.add_note("gda: every process of the program must call save, not process 0 alone")
            raise
        if decision["data"] is None:
            return None, decision["told"]
        claim = claim or Claim(decision["data"])
        looks, compares = decision["looks"], decision["compares"]
        return replace(begun, claim=claim, looks=looks, compares=compares), decision["told"]

    def _claimed(self, looks: bool) -> Claim:
        """Claim the path in process 0."""
        if "@" in self.store.url:
            check_names_no_step(self.store.url, self._timeout)
        base = None if self._base is None else load_complete(self._base)
        claim = self._held.enter_context(_claimed(self.store, self._agreed["overwrite"]))
        self._held.push(partial(self._undo, claim.data))
        if looks and isinstance(self.store, FileStore):
            self.store.make(claim.data)
        return replace(claim, base=base)

    def take(self, begun: Begun, keeps: bool = False) -> Taken:
        """Take the values. With ``keeps``, the caller may do anything with the arrays afterwards.

        All processes meet if this folder is new to the program, or to compare arrays that each
        process has on a device of its own, before anything is written.
        """
        linkable = None
        if isinstance(self.store, FileStore) and isinstance(begun.base, FileStore):
            linkable = (self.store, begun.base) if begun.has_large else None
        # An accelerator then copies only what is written. On CPU nothing is copied, and the sums
        # need not hold the caller.
        links_first = keeps and linkable is not None and jax.default_backend() != "cpu"
        take = partial(self._take, begun, keeps and not links_first)

        def decide(parts: dict[int, Any]) -> list[int]:
            if blind := [process for process, part in parts.items() if not part["sees"]]:
                return blind
            check_same_values([part["values"] for part in parts.values()])
            return []

        if begun.looks or begun.compares:
            seconds = self._timeout + LATE_SECONDS
            done = self._together("beginning", take, decide, lambda mine: mine[1], seconds)
            if begun.looks:
                check_all_see(self.store.url, done.decision)
            share = _tried(lambda: done.mine[0])
        else:
            share = _tried(lambda: take()[0])
        taken = Taken(replace(begun, given=()), share, linkable)
        return self.link(taken, keeps=True) if links_first else taken

    def _take(self, begun: Begun, keeps: bool) -> tuple[Share, dict[str, Any]]:
        """Return the part of this process, and the values that process 0 compares."""
        if begun.looks and not sees(partial(self._sees, begun.claim)):
            return Share(()), {"sees": False}
        # Only now: a process cannot meet while it waits for arrays that it computes with others.
        wait_for_arrays(self._name, [x.array for x in begun.given if isinstance(x, GivenLeaf)])
        share, values = Share(with_blocks(begun.given)), {}
        if begun.compares:
            leaves = [each for each in share.leaves if isinstance(each, SavedLeaf)]
            values = values_of([each for each in leaves if isinstance(each.own, jax.Array)])
        return share.kept() if keeps else share, {"sees": True, "values": values}

    def _sees(self, claim: Claim) -> bool:
        try:
            self.store.entries(claim.data)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def link(self, taken: Taken, keeps: bool = False) -> Taken:
        """Link arrays that equal the base, once, if there is one; ``keeps`` is that of ``take``."""
        if taken.linkable is None:
            return taken
        stores, claim = taken.linkable, taken.begun.claim

        def compare() -> tuple[Links, Share, dict[str, Any]]:
            base = claim.base or self._read_base(stores[1])
            links = Links(self._writer(claim), *stores, base)
            return links, *links.compared(taken.share.result())

        compared = _tried(compare)

        def decide(parts: dict[int, dict[str, Any]]) -> list[int]:
            links, share, _ = compared.result()
            return links.unchanged(share, [*parts.values()])

        done = self._together("comparing", compared.result, decide, lambda mine: mine[2])

        def link() -> Share:
            links, share, _ = done.mine
            share = links.linked(share, done.decision)
            return share.kept() if keeps else share

        return replace(taken, share=_tried(link), linkable=None)

    def _read_base(self, base: Store) -> Manifest:
        try:
            return load_complete(base)
        except (OSError, ValueError) as error:
            if self._agreed.get("base") is not None:
                raise
            logging.getLogger("gda").warning("nothing is linked to %s: %s", base.url, error)
            return _EMPTY

    def _writer(self, claim: Claim) -> Writer:
        at_a_time = self._options.max_workers or _AT_A_TIME
        return Writer(self.store, claim.data, replace(self._options, max_workers=at_a_time))

    def commit(self, taken: Taken) -> CommittedSave:
        """Write the chunks of this process; then process 0 commits, and removes the old data."""
        writer = self._writer(taken.begun.claim)

        def write() -> dict[str, Any]:
            share, begun = taken.share.result(), time.monotonic()
            written = self._written(writer, share)
            linked = sum(each.nbytes for each in share.linked)
            return {"written": written, "linked": linked, "seconds": time.monotonic() - begun}

        def commit(parts: dict[int, Any]) -> CommittedSave:
            self._before_commit()
            written = [part["written"] for part in parts.values()]
            manifest = _manifest(taken.begun, *writer.records(taken.share.result(), written))
            self._replace_manifest(taken.begun.claim, manifest, writer)
            linked = sum(part["linked"] for part in parts.values())
            seconds = [part["seconds"] for part in parts.values()]
            return CommittedSave(seconds, manifest.nbytes_of_chunks, linked)

        committed = CommittedSave(*self._together("writing", write, commit).decision)
        self._complete(taken.begun.claim)
        return committed

    def _written(self, writer: Writer, share: Share) -> dict[str, Any]:
        return writer.write(share)

    def _complete(self, claim: Claim) -> None:
        """Remove what the new checkpoint has replaced."""
        for name in claim.replaced:
            _remove(self.store, name)

    def _replace_manifest(self, claim: Claim, manifest: Manifest, writer: Writer) -> None:
        file = manifest_json.dump(manifest)
        try:
            with self.store.replacing(manifest_json.NAME, file, claim.version):
                writer.check_written(manifest)
                self._may_be_committed = True
        except SaveError:
            self._may_be_committed = False
            raise

    def _together(
        self,
        step: str,
        work: Callable[[], T],
        decide: Callable[[dict[int, Any]], Any],
        share: Callable[[T], Any] = lambda mine: mine,
        timeout: float = 0,
    ) -> Done[T]:
        """Do a step of all processes; ``decide`` takes their ``share``s in process 0."""
        return all_do(
            work,
            share=share,
            decide=decide,
            what=f"{step} the checkpoint {self.store.url}",
            timeout=timeout or self._timeout,
            deciding=self._timeout,
            failed=SaveError,
            shared=_SHARED,
        )

    def __exit__(self, *error: Any) -> None:
        self._held.__exit__(*error)

    def _undo(self, data: str, _: object, error: BaseException | None, __: object) -> None:
        """Remove the new data after an error, before other saves may begin."""
        if error is not None and not self._may_be_committed:
            with contextlib.suppress(Exception):
                self.store.remove(data)
            error.add_note(
                f"gda: nothing was committed to {self.store.url}; its old contents are unchanged"
            )


def _tried(work: Callable[[], T]) -> Future[T]:
    """Run ``work``; with other processes, keep its error for the next meeting."""
    tried: Future[T] = Future()
    try:
        tried.set_result(work())
    except BaseException as error:
        if jax.process_count() == 1:
            raise
        tried.set_exception(error)
    return tried


def _manifest(begun: Begun, arrays: Sequence[StoredArray], leaves: Sequence[Leaf]) -> Manifest:
    return Manifest(
        data=begun.claim.data,
        arrays=tuple(arrays),
        leaves=tuple(
            leaf if (leaf := leaves[number]).path == path else replace(leaf, path=path)
            for path, number in begun.numbers.items()
        ),
        structure=begun.structure,
        about=_about(),
    )


# The path of a save.


@dataclass(frozen=True)
class Claim:
    """The directory of a save; in process 0 also the state of the path before."""

    data: str  # a new directory
    replaced: tuple[str, ...] = ()  # names at the top level, to remove after the commit
    version: bytes | None = None  # of the present manifest, for the store to detect a change
    base: Manifest | None = None  # of the user's base


@contextlib.contextmanager
def _claimed(store: Store, overwrite: bool) -> Iterator[Claim]:
    """Keep other saves out of the path, if the store has locks, and give the claim."""
    if not store.is_remote:
        # Before the lock file is made, which must not go into a directory of another program.
        _names_to_save_beside(store, overwrite)
    with store.lock() as is_locked:
        version = store.version(manifest_json.NAME)  # first, to detect later changes
        committed: str | None = ""
        try:
            committed = manifest_json.data_in(store)
        except FileNotFoundError:
            pass
        except ValueError:  # damaged, or of a newer gda: then the data in use is unknown
            committed = None
        entries = _names_to_save_beside(store, overwrite)
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
        yield Claim(new_data(), tuple(before), version)


def new_data() -> str:
    """Return the name of a new directory for the data of a save."""
    return f"data-{uuid.uuid4().hex[:16]}"


def _remove(store: Store, name: str) -> None:
    """Remove data that is no longer used; a failure is only logged."""
    try:
        store.remove(name)
    except OSError as error:
        logging.getLogger("gda").warning(
            "%s is no longer used and could not be removed: %s; remove it", store.join(name), error
        )


def _names_to_save_beside(store: Store, overwrite: bool) -> list[str]:
    """Return the names at the path of a save; raise unless it may save there."""
    if (names := names_at(store)) is None:
        raise NotADirectoryError(
            f"{store.url} is a file, or below one; expected is a directory, or a path that does "
            "not exist. Choose another path"
        )
    others = [name for name in names if not manifest_json.DATA_PATTERN.fullmatch(name)]
    foreign = [name for name in others if name not in (manifest_json.NAME, _NEW, BEGUN)]
    # Beside a checkpoint, complete or not, other files are ignored.
    if foreign and foreign == names:
        raise FileExistsError(
            f"{store.url} is not empty and not a checkpoint: it has {join_some(foreign)}. "
            "Save into a directory of its own"
        )
    if manifest_json.NAME not in names:
        return names
    where = store.join(manifest_json.NAME)
    try:
        is_ours = has_manifest(store)
    except ValueError as error:
        raise FileExistsError(f"{where} {error}; remove it") from None
    # Beside data of a save, it is a damaged manifest of gda.
    if others == names and not is_ours:
        raise FileExistsError(
            f"{where} is of another program: it does not begin like a manifest of gda. Save into a "
            "directory of its own"
        )
    if not overwrite:
        raise FileExistsError(
            f"there is a checkpoint at {store.url}; pass overwrite=True to replace it"
        )
    return names


@functools.cache  # a few ms
def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:  # run from its sources, or its metadata is unreadable
        return "unknown"


def _about() -> dict[str, Any]:
    return {
        "gda": _version(),
        "jax": jax.__version__,
        "processes": jax.process_count(),
        "saved": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
