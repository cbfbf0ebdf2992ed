"""The leaves of a saved tree, each with the blocks that this process writes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from gda.arrays.buffers import aligned_empty
from gda.arrays.fingerprints.fingerprint import begin_blocks
from gda.arrays.fingerprints.formula import sums_of_numpy
from gda.arrays.fingerprints.sums import Sums
from gda.arrays.padded_array import PaddedArray
from gda.arrays.transport.to_host import MAX_BYTES, HostBlock, host_blocks
from gda.checkpoint.format.errors import said
from gda.checkpoint.format.manifest import ArrayLeaf, Path, ValueLeaf
from gda.checkpoint.format.manifest_json import is_storable
from gda.checkpoint.format.structure import format_path, noting_path
from gda.checkpoint.format.zarr_format import crc32c
from gda.layout.dtype_names import width_of
from gda.layout.grid import ShardGrid
from gda.layout.spec import Shape, format_spec, start_of
from gda.layout.text import join_some
from gda.mesh import grid_of_array
from gda.multihost.meeting import DisagreementError
from gda.storage import tasks
from gda.storage.options import Options
from gda.trees.leaves import array_of, grid_of_leaf, held_by, is_container, note_function
from gda.trees.written_blocks import WrittenArray, written_arrays

K = TypeVar("K")

_VALUES = (bool, int, float, complex, str, bytes)


@dataclass(frozen=True)
class Block:
    """One block of a leaf: its first element, and its data on a device or on the host."""

    number: int
    start: Shape
    data: jax.Array | np.ndarray[Any, Any]

    @property
    def hosted(self) -> jax.Array | np.ndarray[Any, Any]:
        """The data, as a NumPy array if it is in host memory already.

        Elements of less than a byte stay in the ``jax.Array``, which would keep NumPy's copy.
        """
        if isinstance(self.data, jax.Array) and width_of(self.data.dtype)[0] >= 8:
            return self.data if is_on_accelerator(self.data) else np.asarray(self.data)
        return self.data


def is_on_accelerator(data: Any) -> bool:
    """Return True if a block is on a device that is not a CPU."""
    return isinstance(data, jax.Array) and any(d.platform != "cpu" for d in data.devices())


Keyed: TypeAlias = tuple[K, Block]  # a block, and the object that it belongs to


@dataclass(frozen=True)
class SavedLeaf:
    """An array of the tree, and the blocks of it that this process writes."""

    number: int
    record: ArrayLeaf  # a save adds fingerprint and place
    grid: ShardGrid | None  # None for a NumPy array
    blocks: tuple[Block, ...]  # without padding
    own: Any  # the data, if every process has the whole array

    @property
    def block_shape(self) -> Shape:
        """The shape of every block but those at the edge of an array that was padded."""
        return self.record.shape if self.grid is None else self.grid.shard_shape

    @property
    def written_bytes(self) -> int:
        """Bytes that this process writes."""
        return sum(math.prod(b.data.shape) for b in self.blocks) * self.record.dtype.itemsize

    def begin_sums(self) -> Sums:
        """Begin the share of this process in the fingerprint, where the blocks are."""
        if self.grid is None:
            return Sums(*[sums_of_numpy(np.asarray(block.data)) for block in self.blocks])
        blocks: dict[int, Any] = {block.number: block.data for block in self.blocks}
        return begin_blocks(blocks, self.grid)


def saved_leaves(leaves: Iterable[tuple[Path, Any]]) -> list[SavedLeaf | ValueLeaf]:
    """Return every leaf of a tree as it is saved; copies nothing."""
    given: list[_Given | ValueLeaf] = []
    for path, leaf in leaves:
        with noting_path(path):
            given.append(_given(path, leaf))
    arrays = [each for each in given if isinstance(each, _Given)]
    written = iter(
        written_arrays(
            [each.array for each in arrays], [each.grid for each in arrays], are_copies=True
        )
    )
    return [
        each if isinstance(each, ValueLeaf) else _saved(number, each.record, next(written))
        for number, each in enumerate(given)
    ]


def _saved(number: int, record: ArrayLeaf, written: WrittenArray) -> SavedLeaf:
    blocks = [
        Block(each, start_of(written.indices[each]), data)
        for each, data in written.blocks().items()
    ]
    own = written.array if written.is_local else None
    return SavedLeaf(number, record, grid=written.grid, blocks=tuple(blocks), own=own)


def to_host(blocks: Iterable[Keyed[K]], options: Options) -> Iterable[HostBlock[Keyed[K]]]:
    """Return blocks that are being transferred to the host, if they are not there."""
    sized = (
        (keyed, data := keyed[1].hosted, data.nbytes if isinstance(data, jax.Array) else 0)
        for keyed in blocks
    )
    return host_blocks(sized, options.max_bytes or MAX_BYTES)


def on_host(leaves: Sequence[SavedLeaf], options: Options, adopt: bool) -> list[SavedLeaf]:
    """Return leaves with copies of their blocks, on the host.

    With ``adopt``, the copy of a block on a CPU device is an array on that device, which computes
    fingerprints faster than NumPy.
    """
    copies: dict[tuple[int, int], Block] = {}

    def copy(host: HostBlock[Keyed[int]]) -> Block:
        _, block = host.key
        data = host.values()
        out = aligned_empty(data.shape, data.dtype)
        np.copyto(out, data)
        return replace(block, data=_adopted(out, block.data) if adopt else out)

    def finish(host: HostBlock[Keyed[int]], block: Block) -> None:
        copies[host.key[0], block.number] = block
        host.release()

    blocks = ((leaf.number, block) for leaf in leaves for block in leaf.blocks)
    each = (
        tasks.Task(host.nbytes, functools.partial(copy, host), functools.partial(finish, host))
        for host in to_host(blocks, options)
    )
    tasks.run(each, options)
    # In the order of the blocks, not of the threads: the fingerprint compiles a program for each
    # order of devices.
    return [
        replace(each, own=None, blocks=tuple(copies[each.number, b.number] for b in each.blocks))
        for each in leaves
    ]


def _adopted(copy: np.ndarray[Any, Any], like: Any) -> Any:
    """Return aligned memory as an array on the device where another is, if that is a CPU."""
    if not isinstance(like, jax.Array) or is_on_accelerator(like):
        return copy
    with jax.transfer_guard("allow"):
        return jax.device_put(copy, *like.devices())


def values_of(leaves: Iterable[SavedLeaf | ValueLeaf]) -> dict[str, str]:
    """Return, by path, text or checksum of what must be the same in all processes."""
    values = {}
    for leaf in leaves:
        if isinstance(leaf, ValueLeaf):
            values[format_path(leaf.path)] = f"{said(leaf.value):.200}"
        elif leaf.own is not None:
            crc = crc32c(np.asarray(leaf.own, order="C"))
            values[format_path(leaf.record.path)] = f"an array with CRC-32C {crc:08x}"
    return values


def check_same_values(values: list[dict[str, str]]) -> None:
    """Raise ``DisagreementError`` unless the values are the same in all processes."""
    differences = []
    for path, first in values[0].items():
        said = {process: each.get(path) for process, each in enumerate(values)}
        others = [f"process {i} has {value}" for i, value in said.items() if value != first]
        if others:
            differences.append(f"at {path}, process 0 has {first}, {join_some(others)}")
    if differences:
        raise DisagreementError(
            f"values or local arrays differ between processes: {join_some(differences)}. Make them "
            "the same, or omit them"
        )


class _Given(NamedTuple):
    """An array of the tree: its record, and the data with its blocks; of keys, their numbers."""

    record: ArrayLeaf
    array: jax.Array | np.ndarray[Any, Any]
    grid: ShardGrid | None


def _given(path: Path, given: Any) -> _Given | ValueLeaf:
    leaf = held_by(given)
    if isinstance(leaf, np.str_ | np.bytes_):
        leaf = leaf.item()
    if isinstance(leaf, jax.Array):
        return _of_jax(path, given)
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError("a masked array would lose its mask; save its data and its mask")
    if isinstance(leaf, np.ndarray | np.generic):
        return _of_numpy(
            path, "numpy" if isinstance(leaf, np.ndarray) else "number", np.asarray(leaf)
        )
    if type(leaf) in _VALUES:
        return ValueLeaf(path, leaf)
    error = TypeError(
        f"a leaf of type {type(leaf).__name__} cannot be saved; the leaves of a tree are "
        "GlobalArrays, PaddedArrays, jax.Arrays, NumPy arrays, numbers, strings and bytes"
    )
    note_function(error, leaf)
    raise error


def _of_numpy(path: Path, kind: str, data: np.ndarray[Any, Any]) -> _Given:
    native = data.dtype if data.dtype.isnative else data.dtype.newbyteorder("=")
    is_number = jax.numpy.issubdtype(native, jax.numpy.number) or native == np.bool_
    if not is_number or not is_storable(native):
        raise TypeError(
            f"an array of dtype {data.dtype} cannot be saved; convert it to a dtype of JAX"
        )
    data = np.asarray(data, native, order="C")
    return _Given(ArrayLeaf(path, kind, data.shape, native), data, None)


def _of_jax(path: Path, given: Any) -> _Given:
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
    sharding = array.sharding if isinstance(array.sharding, NamedSharding) else None
    grid = _of_data(grid_of_leaf(given), array.shape) if is_padded else grid_of_array(array)
    record = ArrayLeaf(
        path=path,
        kind=kind,
        shape=grid.global_shape,
        dtype=np.dtype(array.dtype),
        key_impl=key_impl,
        spec=format_spec(sharding.spec) if sharding else None,
        mesh=dict(sharding.mesh.shape) if sharding and isinstance(sharding.mesh, Mesh) else None,
    )
    return _Given(record, array, grid)


def _of_data(grid: ShardGrid, shape: Shape) -> ShardGrid:
    """Return the grid of the data of PRNG keys, which has more dimensions, or that of an array."""
    sizes = grid.global_shape + shape[len(grid.global_shape) :]
    return ShardGrid(sizes, grid.mesh_shape, grid.spec, pad=True, process_of=grid.processes)
