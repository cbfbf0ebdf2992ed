"""Saving: every process writes its chunks, then one of them commits by writing the manifest.

A save writes into a directory of its own. Until the manifest names that directory, whatever was at
the path before is what is there; from then on it is the new checkpoint. Nothing in between exists,
whenever a process dies.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import jax

from gda.checkpoint.claiming import Claim, claimed, remove
from gda.checkpoint.files import Files, group_of
from gda.checkpoint.format import manifest_json, zarr_format
from gda.checkpoint.format.errors import SaveError
from gda.checkpoint.format.manifest import Manifest
from gda.checkpoint.format.structure import flatten
from gda.checkpoint.found import load_manifest
from gda.checkpoint.leaves_to_save import check_same_values, sources_of, values_of
from gda.checkpoint.stores.opening import open_store, options_for
from gda.checkpoint.stores.protocol import Store
from gda.checkpoint.writer import Share, Writer
from gda.layout.boundary import public, set_module
from gda.multihost import coordination
from gda.multihost.agreement import check_processes_agree, timeout_of_checks
from gda.multihost.meeting import DisagreementError, LateProcessError
from gda.multihost.steps import Done, all_do
from gda.storage.options import Options, ProgressLike

T = TypeVar("T")

MAX_BYTES = 64 * 2**20


@set_module("gda.checkpoint")
@public
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
    progress: ProgressLike = False,
) -> None:
    """Save a tree; when this returns, all of it is on disk, and every process knows.

    Communicates: every process of the program must call it, with the same tree. Each writes what no
    other writes.

    Args:
      path: a directory, a URL such as ``s3://bucket/run``, or a TensorStore key-value store or the
        spec of one. Directories that are missing are made.
      tree: ``GlobalArray``s, ``jax.Array``s, NumPy arrays, PRNG keys, numbers, strings, bytes and
        ``None`` in dicts with string or integer keys, lists, tuples, named tuples and registered
        dataclasses, of which static fields are not saved. NumPy arrays, values and arrays of one
        process alone must be the same in all processes.
      overwrite: replace the checkpoint that is there. It stays whole until the new one is.
      compression: ``"zstd"``, or ``None``: weights hardly get smaller, and saving takes longer.
      fingerprint: record ``g.fingerprint()`` of every array, for ``restore`` to compare. The first
        save compiles a program for each shape of a large array, which may take a second.
      max_workers: how many files are written at a time; by default as many as there are cores,
        4 to 32, and 32 on an object store.
      max_bytes: how much host memory may be held beyond the arrays themselves; at least a chunk, or
        on accelerators a block.
      timeout: seconds to wait for the other processes to finish, and for each answer of an object
        store, whose requests are repeated until then. To begin, the processes wait for each other
        only as long as ``gda.check_processes_agree`` does, by default 60 s.
      progress: ``True`` shows bytes and rate on stderr, of what this process writes, which needs
        ``pip install 'gda[progress]'``; or a function ``(nbytes_done, nbytes_total)``.

    Raises:
      FileExistsError: there is a checkpoint, and not ``overwrite``; or something else is there.
      TypeError: a leaf cannot be saved; a note says which.
      SaveError: another process failed, or another save into the path is running.
      OSError: it names the file and says what is wrong.
      DisagreementError, LateProcessError: the processes have different trees, or one did not come.

    Whatever is raised, nothing was committed and the checkpoint that was there is whole; only where
    something fails after all has been written, the new one may be there already, whole. A note of
    the error says which it is.

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
    options = _Options(
        overwrite=overwrite,
        compression=compression,
        fingerprint=fingerprint,
        timeout=timeout,
        work=Options(max_workers, max_bytes, progress),
    )
    with contextlib.ExitStack() as stack:
        saving, share = _begin(path, tree, options, stack)
        parts = saving.write(share)
        saving.commit(share, parts)


# Of saves that failed in the background and whose result was not asked for.
_unheard: list[str] = []


def unheard_failures() -> list[str]:
    """Return a line for each save that failed in the background without a call of result()."""
    return [f"{failure}; the program did not call result() of it" for failure in _unheard]


@atexit.register
def _warn_of_unheard() -> None:
    for failure in unheard_failures():
        logging.getLogger("gda").warning("%s", failure)


@set_module("gda.checkpoint")
class Pending:
    """A save that goes on in the background.

    >>> import gda, numpy as np, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pending = gda.checkpoint.save_async(folder, {'w': np.arange(4)})
    ...     pending.result()
    ...     pending.done(), gda.checkpoint.exists(folder)
    (True, True)
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._failure = ""

    def done(self) -> bool:
        """Return whether it has ended, well or not."""
        return self._thread is not None and not self._thread.is_alive()

    @public
    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is complete.

        Args:
          timeout: seconds to wait; by default as long as it takes.

        Raises:
          TimeoutError: it is not complete after so many seconds; it goes on.
          Exception: what ``save`` would have raised.
        """
        assert self._thread is not None
        self._thread.join(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        if self._thread.is_alive():
            raise TimeoutError(f"saving to {self._path} is not done after {timeout:g} s")
        if self._error is not None:
            with contextlib.suppress(ValueError):
                _unheard.remove(self._failure)
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
                kind = type(error).__name__
                self._failure = f"saving to {self._path} failed in the background: {kind}: {error}"
                _unheard.append(self._failure)
                logging.getLogger("gda").error("%s", self._failure)

        # Not a daemon: a program that ends first finishes the save.
        self._thread = threading.Thread(target=run, name=name)
        self._thread.start()


@set_module("gda.checkpoint")
@public
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
    write. A save that fails is logged, and ``result`` raises. A program that ends without having
    called ``result`` of it warns once more, and under ``gda.launch`` fails.

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
    >>> folder.cleanup()
    """
    options = _Options(
        overwrite=overwrite,
        compression=compression,
        fingerprint=fingerprint,
        timeout=timeout,
        work=Options(max_workers, max_bytes),
    )
    if jax.process_count() > 1 and coordination.service() is None:
        raise RuntimeError(
            "save_async needs JAX's coordination service to meet the other processes in the "
            "background, and this version of JAX keeps it where gda does not find it; use save"
        )
    with contextlib.ExitStack() as stack:
        saving, share = _begin(path, tree, options, stack)
        copies = saving.copy_to_host(share)
        rest = stack.pop_all()

    def finish() -> None:
        with rest:
            parts = saving.write(copies)
            saving.commit(copies, parts)

    pending = Pending(saving.store.url)
    try:
        pending._start(finish, f"gda-save-{saving.claim.data}")  # threads of one name meet
    except BaseException:
        with rest:
            raise
    return pending


@dataclass(frozen=True)
class _Options:
    overwrite: bool
    compression: str | None
    fingerprint: bool
    timeout: float
    work: Options

    def __post_init__(self) -> None:
        if self.compression not in (None, "zstd"):
            raise ValueError(f'compression is None or "zstd", not {self.compression!r}')
        zarr_format.require_crc32c()
        if self.compression:
            zarr_format.require_tensorstore("zstd compression")

    @property
    def codec(self) -> str:
        return self.compression or "bytes"


# Errors that a caller may want to catch are the same in all processes.
save_step = functools.partial(all_do, failed=SaveError, shared=(FileExistsError, DisagreementError))


def _begin(
    path: Any, tree: Any, options: _Options, stack: contextlib.ExitStack
) -> tuple[_Saving, Share]:
    """Agree on what is saved and where; keep other saves out until ``stack`` ends."""
    store = open_store(path, options.timeout)
    # All begin with this, so nothing that takes long keeps them from it.
    seconds = min(options.timeout, timeout_of_checks())
    try:
        check_processes_agree(tree, name=f"the tree saved to {store.url}", timeout=seconds)
    except LateProcessError as error:
        error.add_note("gda: every process of the program must call save, not process 0 alone")
        raise

    def claim() -> tuple[Any, Share, Claim | None]:
        structure, leaves = flatten(tree)
        share = Share(sources_of(leaves))
        if jax.process_index() != 0:
            return structure, share, None
        return structure, share, stack.enter_context(claimed(store, options.overwrite))

    def tell(begun: tuple[Any, Share, Claim | None]) -> dict[str, Any]:
        _, share, claim = begun
        values = values_of(share.sources) if jax.process_count() > 1 else {}
        return {"values": values, "data": claim and claim.data}

    def judge(parts: dict[int, Any]) -> str:
        check_same_values([part["values"] for part in parts.values()])
        return parts[0]["data"]

    what = f"beginning the checkpoint {store.url}"
    begun = save_step(claim, what=what, timeout=options.timeout, tell=tell, judge=judge)
    (structure, share, mine), data = begun.mine, begun.verdict
    writer = Writer(
        store=store,
        data=data,
        codec=options.codec,
        fingerprints=options.fingerprint,
        # Some wait for the disk while others compute checksums: 4 on 2 cores save a sixth.
        options=options_for(store, options.work, least=4),
    )
    saving = _Saving(writer, structure, mine or Claim(data, ()), options.timeout)
    stack.push(saving.abandon_after)
    return saving, share


@dataclass
class _Saving:
    """One save, as this process sees it.

    Attributes:
      structure: how the tree is put together.
      may_be_committed: whether the new manifest may be there; all else here stays as it is.
    """

    writer: Writer
    structure: Any
    claim: Claim
    timeout: float
    may_be_committed: bool = False

    @property
    def store(self) -> Store:
        return self.writer.store

    def copy_to_host(self, share: Share) -> Share:
        """Return the share in copies on the host, when all processes have copied theirs."""
        copied = self._step(
            lambda: self.writer.copy_to_host(share), "copying to the host for", lambda _: None
        )
        return copied.mine

    def write(self, share: Share) -> list[Any]:
        """Write a share; return, when all processes have, the parts of all, in process 0."""
        return self._step(lambda: self.writer.write(share), "writing").parts

    def commit(self, share: Share, parts: list[Any]) -> None:
        """Write the manifest, and return when every process knows; then remove what it replaces."""
        is_first = jax.process_index() == 0
        self.may_be_committed = not is_first
        self._step(lambda: self._seal(share, parts) if is_first else None, "committing")
        for name in self.claim.replaced:
            remove(self.store, name)

    def _seal(self, share: Share, parts: list[Any]) -> None:
        arrays, leaves = self.writer.records(share, parts)
        group = group_of(arrays)
        self.writer.write_group(group)
        manifest = Manifest(
            data=self.claim.data,
            arrays=arrays,
            leaves=leaves,
            structure=self.structure,
            about=_about(),
            group=zarr_format.size_and_crc(group),
        )
        files, options = Files(self.store, manifest), self.writer.options
        file = manifest_json.dump(manifest)
        self.may_be_committed = True
        try:
            self.store.replace(
                manifest_json.NAME, file, self.claim.version, lambda: files.check_written(options)
            )
        except SaveError:
            self.may_be_committed = False
            raise

    def _step(
        self, work: Callable[[], T], what: str, tell: Callable[[T], Any] = lambda done: done
    ) -> Done[T]:
        what = f"{what} the checkpoint {self.store.url}"
        return save_step(work, what=what, timeout=self.timeout, tell=tell)

    def abandon_after(self, _: object, error: BaseException | None, __: object) -> None:
        """After an error, remove what was written, as far as possible; note in it what is there."""
        if error is None:
            return
        is_committed = self._is_committed(error)
        if is_committed:
            error.add_note(f"gda: the checkpoint {self.store.url} is complete all the same")
            return
        if is_committed is None:
            error.add_note(
                f"gda: whether {self.store.url} is the checkpoint of before or the new one is not "
                "known; it is one of them, whole"
            )
            return
        error.add_note(
            f"gda: nothing was committed to {self.store.url}; what was there before is as it was"
        )
        if jax.process_index() == 0:
            with contextlib.suppress(Exception):
                self.store.remove(self.claim.data)

    def _is_committed(self, error: BaseException) -> bool | None:
        """Return if the manifest is there; ``None`` if that is not known, or may change yet."""
        if jax.process_index() == 0 and not self.may_be_committed:
            return False
        try:
            is_there = load_manifest(self.store).data == self.claim.data
        except FileNotFoundError:
            is_there = False
        except (OSError, ValueError):
            return None
        # An object store may yet write what it did not confirm, and process 0 what the others do
        # not wait for any more.
        is_heard = jax.process_index() == 0 or isinstance(error, SaveError)
        is_decided = is_heard and not self.store.is_remote
        return is_there or (None if self.may_be_committed and not is_decided else False)


def _about() -> dict[str, Any]:
    try:
        gda_version = version("gda")
    except PackageNotFoundError:  # run from its sources, or these cannot be read any more
        gda_version = "unknown"
    return {
        "gda": gda_version,
        "jax": jax.__version__,
        "processes": jax.process_count(),
        "saved": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
