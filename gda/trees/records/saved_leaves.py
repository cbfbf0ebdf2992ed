"""The leaves of a saved tree, each with the blocks that this process writes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from gda.arrays.fingerprints.fingerprint import begin_blocks
from gda.arrays.fingerprints.on_devices import PendingSums
from gda.arrays.fingerprints.on_host import sums_on_host
from gda.arrays.padded_array import PaddedArray
from gda.arrays.transport.source_blocks import SourceArray, SourceBlock, one_at_a_time
from gda.arrays.transport.to_host import (
    MAX_BYTES,
    BlockData,
    HostBlock,
    host_blocks,
    pinned,
)
from gda.layout.dtype_names import is_storable, native
from gda.layout.grid import ShardGrid
from gda.layout.spec import Shape, format_spec
from gda.mesh import Device, grid_of_array, own_settings
from gda.multihost.descriptions import first_differences
from gda.multihost.meeting import DisagreementError
from gda.storage.options import Options
from gda.storage.sources import apart, check_unmasked
from gda.storage.stores.checksums import crc32c, size_and_crc
from gda.storage.stores.errors import repr_of
from gda.trees.leaves import array_of, grid_of_leaf, held_by, is_container, is_source
from gda.trees.per_process import PerProcess, to_bytes
from gda.trees.records.recorded_tree import (
    ArrayLeaf,
    Path,
    PerProcessLeaf,
    ValueLeaf,
    format_path,
    may_be_tied,
    noting_path,
    without_collections,
)
from gda.trees.written_blocks import WrittenArray, written_arrays

K = TypeVar("K")

_VALUES = (bool, int, float, complex, str, bytes)


class Block(NamedTuple):
    """One block of a leaf: its first element, and its data or what reads it."""

    number: int
    start: Shape
    data: BlockData  # without padding; a view of the device's memory if that is the host's
    device: Device | None  # of the data; None for a NumPy array or a source


def on_host(data: BlockData) -> np.ndarray[Any, Any]:
    """Return the data of a block on the host; read it if it is one of a source."""
    if isinstance(data, SourceBlock):
        return data.read()
    with own_settings():
        return np.asarray(data)


Keyed: TypeAlias = tuple[K, Block]  # a block, and the object that it belongs to


class SavedLeaf(NamedTuple):
    """An array of the tree, and the blocks of it that this process writes."""

    number: int
    record: ArrayLeaf  # a save adds fingerprint and place
    grid: ShardGrid | None  # None for a NumPy array and a source
    block_shape: Shape  # of every block but those at the edges of a padded array or a source
    blocks: tuple[Block, ...]  # without padding
    own: Any  # the source; or the data, if every process has the whole array

    @property
    def is_source(self) -> bool:
        return isinstance(self.own, SourceArray)

    @property
    def written_bytes(self) -> int:
        return sum([block.data.size for block in self.blocks]) * self.record.dtype.itemsize

    def begin_sums(self, for_all_shapes: bool = False) -> PendingSums:
        """Begin the share of this process in the fingerprint, as ``begin_blocks``."""
        if self.grid is not None:
            with own_settings():  # of aligned memory of the host, nothing is copied
                blocks = {
                    number: data
                    if for_all_shapes or isinstance(data, jax.Array)
                    else jax.device_put(data, device)
                    for number, _, data, device in self.blocks
                }
            return begin_blocks(blocks, self.grid, for_all_shapes)
        # A block of a source is held no longer than until its sums are made.
        return PendingSums(*[sums_on_host(on_host(each.data), each.start) for each in self.blocks])


class GivenLeaf(NamedTuple):
    """An array of the tree: its record, and the data with its blocks; of keys, their numbers."""

    record: ArrayLeaf
    array: jax.Array | np.ndarray[Any, Any] | SourceArray
    grid: ShardGrid | None

    @property
    def own(self) -> Any:
        """The data, if every process has the whole array on the host; or the source."""
        return None if isinstance(self.array, jax.Array) else self.array

    @property
    def is_on_own_device(self) -> bool:
        """True if every process has the whole array, on a device of its own."""
        return isinstance(self.array, jax.Array) and not isinstance(
            self.array.sharding, NamedSharding
        )


class SavedPerProcess(NamedTuple):
    """A ``PerProcess`` of the tree, and the bytes of its value in this process."""

    record: PerProcessLeaf  # a save adds name and files
    data: bytes


Given: TypeAlias = GivenLeaf | ValueLeaf | SavedPerProcess  # a leaf of a tree, with its record
Saved: TypeAlias = SavedLeaf | ValueLeaf | SavedPerProcess  # the same with its blocks


@without_collections()
def given_leaves(leaves: Iterable[tuple[Path, Any]], options: Options) -> list[Given]:
    """Return every leaf of a tree with its record; waits for no array."""
    given: list[Given] = []
    reading = None
    for path, leaf in leaves:
        with noting_path(path):
            if is_source(leaf):
                reading = reading or one_at_a_time(options)
                given.append(_of_source(path, leaf, options, reading))
            else:
                given.append(_given(path, leaf))
    return given


def without_ties(
    leaves: Sequence[tuple[Path, Any]], given: Sequence[Given]
) -> tuple[list[Given], list[int]]:
    """Return the given leaves without arrays that came before, and the number there of each leaf.

    Tied leaves are the same array object, as an embedding that is the output layer too.
    """
    rest: list[Given] = []
    first: dict[Any, int] = {}
    numbers = []
    for (path, leaf), each in zip(leaves, given, strict=True):
        key: Any = path
        if isinstance(each, GivenLeaf) and may_be_tied(each.record):
            # Of a container, the shape is without padding.
            key = id(held_by(leaf)), each.record.kind, each.record.shape
        numbers.append(first.setdefault(key, len(rest)))
        if numbers[-1] == len(rest):
            rest.append(each)
    return rest, numbers


@without_collections()
def with_blocks(given: Sequence[Given], *, are_held: bool = False) -> list[Saved]:
    """Return leaves with the blocks that this process writes; waits for arrays on CPU devices.

    There, the blocks keep the values that they have: no donation and no deletion changes them.
    ``are_held`` is that of ``written_arrays``.
    """
    found = [each for each in given if isinstance(each, GivenLeaf)]
    arrays, grids = [each.array for each in found], [each.grid for each in found]
    written = iter(written_arrays(arrays, grids, are_copies=True, are_held=are_held))
    return [
        _saved(number, each.record, next(written)) if isinstance(each, GivenLeaf) else each
        for number, each in enumerate(given)
    ]


def _saved(number: int, record: ArrayLeaf, written: WrittenArray) -> SavedLeaf:
    own, data = written.own, written.blocks()
    blocks = tuple([Block(n, own[n].start, block, own[n].device) for n, block in data.items()])
    own = written.array if written.is_local or isinstance(written.array, SourceArray) else None
    return SavedLeaf(number, record, written.grid, written.block_shape, blocks, own)


def to_host(blocks: Iterable[Keyed[K]], max_bytes: int | None) -> Iterable[HostBlock[Keyed[K]]]:
    """Return blocks that are on the way to the host, if they are not there."""
    sized = [
        (keyed, data := keyed[1].data, 0 if isinstance(data, np.ndarray) else data.nbytes)
        for keyed in blocks
    ]
    return host_blocks(sized, max_bytes or MAX_BYTES)


def kept(leaf: SavedLeaf) -> SavedLeaf:
    """Return a leaf whose blocks nothing can change or delete any more; a source stays as it is.

    Views of CPU devices stay too. An accelerator begins to copy its blocks into pinned host memory,
    if it has some. All others become NumPy arrays.
    """
    blocks = leaf.blocks
    if leaf.is_source:
        return leaf
    if leaf.grid is not None and (not blocks or isinstance(blocks[0].data, np.ndarray)):
        return leaf
    blocks = tuple([block._replace(data=_kept(block)) for block in blocks])
    return leaf._replace(own=None, blocks=blocks)


def _kept(block: Block) -> BlockData:
    data = block.data
    if isinstance(data, np.ndarray):
        return np.array(data)
    assert isinstance(data, jax.Array)
    copy = pinned(data)
    with own_settings():
        return np.asarray(apart(data)) if copy is None else copy


def values_of(leaves: Iterable[Given | Saved]) -> dict[str, str]:
    """Return texts and checksums, by path, of what must be the same in all processes.

    Of a source, shape, dtype and blocks, but not the values: each process reads only some.
    """
    values = {}
    for leaf in leaves:
        if isinstance(leaf, ValueLeaf):
            text = repr_of(leaf.value)
            crc = f"... with CRC-32C {size_and_crc(text.encode())[1]:08x}" if text[200:] else ""
            values[format_path(leaf.path)] = text[:200] + crc
        elif isinstance(leaf, SavedPerProcess):
            continue
        elif isinstance(leaf.own, SourceArray):
            values[format_path(leaf.record.path)] = str(leaf.own)
        elif leaf.own is not None:
            crc = crc32c(np.asarray(leaf.own, order="C"))
            values[format_path(leaf.record.path)] = f"an array with CRC-32C {crc:08x}"
    return values


def check_same_values(values: list[dict[str, str]]) -> None:
    """Raise ``DisagreementError`` unless the values are the same in all processes."""
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for process, of_process in enumerate(values):
        groups.setdefault((*of_process.items(),), []).append(process)
    if len(groups) > 1:
        fields = [{(path, "value"): value for path, value in group} for group in groups]
        raise DisagreementError(
            "values or local arrays differ between processes: "
            f"{first_differences([*groups.values()], fields)}. Make them the same, or omit them"
        )


def _given(path: Path, given: Any) -> Given:
    leaf = held_by(given)
    if isinstance(leaf, np.str_ | np.bytes_):
        leaf = leaf.item()
    if isinstance(leaf, jax.Array):
        return _of_jax(path, given)
    if type(leaf) in _VALUES:
        return ValueLeaf(path, leaf)
    check_unmasked(leaf)
    if isinstance(leaf, np.ndarray | np.generic):
        return _of_numpy(
            path, "numpy" if isinstance(leaf, np.ndarray) else "number", np.asarray(leaf)
        )
    if isinstance(leaf, PerProcess):
        return SavedPerProcess(PerProcessLeaf(path, "", ()), to_bytes(leaf.value))
    raise TypeError(
        f"a leaf of type {type(leaf).__name__} cannot be saved; the leaves of a tree are "
        "GlobalArrays, PaddedArrays, jax.Arrays, NumPy arrays, sources, numbers, strings, bytes "
        "and PerProcess"
    )


def _of_source(path: Path, leaf: Any, options: Options, reading: Any) -> GivenLeaf:
    name = format_path(path) if path else ""
    array = SourceArray.of(leaf, name, options.max_bytes or MAX_BYTES, reading)
    _check_dtype(array.dtype)
    return GivenLeaf(ArrayLeaf(path, "numpy", array.shape, array.dtype), array, None)


def _of_numpy(path: Path, kind: str, data: np.ndarray[Any, Any]) -> GivenLeaf:
    dtype = native(data.dtype)
    _check_dtype(dtype)
    data = np.asarray(data, dtype, order="C")
    return GivenLeaf(ArrayLeaf(path, kind, data.shape, dtype), data, None)


def _check_dtype(dtype: np.dtype[Any]) -> None:
    is_number = jax.numpy.issubdtype(dtype, jax.numpy.number) or dtype == np.bool_
    if not is_number or not is_storable(dtype):
        raise TypeError(f"an array of dtype {dtype} cannot be saved; convert it to a dtype of JAX")


def _of_jax(path: Path, given: Any) -> GivenLeaf:
    array = array_of(given)
    is_padded = isinstance(given, PaddedArray)
    kind = type(given).__name__ if is_container(given) else "jax.Array"
    is_key = jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)
    if not isinstance(array.sharding, NamedSharding | SingleDeviceSharding):
        if not array.is_fully_addressable:
            raise TypeError(
                f"the array has the sharding {array.sharding!r}, which names no mesh and spec; "
                "give it one with jax.device_put(array, NamedSharding(mesh, spec))"
            )
        if not is_key:
            return _of_numpy(path, kind, np.asarray(array))
        # Few bytes; NumPy has no keys for a fingerprint.
        array = jax.device_put(array, jax.local_devices()[0])
    key_impl = str(jax.random.key_impl(array)) if is_key else None
    if is_key:
        array = jax.random.key_data(array)
    grid = _of_data(grid_of_leaf(given), array.shape) if is_padded else grid_of_array(array)
    spec, mesh = _spec_and_mesh_of(array.sharding)
    dtype = np.dtype(array.dtype)
    record = ArrayLeaf(
        path,
        kind,
        grid.global_shape,
        dtype,
        key_impl,
        spec=spec,
        mesh=mesh,
        weak_type=array.weak_type,
    )
    return GivenLeaf(record, array, grid)


@functools.lru_cache(maxsize=256)
def _spec_and_mesh_of(sharding: Any) -> tuple[str | None, dict[str, int] | None]:
    """Return spec and mesh of a sharding, for people."""
    if not isinstance(sharding, NamedSharding):
        return None, None
    is_concrete = isinstance(sharding.mesh, Mesh)
    return format_spec(sharding.spec), dict(sharding.mesh.shape) if is_concrete else None


def _of_data(grid: ShardGrid, shape: Shape) -> ShardGrid:
    """Return the grid of the data of PRNG keys, which has more dimensions, or that of an array."""
    sizes = grid.global_shape + shape[len(grid.global_shape) :]
    if sizes == grid.global_shape:
        return grid
    return ShardGrid(sizes, grid.mesh_shape, grid.spec, pad=True, process_of=grid.processes)
