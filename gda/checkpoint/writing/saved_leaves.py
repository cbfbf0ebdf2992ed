"""The leaves of a saved tree, each with the blocks that this process writes.

Over all processes every block is written once. Processes share replicated blocks out, leaf
after leaf, so that process 0 does not write all of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from gda.arrays.buffers import aligned_empty
from gda.arrays.padded_array import PaddedArray
from gda.arrays.process_local import distinct_shards
from gda.arrays.transport.to_host import MAX_BYTES, HostBlock, HostBlocks
from gda.checkpoint.format.errors import said
from gda.checkpoint.format.manifest import ArrayLeaf, Path, ValueLeaf
from gda.checkpoint.format.manifest_json import is_storable
from gda.checkpoint.format.structure import format_path, noting_path
from gda.checkpoint.format.zarr_format import crc32c
from gda.layout.dtype_names import width_of
from gda.layout.grid import ShardGrid
from gda.layout.processes import turns_of
from gda.layout.spec import Shape, format_spec
from gda.layout.text import join_some
from gda.mesh import grid_of_array, is_tracer, sharding_of, view_of_array
from gda.multihost.meeting import DisagreementError
from gda.storage import tasks
from gda.storage.options import Options
from gda.trees.leaves import array_of, grid_of_leaf, is_container

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
class Source:
    """An array of the tree, and the blocks of it that this process writes.

    Attributes:
      number: the number of the leaf.
      leaf: its record, to which a save adds fingerprint and place.
      saved_type: shape and dtype for the user; for keys not those of their data.
      grid: its blocks; ``None`` if every process has the whole array, such as a NumPy array.
      blocks: the blocks that this process writes, without padding.
      own: the data, if every process has the whole array.
    """

    number: int
    leaf: ArrayLeaf
    saved_type: tuple[Shape, Any]
    grid: ShardGrid | None
    blocks: tuple[Block, ...]
    own: Any = None

    @property
    def block_shape(self) -> Shape:
        """The shape of every block but those at the edge of an array that was padded."""
        return self.leaf.shape if self.grid is None else self.grid.shard_shape

    @property
    def written_bytes(self) -> int:
        """Bytes that this process writes."""
        return self._written_elements * self.leaf.dtype.itemsize

    @property
    def is_mine(self) -> bool:
        """True if this process writes the whole array."""
        return self._written_elements == math.prod(self.leaf.shape)

    @property
    def _written_elements(self) -> int:
        return sum(math.prod(block.data.shape) for block in self.blocks)


def sources_of(leaves: Iterable[tuple[Path, Any]]) -> list[Source | ValueLeaf]:
    """Return the source or the value of each leaf; copies nothing.

    Raises:
      TypeError: a leaf is of a kind that a checkpoint cannot hold, or is being traced.
      RuntimeError: an array was deleted or donated.
    """
    leaves = list(leaves)
    turns = _turns([leaf for _, leaf in leaves])
    sources = []
    for number, ((path, leaf), turn) in enumerate(zip(leaves, turns, strict=True)):
        with noting_path(path):
            sources.append(_source(number, path, leaf, turn))
    return sources


def _turns(leaves: Sequence[Any]) -> list[int]:
    arrays = [leaf.array if is_container(leaf) else leaf for leaf in leaves]
    shardings = [getattr(array, "sharding", None) for array in arrays]
    # All processes have the same mesh; an array without one is local to its process.
    layouts = [each if isinstance(each, NamedSharding) else None for each in shardings]
    return turns_of([_nbytes(array) for array in arrays], layouts)


def _nbytes(array: Any) -> int:
    is_array = isinstance(array, jax.Array | np.ndarray | np.generic) and not is_tracer(array)
    return array.size * array.dtype.itemsize if is_array else 0


def to_host(blocks: Iterable[Keyed[K]], options: Options) -> Iterable[HostBlock[Keyed[K]]]:
    """Return blocks that are being transferred to the host, if they are not there."""
    hosted = ((keyed, keyed[1].hosted) for keyed in blocks)
    sized = (
        (keyed, data, data.nbytes if isinstance(data, jax.Array) else 0) for keyed, data in hosted
    )
    return HostBlocks(sized, options.max_bytes or MAX_BYTES)


def on_host(sources: Sequence[Source], options: Options, adopt: bool) -> list[Source]:
    """Return the sources with copies of their blocks, on the host.

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

    blocks = ((source.number, block) for source in sources for block in source.blocks)
    each = (
        tasks.Task(host.nbytes, functools.partial(copy, host), functools.partial(finish, host))
        for host in to_host(blocks, options)
    )
    tasks.run(each, options)
    # In the order of the blocks, not of the threads: the fingerprint compiles a program for each
    # order of devices.
    return [
        replace(each, own=None, blocks=tuple(copies[each.number, b.number] for b in each.blocks))
        for each in sources
    ]


def _adopted(copy: np.ndarray[Any, Any], like: Any) -> Any:
    """Return aligned memory as an array on the device where another is, if that is a CPU."""
    if not isinstance(like, jax.Array) or is_on_accelerator(like):
        return copy
    with jax.transfer_guard("allow"):
        return jax.device_put(copy, *like.devices())


def values_of(sources: Iterable[Source | ValueLeaf]) -> dict[str, str]:
    """Return, by path, the values and local arrays that must be the same in all processes.

    Values as text, arrays by their checksum.
    """
    values = {}
    for source in sources:
        if isinstance(source, ValueLeaf):
            values[format_path(source.path)] = f"{said(source.value):.200}"
        elif source.own is not None:
            crc = crc32c(np.asarray(source.own, order="C"))
            values[format_path(source.leaf.path)] = f"an array with CRC-32C {crc:08x}"
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


def _source(number: int, path: Path, given: Any, turn: int) -> Source | ValueLeaf:
    leaf = given.array if is_container(given) else given
    if isinstance(leaf, np.str_ | np.bytes_):
        leaf = leaf.item()
    if isinstance(leaf, jax.Array):
        array = array_of(given)
        if isinstance(given, PaddedArray):
            grid = grid_of_leaf(given)
            return _of_jax(number, path, "PaddedArray", array, turn, grid)
        kind = "GlobalArray" if is_container(given) else "jax.Array"
        return _of_jax(number, path, kind, array, turn)
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError("a masked array would lose its mask; save its data and its mask")
    if isinstance(leaf, np.ndarray | np.generic):
        return _of_numpy(number, path, np.asarray(leaf), turn)
    if type(leaf) in _VALUES:
        return ValueLeaf(path, leaf)
    raise TypeError(
        f"a leaf of type {type(leaf).__name__} cannot be saved; the leaves of a tree are "
        "GlobalArrays, PaddedArrays, jax.Arrays, NumPy arrays, numbers, strings and bytes"
    )


def _of_numpy(number: int, path: Path, data: np.ndarray[Any, Any], turn: int) -> Source:
    native = data.dtype if data.dtype.isnative else data.dtype.newbyteorder("=")
    is_number = jax.numpy.issubdtype(native, jax.numpy.number) or native == np.bool_
    if not is_number or not is_storable(native):
        raise TypeError(
            f"an array of dtype {data.dtype} cannot be saved; convert it to a dtype of JAX"
        )
    data = np.asarray(data, native, order="C")
    return _whole(number, path, "numpy", data, None, turn)


def _whole(
    number: int, path: Path, kind: str, data: Any, key_impl: str | None, turn: int
) -> Source:
    """Return the source of an array that every process has: one of them writes it."""
    leaf = ArrayLeaf(path=path, kind=kind, shape=data.shape, dtype=data.dtype, key_impl=key_impl)
    blocks = (Block(0, (0,) * data.ndim, data),) if _has_turn(turn) else ()
    saved_type = (data.shape, data.dtype)
    return Source(number, leaf, saved_type, grid=None, blocks=blocks, own=data)


def _has_turn(turn: int) -> bool:
    """Return True if this process writes an array that all processes have."""
    return turn % jax.process_count() == jax.process_index()


def _of_jax(
    number: int,
    path: Path,
    kind: str,
    array: jax.Array,
    turn: int,
    padded: ShardGrid | None = None,
) -> Source:
    """Return the source of an array.

    Args:
      padded: of an array with padding, the grid of its elements.
    """
    keys_or_data, key_impl = array, None
    shape = array.shape if padded is None else padded.global_shape
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        key_impl = str(jax.random.key_impl(array))
        array = jax.random.key_data(array)
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding | SingleDeviceSharding):
        if not array.is_fully_addressable:
            raise TypeError(
                f"the array has the sharding {sharding!r}, which names no mesh and spec; give it "
                "one with jax.device_put(array, NamedSharding(mesh, spec))"
            )
        if key_impl is not None:  # few bytes; NumPy has no keys for a fingerprint
            keys = jax.device_put(keys_or_data, jax.local_devices()[0])[tuple(map(slice, shape))]
            return _of_jax(number, path, kind, keys, turn)
        return _whole(number, path, kind, np.asarray(array), key_impl, turn)
    sharding = sharding_of(array)
    is_named = isinstance(array.sharding, NamedSharding)
    # All processes have the same mesh, as was checked. A single device is local to its process.
    is_shared = is_named or jax.process_count() == 1
    if padded is None:
        grid, view = grid_of_array(array), view_of_array(array)
    else:
        grid = _of_data(padded, array.shape)
        view = grid.view(jax.process_index())
    blocks = distinct_shards(array, grid)
    own = tuple(blocks) if _has_turn(turn) else ()
    written = view.written_blocks(turn) if is_shared else own
    leaf = ArrayLeaf(
        path=path,
        kind=kind,
        shape=grid.global_shape,
        dtype=np.dtype(array.dtype),
        key_impl=key_impl,
        spec=format_spec(sharding.spec) if is_named else None,
        mesh=dict(sharding.mesh.shape) if is_named and isinstance(sharding.mesh, Mesh) else None,
    )
    return Source(
        number,
        leaf,
        saved_type=(shape, keys_or_data.dtype),
        grid=grid,
        blocks=tuple(
            Block(block, tuple([s.start or 0 for s in grid.block_index(block)]), blocks[block])
            for block in written
            if padded is None or blocks[block].size
        ),
        own=None if is_shared else array,
    )


def _of_data(grid: ShardGrid, shape: Shape) -> ShardGrid:
    """Return the grid of the data of PRNG keys, which has more dimensions, or that of an array."""
    sizes = grid.global_shape + shape[len(grid.global_shape) :]
    return ShardGrid(sizes, grid.mesh_shape, grid.spec, pad=True, process_of=grid.processes)
