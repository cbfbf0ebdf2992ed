"""Trees to safetensors files: each process writes its own bytes of files of known size."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gda.arrays.dtypes import is_extended
from gda.arrays.fingerprints.formula import fingerprint_of_numpy
from gda.arrays.transport.source_blocks import SourceArray, one_at_a_time
from gda.layout.boundary import set_module
from gda.layout.grid import ShardGrid
from gda.mesh import mesh_of_all
from gda.multihost.agreement import communicates, timeout_of_work, together, wait_for_arrays
from gda.multihost.descriptions import Description, describe, leaf_path
from gda.multihost.shared_folders import check_is_one_folder, is_known
from gda.multihost.steps import all_do
from gda.storage import new_files
from gda.storage.options import Options, ProgressLike, Retry, check_count, counting
from gda.storage.safetensors_format import METADATA, FileLayout, Tensor, dtype_name, file_of
from gda.storage.safetensors_model import MODEL, files_of_model, replace_model
from gda.storage.sources import apart, check_unmasked
from gda.trees.files.rows import groups_in_rows, in_rows, is_scattered
from gda.trees.files.step_names import check_names_no_step
from gda.trees.files.stripes import nbytes_of, options_for_files, sync_files, write_leaves
from gda.trees.leaves import (
    Tree,
    array_of,
    as_dicts,
    grid_of_leaf,
    is_container,
    is_source,
    names_of,
    path_of,
    with_paths,
)
from gda.trees.written_blocks import WrittenArray, written_arrays

_NAME = "gda.storage.save_safetensors"
MAX_BYTES = 64 * 2**20


@set_module("gda.storage")
@communicates(_NAME)
def save_safetensors(
    path: str | os.PathLike[str],
    tree: Tree,
    *,
    max_file_bytes: int = 5 * 2**30,
    metadata: Mapping[str, str] | None = None,
    max_workers: int | None = None,
    max_bytes: int = MAX_BYTES,
    retry: Retry | None = None,
    progress: ProgressLike = False,
) -> None:
    """Save a tree of arrays of any layout as safetensors files; nothing is gathered.

    Communicates: every process of the program must call it, with the same tree. They all write into
    one folder, each its own blocks, and replicated ones in turns. The bytes are those that the
    safetensors package writes of the same tensors.

    The files are written into a hidden folder beside their place. When all processes have written,
    and all is on disk, they take the place of those that are there. If a process fails, all raise,
    and the old files stay. If the program is killed, at whatever moment, the path has the old model
    or the new one, each whole, and the next save to this path removes what else is left.

    Args:
      path: a folder, for ``model.safetensors``, or for several files and their index
        ``model.safetensors.index.json``, named as those of published models; or a file that ends
        with ``.safetensors``. Missing folders are made. The present model of the folder is
        replaced: ``model.safetensors``, the index, and the files of such names that it lists. Other
        files stay. If the folder has safetensors files, several new ones have a random number in
        their names: ``model-0123456789abcdef-00001-of-00002.safetensors``. Read them by the index.
        If the present index names ``model.safetensors``, even a single new file has such a name and
        an index.
      tree: a pytree of ``GlobalArray``s, ``PaddedArray``s, which are saved without padding,
        ``jax.Array``s, NumPy arrays, and sources, which are read while they are written, as in
        ``gda.checkpoint.save``. NumPy arrays, and arrays that only one process holds, must be the
        same in all processes. The name of an array in the files is its path, such as
        ``'layers.0.weight'``; pass a dict by name for other names.
      max_file_bytes: the most bytes of data in a file. In a folder, a larger array has a file of
        its own.
      metadata: texts by name, for the header of every file. PyTorch's transformers wants
        ``{'format': 'pt'}``.
      max_workers: number of threads that write, 4 by default. Sources are read one block at a time
        unless it is given.
      max_bytes, retry: as for ``gda.store``.
      progress: as for ``gda.checkpoint.save``.

    Raises, before anything is written:
      TypeError: a leaf is not an array or a source, or of a dtype that safetensors has not, with a
        note of its path; or ``metadata`` is not of texts.
      ValueError: two leaves have the same name; a name, ``path`` or ``metadata`` cannot be used,
        because it is too long or has surrogates; a single file is too small for all; or a header or
        the index would be larger than ``open_safetensors`` accepts.
      RuntimeError: an array was deleted or donated.
      FileExistsError: ``path`` names a step of a run, as ``runs/a@100`` does.
      DisagreementError, LateProcessError: the processes have different trees, or one is late.

    Raises, afterwards:
      OSError: a file cannot be written, and is named; a note has index and path of the array.
      Exception: any error of a source, with such a note.
      DisagreementError, LateProcessError: another process failed or ended; the message says why.

    An array that each process would write in many runs of less than 16 KiB, such as one sharded by
    columns, is first moved to rows as ``reshard`` moves it. Of such arrays, a device holds at most
    32 MiB twice at a time, or one block, and 32 MiB on their way.

    >>> import gda, jax, numpy as np, os, tempfile
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> w = gda.GlobalArray.from_source(np.ones((8, 2), np.float32), mesh, P('x', 'y'))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gda.storage.save_safetensors(folder, {'layers': [{'w': w}], 'step': np.int32(3)})
    ...     print(os.listdir(folder), gda.storage.open_safetensors(folder)['layers.0.w'][:1, :])
    ['model.safetensors'] [[1. 1.]]
    """
    check_count(max_file_bytes, "max_file_bytes")
    options = Options(max_workers, max_bytes, progress, retry)
    together(
        _NAME,
        mesh_of_all(jax.devices()),
        partial(_save, options=options),
        prepare=lambda: _planned_save(os.fspath(path), tree, max_file_bytes, metadata, options),
        request=_PlannedSave.described,
        always=True,
    )


# The plan.


@dataclass(frozen=True)
class _PlannedSave:
    """The plan of a save: all that it writes."""

    path: str
    max_file_bytes: int
    tree: Any
    leaves: Sequence[WrittenArray]
    names: Sequence[str]
    files: Sequence[FileLayout]

    @property
    def is_one_file(self) -> bool:
        return self.path.endswith(".safetensors")

    @property
    def folder(self) -> Path:
        return Path(self.path).parent if self.is_one_file else Path(self.path)

    def described(self) -> Description:
        """Return what must be the same in all processes."""
        paths = [leaf_path(keys) for keys, _ in _with_paths(self.tree)]
        fields = {
            ("", "path"): self.path,
            ("", "files"): f"of at most {self.max_file_bytes} bytes",
            ("", "metadata"): str(self.files[0].metadata),
        }
        for path, leaf in zip(paths, self.leaves, strict=True):
            if isinstance(leaf.array, SourceArray):
                fields[path, "kind"] = str(leaf.array)
            if leaf.is_local:
                own = apart(leaf.array) if isinstance(leaf.array, jax.Array) else leaf.array
                fields[path, "fingerprint"] = fingerprint_of_numpy(np.asarray(own))
        return describe(self.tree) | fields

    def write(
        self,
        folder: Path,
        leaves: Mapping[int, WrittenArray],
        options: Options,
        add: Callable[[int], object],
    ) -> set[Path]:
        """Write the blocks of this process of some leaves; return the files, not yet synced."""
        place_of = {
            entry.name: (number, len(file.header) + entry.start)
            for number, file in enumerate(self.files)
            for entry in file.entries
        }
        places = [place_of[name] for name in self.names]
        paths = [folder / file.name for file in self.files]
        return write_leaves(self.tree, leaves, places, paths, options, add)

    def commit(self, folder: Path) -> None:
        """Move the files from the folder of the save to their places."""
        if self.is_one_file:
            (file,) = self.files
            new_files.move(folder / file.name, self.folder / file.name)
        else:
            replace_model(folder, self.folder, self.files)


def _planned_save(
    path: str,
    tree: Any,
    max_file_bytes: int,
    metadata: Mapping[str, str] | None,
    options: Options,
) -> _PlannedSave:
    """Return what a save writes; errors as ``save_safetensors`` before anything is written."""
    if "://" in path or not path:
        raise ValueError(f"path {path!r} is not a folder or file of a mounted file system")
    is_file = path.endswith(".safetensors")
    metadata = _checked_metadata(metadata)
    tree = as_dicts(tree)
    leaves = _leaves_of(tree, options)
    names = _names(tree)
    tensors = [
        Tensor(name, dtype_name(np.dtype(leaf.array.dtype)), leaf.shape)
        for name, leaf in zip(names, leaves, strict=True)
    ]
    if is_file:
        total = sum(tensor.nbytes for tensor in tensors)
        if total > max_file_bytes:
            raise ValueError(
                f"the tree has {total} bytes, more than max_file_bytes={max_file_bytes}; pass a "
                f"folder in place of {path}, for several files, or a larger max_file_bytes"
            )
        files = [file_of(os.path.basename(path), tensors, metadata)]
    else:
        files = files_of_model(tensors, max_file_bytes, metadata)
    return _PlannedSave(path, max_file_bytes, tree, leaves, names, files)


def _leaves_of(tree: Any, options: Options) -> list[WrittenArray]:
    reading = one_at_a_time(options)

    def array_at(keys: Any, leaf: Any) -> Any:
        if is_source(leaf):
            array = SourceArray.of(leaf, leaf_path(keys), options.max_bytes or MAX_BYTES, reading)
        else:
            array = _array_of(leaf)
        dtype_name(np.dtype(array.dtype))
        return array

    def grid_of(leaf: Any, array: Any) -> ShardGrid | None:
        return None if isinstance(array, np.ndarray | SourceArray) else grid_of_leaf(leaf)

    keyed = _with_paths(tree)
    paths, sources = [keys for keys, _ in keyed], [leaf for _, leaf in keyed]
    arrays = with_paths(tree, array_at, paths, sources)
    grids = with_paths(tree, grid_of, sources, arrays)
    return written_arrays(arrays, grids, are_copies=True)


def check_leaf(leaf: Any) -> None:
    """Raise ``TypeError`` or ``ValueError`` if safetensors files cannot hold a leaf."""
    dtype_name(np.dtype((leaf if is_source(leaf) else _array_of(leaf)).dtype))


def _array_of(leaf: Any) -> Any:
    check_unmasked(leaf)
    if isinstance(leaf, np.ndarray | np.generic):
        array = np.asarray(leaf)
    else:
        array = array_of(leaf, "or a source or NumPy array, such as numpy.asarray(number)")
    if is_extended(array.dtype):
        raise TypeError(
            f"no file holds {array.dtype}; save the numbers of the keys: jax.random.key_data(array)"
        )
    return array


def _checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    if metadata is None:
        return None
    texts = [*metadata.keys(), *metadata.values()] if isinstance(metadata, Mapping) else ()
    if not isinstance(metadata, Mapping) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"metadata must map texts to texts, not be {metadata!r:.200}")
    return dict(metadata)


def _with_paths(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_container)[0]


def _names(tree: Any) -> list[str]:
    def name(keys: Any) -> str:
        given = ".".join(names_of(keys))
        if not keys or given == METADATA:
            raise ValueError(
                f"the name {given!r} cannot be used in a safetensors file; "
                "put the array into a dict under another name"
            )
        return given

    names = with_paths(tree, name, [keys for keys, _ in _with_paths(tree)])
    first_of: dict[str, int] = {}
    for number, each in enumerate(names):
        first = first_of.setdefault(each, number)
        if first != number:
            raise ValueError(
                f"the arrays at {path_of(tree, first)} and {path_of(tree, number)} have the same "
                f"name {each!r}; put them into a dict under different names"
            )
    return names


# Writing.


def _save(plan: _PlannedSave, options: Options) -> None:
    """Create the files, write them, and move them to their places; process 0 creates and moves."""
    wait_for_arrays(_NAME, plan.tree)
    is_first = jax.process_index() == 0
    step = partial(all_do, timeout=timeout_of_work(), shared=(FileExistsError,))
    with contextlib.ExitStack() as stack:

        def begin() -> tuple[str, bool]:
            is_new = not is_known(str(plan.folder))
            if not is_first:
                return "", is_new
            check_names_no_step(plan.path, timeout_of_work())
            name = Path(plan.path).name if plan.is_one_file else MODEL
            folder = stack.enter_context(new_files.folder_beside(plan.folder, name))
            for file in plan.files:
                new_files.create(folder / file.name, file.header, file.nbytes)
            return folder.name, is_new

        what = f"of {_NAME} to {plan.path}"
        begun = step(
            begin,
            what=f"the beginning {what}",
            decide=lambda parts: (parts[0][0], any(is_new for _, is_new in parts.values())),
        )
        name, is_new = begun.decision
        folder = plan.folder / name
        if is_new:
            check_is_one_folder(str(plan.folder), folder.is_dir, timeout_of_work())
        written: set[Path] = set()

        def write(leaves: Mapping[int, WrittenArray], add: Callable[[int], object]) -> None:
            work = partial(plan.write, folder, leaves, options_for_files(options), add)
            step(lambda: written.update(work()), what=f"the writing {what}")

        numbered = dict(enumerate(plan.leaves))
        scattered = {number: leaf for number, leaf in numbered.items() if is_scattered(leaf)}
        sizes = {number: nbytes_of(leaf, leaf.own) for number, leaf in numbered.items()}
        add = stack.enter_context(counting(options.progress, "save", sum(sizes.values())))
        write({number: leaf for number, leaf in numbered.items() if number not in scattered}, add)
        for group in groups_in_rows(scattered):
            write(in_rows(group, _NAME), lambda _: None)  # of other blocks
            add(sum(sizes[number] for number in group))
        step(lambda: sync_files(written), what=f"the writing {what}")
        step(lambda: plan.commit(folder) if is_first else None, what=f"the end {what}")
