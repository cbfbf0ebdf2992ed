"""Trees to safetensors files: each process writes its own bytes of files of known size."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.tree_util import keystr

from gda.arrays.fingerprint_formula import fingerprint_of_numpy
from gda.arrays.narrowing import is_extended
from gda.arrays.placing import start_of
from gda.arrays.process_local import distinct_shards
from gda.arrays.to_host import BlockData, HostBlock, HostBlocks
from gda.layout.boundary import public, set_module
from gda.layout.processes import turns_of
from gda.layout.spec import Index, Shape, shape_at
from gda.layout.text import format_index
from gda.mesh import mesh_of_all
from gda.multihost.agreement import timeout_of_checks, together
from gda.multihost.descriptions import Description, describe
from gda.multihost.steps import all_do
from gda.storage import new_files
from gda.storage.options import Options, check_count
from gda.storage.safetensors_format import (
    INDEX,
    METADATA,
    MODEL,
    FileLayout,
    Tensor,
    dtype_name,
    file_of,
    files_named_by,
    files_of_model,
)
from gda.storage.tasks import Task, run
from gda.trees.leaves import (
    array_of,
    blocks_to_write,
    grid_of_leaf,
    is_container,
    path_of,
    with_paths,
)
from gda.trees.matching import name_of

# With the parts that ``write_blocks`` joins in each thread, copies take 64 MiB. Some threads wait
# for the disk while others copy.
_MAX_BYTES = 48 * 2**20
_OPTIONS = Options(max_workers=4, max_bytes=_MAX_BYTES)
_LONG_RUN = 64 * 2**10  # bytes
_LONG_WAIT = 1800.0  # seconds, for processes that write longer
_FILES_AT_A_TIME = 64
_NAME = "gda.storage.save_safetensors"

NameOf = Callable[[str, jax.ShapeDtypeStruct], str]


@set_module("gda.storage")
@public
def save_safetensors(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    max_file_bytes: int = 5 * 2**30,
    metadata: Mapping[str, str] | None = None,
    names: NameOf | None = None,
) -> None:
    """Save a tree of arrays of any layout as safetensors files; nothing is gathered.

    Communicates: every process of the program must call it, with the same tree. They all write into
    one folder, each its own blocks, and replicated ones in turns. The bytes are those that the
    safetensors package writes of the same tensors.

    The files are written into a hidden folder beside their place. When all processes have written,
    and all is on disk, they take the place of those that are there. If a process fails, all raise,
    and the old files stay. A program that is killed leaves the hidden folder, which the next save
    to this path removes.

    Args:
      path: a folder, for ``model.safetensors``, or for several files and their index
        ``model.safetensors.index.json``, named as those of published models; or a file that ends
        with ``.safetensors``. Missing folders are made. The present model of the folder is
        replaced: ``model.safetensors``, the index, and the files of such names that it lists. Other
        files stay.
      tree: a pytree of ``GlobalArray``s, ``PaddedArray``s, which are saved without padding,
        ``jax.Array``s and NumPy arrays. NumPy arrays, and arrays that only one process holds, must
        be the same in all processes.
      max_file_bytes: the most bytes of data in a file of a folder. A larger array has a file of its
        own.
      metadata: texts by name, for the header of every file. PyTorch's transformers wants
        ``{'format': 'pt'}``.
      names: a function ``(path, leaf)`` that returns the name of an array in the files. A path is
        such as ``'layers/0/weight'``, which is named ``'layers.0.weight'`` by default. A leaf is a
        ``jax.ShapeDtypeStruct``.

    Raises, before anything is written:
      TypeError: a leaf is not an array, or of a dtype that safetensors has not, with a note of its
        path; or ``metadata`` is not of texts.
      ValueError: two leaves have the same name, a name cannot be used, or a single file is too
        small for all.
      RuntimeError: an array was deleted or donated.
      DisagreementError, LateProcessError: the processes have different trees, or one is late.

    Raises, afterwards:
      OSError: a file cannot be written; a note has index and path of the array.
      DisagreementError: another process failed; the message says why.

    Copies of blocks from accelerators take at most 64 MiB on the host at a time, or one block.

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

    @cache  # the processes agree on the same plan that is written
    def prepared() -> _Plan:
        return _plan(os.fspath(path), tree, max_file_bytes, metadata, names)

    together(
        _NAME,
        mesh_of_all(jax.devices()),
        lambda: _save(prepared()),
        lambda _: {},  # it has no result that could differ
        wanted=lambda: prepared().described(),
        always=True,
    )


# The plan.


@dataclass(frozen=True)
class _Leaf:
    """An array of the tree, and the blocks of it that this process writes.

    Attributes:
      dtype: in the byte order of the files.
      own: the data, if every process has the whole array.
      is_copied: True if its blocks have to be copied to the host.
      indices: of the blocks that this process writes.
      blocks: returns their data.
    """

    shape: Shape
    dtype: np.dtype[Any]
    own: Any
    is_copied: bool
    indices: Sequence[Index]
    blocks: Callable[[], Sequence[BlockData]]


@dataclass(frozen=True)
class _Plan:
    """All that a save writes, known before.

    Attributes:
      path: as it was given.
      names: of the leaves.
      index: the content of the index, if the files have one.
    """

    path: str
    tree: Any
    leaves: Sequence[_Leaf]
    names: Sequence[str]
    files: Sequence[FileLayout]
    index: bytes | None

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return Path(self.path).parent if self.is_one_file else Path(self.path)

    @property
    def is_one_file(self) -> bool:
        """True if a file was given, and not a folder."""
        return self.path.endswith(".safetensors")

    def described(self) -> Description:
        """Return what must be the same in all processes."""
        paths = [keystr(keys) for keys, _ in _with_paths(self.tree)]
        fields = {("", "path"): self.path, ("", "files"): str([file.name for file in self.files])}
        fields["", "metadata"] = str(self.files[0].metadata)
        for path, name, leaf in zip(paths, self.names, self.leaves, strict=True):
            fields[path, "name"] = name
            if leaf.own is not None:
                own = np.asarray(leaf.own)
                fields[path, "fingerprint"] = fingerprint_of_numpy(own)
        return describe(self.tree) | fields

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """The number of the file of each name, and the first byte of its data there."""
        return {
            entry.name: (number, len(file.header) + entry.start)
            for number, file in enumerate(self.files)
            for entry in file.entries
        }


def _plan(
    path: str,
    tree: Any,
    max_file_bytes: int,
    metadata: Mapping[str, str] | None,
    name_by: NameOf | None,
) -> _Plan:
    if "://" in path or not path:
        raise ValueError(f"path {path!r} is not a folder or file of a mounted file system")
    metadata = _checked_metadata(metadata)
    leaves = _leaves(tree)
    names = _names(tree, leaves, name_by)
    tensors = [
        Tensor(name, dtype_name(leaf.dtype), leaf.shape)
        for name, leaf in zip(names, leaves, strict=True)
    ]
    if not path.endswith(".safetensors"):
        files, index = files_of_model(tensors, max_file_bytes, metadata)
        return _Plan(path, tree, leaves, names, files, index)
    total = sum(tensor.nbytes for tensor in tensors)
    if total > max_file_bytes:
        raise ValueError(
            f"the tree has {total} bytes, more than max_file_bytes={max_file_bytes}; pass a folder "
            f"in place of {path}, for several files, or a larger max_file_bytes"
        )
    file = file_of(os.path.basename(path), tensors, metadata)
    return _Plan(path, tree, leaves, names, [file], None)


def _checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping) or not all(
        isinstance(text, str) for item in metadata.items() for text in item
    ):
        raise TypeError(f"metadata must map texts to texts, not be {metadata!r:.200}")
    return dict(metadata)


def _with_paths(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_container)[0]


def _names(tree: Any, leaves: Sequence[_Leaf], name_by: NameOf | None) -> list[str]:
    def name(keys: Any, leaf: _Leaf) -> str:
        texts = [str(name_of(key)) for key in keys]
        if name_by is None:
            given = ".".join(texts)
        else:
            given = name_by("/".join(texts), jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        if not isinstance(given, str):
            raise TypeError(f"names({'/'.join(texts)!r}, leaf) returned {given!r:.80}, not a text")
        if given in ("", METADATA) or (not given.isprintable() and not _is_unicode(given)):
            raise ValueError(
                f"the name {given!r} cannot be used in a safetensors file; "
                "put the array into a dict under another name, or pass names="
            )
        return given

    paths = [keys for keys, _ in _with_paths(tree)]
    names = with_paths(tree, name, paths, leaves)
    first_of: dict[str, int] = {}
    for number, each in enumerate(names):
        first = first_of.setdefault(each, number)
        if first != number:
            raise ValueError(
                f"the arrays at {path_of(tree, first)} and {path_of(tree, number)} have the same "
                f"name {each!r}; pass names=, a function (path, leaf) that returns different names"
            )
    return names


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _leaves(tree: Any) -> list[_Leaf]:
    given = [leaf for _, leaf in _with_paths(tree)]
    arrays = with_paths(tree, _array_of, given)
    shardings = [getattr(array, "sharding", None) for array in arrays]
    # All processes have the same mesh; an array without one is local to its process.
    layouts = [each if isinstance(each, NamedSharding) else None for each in shardings]
    turns = turns_of([array.nbytes for array in arrays], layouts)
    return with_paths(tree, _leaf, given, arrays, turns)


def _array_of(leaf: Any) -> Any:
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError("a masked array would lose its mask; save its data and its mask")
    if isinstance(leaf, np.ndarray | np.generic):
        array = np.asarray(leaf)
    else:
        array = array_of(leaf, "or a NumPy array, such as numpy.asarray(number)")
    if is_extended(array.dtype):
        raise TypeError(
            f"no file holds {array.dtype}; save the numbers of the keys: jax.random.key_data(array)"
        )
    dtype_name(np.dtype(array.dtype))
    return array


def _leaf(given: Any, array: Any, turn: int) -> _Leaf:
    dtype = np.dtype(array.dtype).newbyteorder("<")
    on_devices = isinstance(array, jax.Array)
    is_copied = on_devices and any(each.platform != "cpu" for each in array.devices())
    is_local = on_devices and not isinstance(array.sharding, NamedSharding)
    if not on_devices or (is_local and jax.process_count() > 1):
        has_turn = turn % jax.process_count() == jax.process_index()
        indices = [tuple([slice(0, size) for size in array.shape])] if has_turn else []
        return _Leaf(array.shape, dtype, array, is_copied, indices, lambda: [array])
    grid = grid_of_leaf(given)
    numbers = blocks_to_write(array, grid, turn)

    def blocks() -> Sequence[BlockData]:
        data_of = distinct_shards(array, grid) if numbers else {}
        return [data_of[number] for number in numbers]

    indices = [_bounds(grid.block_index(number), grid.global_shape) for number in numbers]
    return _Leaf(grid.global_shape, dtype, None, is_copied, indices, blocks)


def _bounds(index: Index, shape: Shape) -> Index:
    """Return an index with every start and stop."""
    return tuple([slice(*s.indices(size)[:2]) for s, size in zip(index, shape, strict=True)])


# Writing.


class _Stripe(NamedTuple):
    """Blocks of a leaf side by side, by their numbers among those that this process writes.

    Attributes:
      file, first: the file, and the first byte of the leaf there.
    """

    leaf: int
    numbers: Sequence[int]
    file: int
    first: int


def _save(plan: _Plan) -> None:
    """Create the files, write them, and move them to their places; process 0 creates and moves."""
    is_first = jax.process_index() == 0
    step = partial(all_do, timeout=max(timeout_of_checks(), _LONG_WAIT))
    with contextlib.ExitStack() as stack:

        def begin() -> str:
            if not is_first:
                return ""
            name = Path(plan.path).name if plan.is_one_file else MODEL
            folder = stack.enter_context(new_files.folder_beside(plan.folder, name))
            for file in plan.files:
                new_files.create(folder / file.name, file.header, file.nbytes)
            if plan.index is not None:
                new_files.create(folder / INDEX, plan.index, len(plan.index))
            return folder.name

        what = f"of {_NAME} to {plan.path}"
        begun = step(begin, what=f"the beginning {what}", judge=lambda names: names[0])
        folder = plan.folder / begun.verdict
        step(lambda: _write(plan, folder), what=f"the writing {what}")
        if is_first:
            _commit(plan, folder)


def _write(plan: _Plan, folder: Path) -> None:
    """Write the blocks of this process into the files of a folder; return when they are on disk."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"process {jax.process_index()} does not find {folder}, which process 0 has made; all "
            "processes must see the same folder"
        )
    stripes = sorted(_stripes(plan), key=lambda stripe: (stripe.file, stripe.first))
    groups = itertools.groupby(stripes, key=lambda stripe: stripe.file // _FILES_AT_A_TIME)
    for _, group in groups:
        in_files = list(group)
        with contextlib.ExitStack() as stack:
            files = {}
            for number in sorted({stripe.file for stripe in in_files}):
                files[number] = os.open(folder / plan.files[number].name, os.O_WRONLY)
                stack.callback(os.close, files[number])
            hosts = iter(HostBlocks(_data(plan, in_files), _MAX_BYTES))
            tasks = (
                _task(plan, stripe, list(itertools.islice(hosts, len(stripe.numbers))), files)
                for stripe in in_files
            )
            run(tasks, _OPTIONS)
            run((Task(0, partial(os.fsync, file)) for file in files.values()), _OPTIONS)


def _stripes(plan: _Plan) -> Iterator[_Stripe]:
    for number, leaf in enumerate(plan.leaves):
        for numbers in _side_by_side(leaf):
            yield _Stripe(number, numbers, *plan.places[plan.names[number]])


def _side_by_side(leaf: _Leaf) -> list[list[int]]:
    """Return the blocks by number, with those together that are better written together.

    A write costs as much as copying some thousand bytes, so short runs are joined.
    """
    stripes: list[list[int]] = []
    for number in sorted(range(len(leaf.indices)), key=lambda each: start_of(leaf.indices[each])):
        if stripes and _continues(leaf, stripes[-1], leaf.indices[number]):
            stripes[-1].append(number)
        else:
            stripes.append([number])
    return stripes


def _continues(leaf: _Leaf, stripe: Sequence[int], index: Index) -> bool:
    """Return True if the block at an index comes after those of a stripe, and is to join them."""
    first, last = leaf.indices[stripe[0]], leaf.indices[stripe[-1]]
    block = shape_at(first, leaf.shape)
    axis = new_files.axis_of_runs(leaf.shape, block)
    run_bytes = math.prod(block[axis:]) * leaf.dtype.itemsize
    if not axis or run_bytes * len(stripe) >= _LONG_RUN:
        return False
    # Blocks on the host take no memory.
    nbytes = math.prod(block) * leaf.dtype.itemsize * (len(stripe) + 1)
    if leaf.is_copied and nbytes > _MAX_BYTES:
        return False
    beside = (*first[:axis], slice(last[axis].stop, index[axis].stop), *first[axis + 1 :])
    return index == beside


def _data(plan: _Plan, stripes: Sequence[_Stripe]) -> Iterator[tuple[None, BlockData, int]]:
    for number, group in itertools.groupby(stripes, key=lambda stripe: stripe.leaf):
        leaf = plan.leaves[number]
        blocks = leaf.blocks()
        for stripe in group:
            for each in stripe.numbers:
                yield None, blocks[each], blocks[each].nbytes if leaf.is_copied else 0


def _task(
    plan: _Plan, stripe: _Stripe, hosts: Sequence[HostBlock[None]], files: Mapping[int, int]
) -> Task:
    leaf = plan.leaves[stripe.leaf]
    start = tuple([s.start for s in leaf.indices[stripe.numbers[0]]])
    file = files[stripe.file]

    def work() -> None:
        try:
            blocks = [host.values().astype(leaf.dtype, copy=False) for host in hosts]
            new_files.write_blocks(file, stripe.first, leaf.shape, start, blocks)
        except Exception as error:
            index = format_index(leaf.indices[stripe.numbers[0]])
            path = path_of(plan.tree, stripe.leaf)
            error.add_note(f"gda: while writing index {index} of {path}")
            raise

    def finish(_: object) -> None:
        for host in hosts:
            host.release()

    return Task(sum(host.nbytes for host in hosts), work, finish)


def _commit(plan: _Plan, partial_folder: Path) -> None:
    names = [file.name for file in plan.files]
    obsolete: set[str] = set()
    if not plan.is_one_file:
        obsolete = {MODEL, INDEX, *files_named_by(plan.folder / INDEX)}
    if plan.index is not None:
        names.insert(0, INDEX)
    new_files.replace_files([partial_folder / name for name in names], plan.folder, obsolete)
