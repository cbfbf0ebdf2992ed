"""The contents of a checkpoint, and the check of all its files. Needs no device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gda.checkpoint.format.files_at import FileKind, kind_at
from gda.checkpoint.format.manifest import Manifest, StoredArray
from gda.checkpoint.reading.checked_files import (
    Files,
    check_not_replaced,
    load_complete,
)
from gda.checkpoint.step_folders.folder import path_of
from gda.checkpoint.tree_at import open_tree, recorded
from gda.layout.boundary import public, set_module
from gda.layout.text import counted, format_bytes, join_some, printable
from gda.show.report import Report, Table
from gda.storage import tasks
from gda.storage.options import Options, ProgressLike, counting
from gda.storage.stores import checksums
from gda.storage.stores.directory import FileStore
from gda.storage.stores.errors import CheckpointNotFoundError, CorruptionError, repr_of
from gda.storage.stores.opening import Store, open_store, options_for
from gda.trees.name_ranges import alike_in_ranges, counted_name
from gda.trees.records.recorded_tree import (
    ArrayLeaf,
    Leaf,
    PerProcessLeaf,
    ValueLeaf,
    format_path,
)

MAX_BYTES = 128 * 2**20
JSON_VERSION = 1  # of what ``gda inspect --json`` prints; fields may be added to a version


@set_module("gda.checkpoint")
@dataclass(frozen=True, repr=False)
class Contents(Report):
    """The contents of a checkpoint, safetensors files or an Orbax run; ``print`` shows a table.

    In the table, leaves share a row if their paths differ only in numbers, and all else is equal.

    Attributes:
      path: its path or URL.
      data: the path or URL of its zarr arrays, for any tool that reads zarr v3; empty for files
        that are no checkpoint.
      leaves: the leaves of the tree; ``leaf.array`` and ``piece.array`` are indices of ``arrays``.
      arrays: the zarr arrays, by name below ``data``. A leaf of 1 MiB or more has its own.
      nbytes: bytes of all arrays together; leaves that are tied to one array count once.
      about: date of the save, versions of gda and JAX, and number of processes; of safetensors
        files, the texts of their ``metadata``.
      kind: ``'checkpoint'``, ``'safetensors'`` or ``'orbax'``.

    >>> import gda, numpy as np, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gda.checkpoint.save(folder, {'w': np.arange(4, dtype=np.int32), 'step': 1})
    ...     contents = gda.checkpoint.inspect(folder)
    >>> [leaf.path for leaf in contents.leaves], contents.nbytes
    ([('step',), ('w',)], 16)
    """

    path: str
    data: str
    leaves: tuple[Leaf, ...]
    arrays: tuple[StoredArray, ...]
    nbytes: int
    about: dict[str, Any] = field(hash=False)
    kind: str = "checkpoint"

    @property
    def shared_nbytes(self) -> int:
        """Bytes of its files in a directory that have several hard links: see ``base`` of ``save``.

        Looks at every file when it is asked for.
        """
        if not os.path.isdir(self.data):
            return 0
        folder = FileStore(self.data)
        return sum(
            array.nbytes_of_file
            for array in self.arrays
            for chunk in range(array.grid.num_chunks)
            if folder.num_links(f"{array.name}/{array.grid.key(chunk)}") > 1
        )

    def _parts(self) -> list[str | Table]:
        place = {format_path(leaf.path): n for n, leaf in enumerate(self.leaves)}
        rows = []
        for title, names, cells in alike_in_ranges((path, tuple(of)) for path, *of in self.rows):
            leaf = self.leaves[first := place[names[0]]]
            kind, size, layout = cells
            if not isinstance(leaf, ValueLeaf):
                size = format_bytes(len(names) * leaf.nbytes)
            rows.append((first, (counted_name(title, len(names)), kind, size, layout)))
        table = Table([cells for _, cells in sorted(rows)], has_names=False)
        return [*([table] if rows else []), *self.summary]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists, strings and numbers, for JSON.

        ``gda inspect --json`` prints it: see docs/checkpoints.md.
        """
        return {
            "version": JSON_VERSION,
            "kind": self.kind,
            "path": self.path,
            "data": self.data,
            "nbytes": self.nbytes,
            "nbytes_shared": self.shared_nbytes,
            "about": dict(self.about),
            "leaves": [{"path": [*leaf.path], **_facts_of(leaf)} for leaf in self.leaves],
        }

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """Path, type, size or value, and layout of each leaf, for people."""
        return [(format_path(leaf.path), *_described(leaf)) for leaf in self.leaves]

    @property
    def summary(self) -> list[str]:
        """The total and the origin, for people: two lines."""
        about = printable(", ".join(f"{key} {value}" for key, value in self.about.items()))
        leaves = counted(len(self.leaves), "leaf", "leaves")
        shared = self.shared_nbytes
        links = f" ({format_bytes(shared)} in files with several hard links)" if shared else ""
        each = sum(leaf.nbytes for leaf in self.leaves if isinstance(leaf, ArrayLeaf))
        links += ", tied leaves once" * (each > self.nbytes)
        total = f"{leaves}, {format_bytes(self.nbytes)}{links}{'; ' * bool(about)}{about:.200}"
        kind = FileKind[self.kind.upper()].value
        return [total, f"zarr arrays: {self.data}" if self.data else f"{kind}: {self.path}"]


@set_module("gda.checkpoint")
@public
def inspect(path: Any, *, timeout: float = 600) -> Contents:
    """Return the contents of a checkpoint. Reads the manifest only, and uses no device.

    Of safetensors files it reads the headers; of an Orbax run the metadata, numbers and PRNG keys.

    Args:
      path: as for ``restore``; or a safetensors file, an index, or a folder of one model.
      timeout: seconds to wait for each answer of an object store, as for ``save``.

    Raises:
      CheckpointNotFoundError: there is no complete checkpoint.
      CorruptionError: its manifest is damaged.
      ValueError: other files are damaged, or of two kinds.
      OSError: reading failed for another reason; the message names the file.

    >>> import gda, numpy as np, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> gda.checkpoint.save(folder.name, {'w': np.zeros((2, 3)), 'step': 7})
    >>> contents = gda.checkpoint.inspect(folder.name)
    >>> contents.nbytes, [leaf.path for leaf in contents.leaves]
    (48, [('step',), ('w',)])
    >>> folder.cleanup()
    """
    path = path_of(path, timeout)
    store = open_store(path, timeout)
    try:
        return _contents(store, load_complete(store))
    except CheckpointNotFoundError:
        if kind_at(store) is FileKind.CHECKPOINT:
            raise
    opened = open_tree(path, timeout, all_items=True)
    leaves = recorded(opened)[0].leaves
    nbytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, ArrayLeaf))
    about, kind = dict(opened.metadata), opened.kind.name.lower()
    return Contents(opened.url, "", leaves, (), nbytes, about, kind)


@set_module("gda.checkpoint")
@public
def verify(
    path: Any,
    *,
    max_workers: int | None = None,
    max_bytes: int = MAX_BYTES,
    timeout: float = 600,
    progress: ProgressLike = False,
) -> Contents:
    """Read the whole checkpoint, and return its contents if nothing is damaged.

    Uses no device. Compares every chunk with the checksum at its end and with the one in the
    manifest, and the metadata of every zarr array with the manifest.

    Args:
      path: as for ``restore``.
      max_workers: number of files read at a time, as for ``restore``.
      max_bytes: bound on the memory; one chunk is always allowed.
      timeout: seconds to wait for each answer of an object store, as for ``save``.
      progress: ``True`` shows bytes and rate (extra ``progress``); a function is called with
        ``(nbytes_done, nbytes_total)``.

    Raises:
      CheckpointNotFoundError: there is no complete checkpoint.
      CorruptionError: something is damaged or missing; ``problems`` has a line for each file.
      RuntimeError: the checkpoint was replaced meanwhile.
      OSError: reading failed for another reason; the message names the file.

    >>> import gda, numpy as np, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> gda.checkpoint.save(folder.name, {'w': np.zeros((2, 3))})
    >>> gda.checkpoint.verify(folder.name).nbytes
    48
    >>> folder.cleanup()
    """
    checksums.require_crc32c()
    store = open_store(path_of(path, timeout), timeout)
    options = options_for(store, Options(max_workers, max_bytes, progress))
    return _verified(store, load_complete(store), options)


def _verified(store: Store, manifest: Manifest, options: Options) -> Contents:
    files = Files(store, manifest)
    problems: list[str] = []
    total = manifest.nbytes_of_chunks + sum(leaf.nbytes for leaf in manifest.per_process)
    with counting(options.progress, "verify", total) as add:

        def finish(nbytes: int, found: list[str]) -> None:
            problems.extend(found)
            add(nbytes)

        each = (
            tasks.Task(memory, partial(_problems, check), partial(finish, nbytes))
            for check, nbytes, memory in _checks(files)
        )
        tasks.run(each, options)
    if problems:
        check_not_replaced(store, manifest)
        problems.sort()
        raise CorruptionError(f"{store.url} is damaged: {join_some(problems)}", problems)
    return _contents(store, manifest)


def _contents(store: Store, manifest: Manifest) -> Contents:
    data = store.join(manifest.data)
    return Contents(
        path=store.url,
        data=os.path.abspath(data) if isinstance(store, FileStore) else data,
        leaves=manifest.leaves,
        arrays=manifest.arrays,
        nbytes=manifest.nbytes,
        about=manifest.about,
    )


def _checks(files: Files) -> Iterator[tuple[Callable[[], object], int, int]]:
    """Yield each check, the bytes of its chunk, and the memory that it takes."""
    for leaf in files.manifest.per_process:
        for process, (nbytes, _) in enumerate(leaf.files):
            yield partial(files.value_of, leaf, process), nbytes, nbytes
    for number, array in enumerate(files.manifest.arrays):
        yield partial(files.check_metadata, number), 0, 2**20
        for chunk in range(array.grid.num_chunks):
            where = (number, chunk)
            memory = array.nbytes_per_chunk + files.loading_bytes(where)
            yield partial(files.checked, where), array.nbytes_of_file, memory


def _problems(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except CorruptionError as error:
        return list(error.problems)
    return []


def _described(leaf: Leaf) -> tuple[str, str, str]:
    if isinstance(leaf, ValueLeaf):
        return type(leaf.value).__name__, f"{repr_of(leaf.value):.40}", ""
    if isinstance(leaf, PerProcessLeaf):
        processes = counted(len(leaf.files), "process", "processes")
        return "PerProcess", format_bytes(leaf.nbytes), f"the values of {processes}"
    shape = ",".join(map(str, leaf.shape))
    layout = f" {leaf.spec:.200} over {leaf.mesh!s:.200}" if leaf.spec is not None else ""
    kind = f"keys of {leaf.key_impl:.80}" if leaf.key_impl else leaf.kind
    kind = "" if kind == "source" else kind
    return f"{leaf.dtype.name}[{shape}]", format_bytes(leaf.nbytes), printable(kind + layout)


def _facts_of(leaf: Leaf) -> dict[str, Any]:
    """Return a leaf for JSON, without its path; values that JSON does not have are texts."""
    if isinstance(leaf, ValueLeaf):
        value: Any = leaf.value
        is_known = isinstance(value, bool | str) or (
            isinstance(value, int | float) and -(2**63) <= value < 2**63
        )
        return {"kind": type(value).__name__, "value": value if is_known else repr_of(value)}
    if isinstance(leaf, PerProcessLeaf):
        return {"kind": "PerProcess", "processes": len(leaf.files), "nbytes": leaf.nbytes}
    names = ("kind", "shape", "key_impl", "spec", "mesh", "fingerprint")
    facts = {name: getattr(leaf, name) for name in names}
    return {**facts, "dtype": leaf.dtype.name, "nbytes": leaf.nbytes}
