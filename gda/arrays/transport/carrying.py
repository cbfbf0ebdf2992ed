"""Arrays on their way from any devices to any others.

Pieces that stay in their process are copied there. The others go in rounds, packed into flat
buffers, which one program carries: an ``all_to_all`` if each device has as much for each of very
many, else a ``ppermute`` for each lane. ``gda/layout/reshard/rounds.py`` has lanes and rounds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from gda.arrays.dtypes import is_extended
from gda.arrays.process_local import data_by_device
from gda.arrays.transport.staging import DeviceStaging, HostStaging
from gda.layout.cover import groups_within
from gda.layout.grid import ShardGrid
from gda.layout.reshard.rounds import MovedPiece, Packets, Relocation, Round, Routes, Streams
from gda.layout.spec import Shape
from gda.mesh import (
    Device,
    MeshAndSpec,
    checked_partition_spec,
    devices_of,
    grid_of,
    local_positions,
    memory_kind_of,
    mesh_of_all,
    named_sharding,
    own_settings,
    processes_of,
    sharding_of,
)
from gda.multihost.agreement import watching
from gda.multihost.descriptions import leaf_path
from gda.multihost.failure_watch import FailureWatch

# The bytes of a round are still in the cache when a device unpacks them.
ROUND_BYTES_ON_CPU = 8 * 1024 * 1024
# The buffers of a device at a time: sent and received, of this round and of the next. The transport
# holds about as much as one more.
BUFFERS = 5


@dataclass(frozen=True, eq=False)
class Relayout:
    """An array, and the layout that it is to have.

    In a process without its data, ``array`` is a ``jax.ShapeDtypeStruct`` with its sharding.
    """

    array: Any
    over: MeshAndSpec  # without a kind of memory, that of the array stays
    shape: Shape | None = None  # without padding, if it may be padded
    keys: tuple[Any, ...] = ()  # of its path in a tree

    @property
    def path(self) -> str:
        return leaf_path(self.keys)

    @property
    def devices(self) -> tuple[Device, ...]:
        return *devices_of(sharding_of(self.array).mesh), *devices_of(self.over.mesh)

    @cached_property
    def processes(self) -> tuple[int, ...]:
        """The processes with devices of either layout, ascending, the same for all of them."""
        meshes: Any = sharding_of(self.array).mesh, self.over.mesh
        return tuple(sorted({number for mesh in meshes for number in processes_of(mesh).numbers}))

    @property
    def is_local(self) -> bool:
        return self.processes == (jax.process_index(),)

    def check(self) -> None:
        if not isinstance(self.array, jax.Array) and sharding_of(self.array).addressable_devices:
            raise ValueError(
                "this process has devices of the mesh that the array is on, so it must give the "
                "array and not a jax.ShapeDtypeStruct"
            )
        _ = self.source, self.sharding

    @cached_property
    def source(self) -> ShardGrid:
        """The grid of the present layout, with processes."""
        before = sharding_of(self.array)
        return self._grid(before.mesh, before.spec)

    @cached_property
    def target(self) -> ShardGrid:
        """The grid of the new layout, with processes."""
        return self._grid(self.over.mesh, self._wanted)

    @cached_property
    def _wanted(self) -> PartitionSpec:
        """The new spec, which the user may have given as an iterator."""
        shape = self.array.shape if self.shape is None else self.shape
        return checked_partition_spec(self.over.spec, shape, self.over.mesh.shape)

    def _grid(self, mesh: Any, spec: PartitionSpec) -> ShardGrid:
        shape = self.array.shape if self.shape is None else self.shape
        return grid_of(shape, mesh, spec, self.shape is not None)

    @cached_property
    def sharding(self) -> NamedSharding:
        kind = self.over.memory_kind or memory_kind_of(sharding_of(self.array))
        return named_sharding(self.target.padded_shape, self.over.mesh, self._wanted, kind)

    def described(self) -> dict[str, Any]:
        shape, dtype = self.array.shape, self.array.dtype
        now = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_of(self.array))
        layouts = {"now": now, "wanted": self.sharding}
        if self.source.is_padded or self.target.is_padded:
            layouts["shape"] = jax.ShapeDtypeStruct(self.source.global_shape, dtype)
        return layouts


def carry(
    relayouts: Sequence[Relayout], name: str, most_bytes: int, donate: bool
) -> list[jax.Array]:
    """Return the arrays in their new layouts. Communicates.

    The processes with devices of any of the meshes call it, with the same layouts. A device holds
    at most ``most_bytes`` beside the arrays, and at least one element for each buffer. With
    ``donate``, blocks that stay are copied. ``name`` is the function that the user called.
    """
    leaves = [_MovingArray(number, each) for number, each in enumerate(relayouts)]
    devices = {device for each in relayouts for device in each.devices}
    if not any(device.process_index == jax.process_index() for device in devices):
        with own_settings(), jax.enable_x64(True):
            return [leaf.result() for leaf in leaves]
    processes = tuple(sorted({device.process_index for device in devices}))
    results: dict[int, jax.Array] = {}
    # Without 64 bits, JAX would narrow the blocks that have them.
    with watching(name, processes) as watch, own_settings(), jax.enable_x64(True):
        waves = list(_waves(leaves, most_bytes))
        # An array may be several leaves of a tree.
        last = {id(leaf.relayout.array): leaf for wave in waves for leaf in wave}
        for wave in waves:
            _Wave(wave, most_bytes, watch).carry()
            if donate:
                jax.block_until_ready([leaf.copy_kept() for leaf in wave])
                for leaf in wave:
                    array = leaf.relayout.array
                    if last[id(array)] is leaf and isinstance(array, jax.Array):
                        array.delete()
            results |= {leaf.number: leaf.result() for leaf in wave}
    return [results[number] for number in range(len(leaves))]


def _waves(leaves: Iterable[_MovingArray], most_bytes: int) -> Iterator[list[_MovingArray]]:
    """Yield the leaves in groups of one dtype and move, so that small ones share the rounds.

    A device holds the donated arrays of a group twice for a while, so groups are within a limit.
    """
    alike: defaultdict[Any, list[_MovingArray]] = defaultdict(list)
    for leaf in leaves:
        alike[leaf.dtype, leaf.mesh, leaf.key].append(leaf)
    for group in alike.values():
        yield from groups_within(group, [leaf.nbytes for leaf in group], most_bytes)


class _MovingArray:
    """One array: the present blocks of this process, and its new ones.

    ``numbers`` are the places of devices in ``mesh``, which has those of both layouts. ``new`` are
    the new blocks that are complete; those of ``kept`` are also blocks of the array before. PRNG
    keys move as the numbers that they consist of.
    """

    def __init__(self, number: int, relayout: Relayout) -> None:
        self.number, self.relayout = number, relayout
        source: Any = sharding_of(relayout.array).mesh
        target: Any = relayout.sharding.mesh
        self.mesh, self.numbers = _mesh_of_both(source, target)
        self._devices = devices_of(source), devices_of(target)
        self.new_devices = list(local_positions(target))
        self._is_keys = is_extended(relayout.array.dtype)
        one = jax.ShapeDtypeStruct((), relayout.array.dtype)
        numbers: Any = jax.eval_shape(jax.random.key_data, one) if self._is_keys else one
        self.dtype, self._key_shape = numbers.dtype, numbers.shape
        self.new: dict[Device, jax.Array] = {}
        self.kept: list[Device] = []

    @property
    def block_shape(self) -> Shape:
        return *self.relayout.target.shard_shape, *self._key_shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.block_shape) * self.dtype.itemsize

    @cached_property
    def relocation(self) -> Relocation | None:
        """The pieces; ``None`` of an array without elements."""
        source, target = self.relayout.source, self.relayout.target
        if 0 in source.global_shape:
            return None
        before, after = ([self.numbers[device] for device in of] for of in self._devices)
        return Relocation(self.number, (source, target), (before, after), self._key_shape)

    @property
    def key(self) -> Any:
        return None if self.relocation is None else self.relocation.key

    def blocks(self) -> dict[int, jax.Array]:
        """Return the blocks of this process by the numbers of devices, in the default memory."""
        if not isinstance(self.relayout.array, jax.Array):
            return {}
        blocks = {}
        for shard in self.relayout.array.addressable_shards:
            block, device = shard.data, shard.device
            if self._is_keys:
                block = jax.random.key_data(block)
            if block.sharding.memory_kind != device.default_memory().kind:
                block = jax.device_put(block, SingleDeviceSharding(device))
            blocks[self.numbers[device]] = block
        return blocks

    def result(self) -> jax.Array:
        kind = memory_kind_of(self.relayout.sharding)
        blocks = []
        for device in self.new_devices:
            block = self.new[device]
            if self._is_keys:
                block = jax.random.wrap_key_data(block, impl=self._impl)
            if kind is not None:
                block = jax.device_put(block, SingleDeviceSharding(device, memory_kind=kind))
            blocks.append(block)
        shape, dtype = self.relayout.target.padded_shape, self.relayout.array.dtype
        return jax.make_array_from_single_device_arrays(
            shape, self.relayout.sharding, blocks, dtype=dtype
        )

    def copy_kept(self) -> list[jax.Array]:
        """Begin to copy the blocks that are in both arrays; return the copies."""
        for device in self.kept:
            block = self.new[device]
            self.new[device] = jax.device_put(block, block.sharding, may_alias=False)
        return [self.new[device] for device in self.kept]

    @property
    def _impl(self) -> Any:
        found: list[Any] = []
        one = jax.ShapeDtypeStruct((), self.relayout.array.dtype)
        jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), one)
        return found[0]


@lru_cache(maxsize=256)
def _mesh_of_both(source: Mesh, target: Mesh) -> tuple[Mesh, dict[Device, int]]:
    """Return a mesh of the devices of two meshes, ordered by id, and the place of each device."""
    mesh: Any = mesh_of_all([*devices_of(source), *devices_of(target)])
    return mesh, {device: number for number, device in enumerate(devices_of(mesh))}


class _Wave:
    """Some arrays of one dtype and move, whose pieces travel together."""

    def __init__(
        self, leaves: Sequence[_MovingArray], most_bytes: int, watch: FailureWatch
    ) -> None:
        self._leaves = {leaf.number: leaf for leaf in leaves}
        self._blocks = {leaf.number: leaf.blocks() for leaf in leaves}
        self._new: dict[tuple[int, Device], Any] = {}
        self._watch, self._mesh = watch, leaves[0].mesh
        mine = {*self._mesh.local_devices}
        self._mine = {
            number: device for device, number in leaves[0].numbers.items() if device in mine
        }
        dtype = leaves[0].dtype
        is_cpu = all(device.platform == "cpu" for device in devices_of(self._mesh))
        self._staging = HostStaging(dtype) if is_cpu else DeviceStaging(dtype)
        nbytes = most_bytes // BUFFERS
        nbytes = min(nbytes, ROUND_BYTES_ON_CPU) if is_cpu else nbytes
        self._most = max(nbytes // dtype.itemsize, 1)

    def carry(self) -> None:
        """Give the devices of this process their new blocks."""
        moves = [leaf.relocation for leaf in self._leaves.values() if leaf.relocation is not None]
        if moves and self._mine:
            self._carry(moves)
        for leaf in self._leaves.values():
            for device in leaf.new_devices:
                if device not in leaf.new:
                    new = self._new_block(leaf, device)
                    leaf.new[device] = self._staging.placed(new, device)

    def _carry(self, moves: Sequence[Relocation]) -> None:
        exchange = exchange_of(self._mesh, moves[0])
        routes = None if exchange is None else exchange.routes
        streams = Streams(moves, routes, jax.process_index())
        for piece in streams.near:
            self._move(piece)
        if exchange is not None:
            rounds = streams.rounds(max(self._most // sum(exchange.routes.widths), 1))
            works = (self._sending(exchange, streams, this) for this in rounds)
            self._watch.in_turn(works, partial(self._unpack, streams))

    def _new_block(self, leaf: _MovingArray, device: Device) -> Any:
        key = leaf.number, device
        if key not in self._new:
            has_padding = leaf.relayout.target.is_padded
            self._new[key] = self._staging.block(leaf.block_shape, device, zero=has_padding)
        return self._new[key]

    # Within this process.

    def _move(self, piece: MovedPiece) -> None:
        leaf, device = self._leaves[piece.leaf], self._mine[piece.target]
        block = self._blocks[piece.leaf][piece.source]
        if piece.sizes == block.shape == leaf.block_shape:
            if piece.source == piece.target:
                leaf.kept.append(device)
            else:
                block = jax.device_put(block, device)
            leaf.new[device] = block
            return
        source = self._staging.given(block)
        for part in piece.parts(self._most):
            into = self._new_block(leaf, device)
            self._new[part.leaf, device] = self._staging.copy(
                into, part.target_starts, source, part.source_starts, part.sizes
            )

    # Between processes.

    def _sending(
        self, exchange: Exchange, streams: Streams, this: Round
    ) -> tuple[SentRound, Callable[[], list[jax.Array]]]:
        sent = SentRound(this, [])
        sizes = [width * this.length for width in exchange.routes.widths]
        sending = [
            [
                self._sent(streams.sent.get((place, number), {}), sent, size, device)
                for place, device in self._mine.items()
            ]
            for number, size in enumerate(sizes)
        ]

        def send() -> list[jax.Array]:
            with own_settings(), jax.enable_x64(True):
                arrays = [
                    jax.make_array_from_single_device_arrays(
                        (size * self._mesh.size,), exchange.sharding, buffers
                    )
                    for size, buffers in zip(sizes, sending, strict=True)
                ]
                return jax.block_until_ready(exchange.send(arrays))

        return sent, send

    def _sent(self, packets: Packets, sent: SentRound, size: int, device: Device) -> jax.Array:
        """Return the buffer that a device sends; arbitrary numbers if it has nothing to send."""
        flat = self._packed(packets, sent, size, device)
        if flat is None:
            flat = self._staging.flat(size, device)
            sent.buffers.append((flat, device))
        return self._staging.sent(flat, device)

    def _packed(self, packets: Packets, sent: SentRound, size: int, device: Device) -> Any:
        flat = None
        for slot, packet in packets.items():
            for place, box in packet.boxes(sent.round):
                source = self._staging.given(self._blocks[box.leaf][box.source])
                if box.size == size:
                    flat = self._staging.flat_of(source, box.source_starts, box.sizes)
                    if flat is not None:
                        return flat
                flat = self._staging.flat(size, device) if flat is None else flat
                at = (slot * sent.round.length + place,)
                flat = self._staging.copy(flat, at, source, box.source_starts, box.sizes)
        if flat is not None:
            sent.buffers.append((flat, device))
        return flat

    def _unpack(self, streams: Streams, sent: SentRound, arrived: list[jax.Array]) -> None:
        for flat, device in sent.buffers:
            self._staging.take_back(flat, device)
        for number, array in enumerate(arrived):
            data_on = data_by_device(array)
            for place, device in self._mine.items():
                packets = streams.received.get((place, number))
                if not packets:
                    continue
                flat = self._staging.given(data_on[device])
                for slot, packet in packets.items():
                    for begin, box in packet.boxes(sent.round):
                        into = self._new_block(self._leaves[box.leaf], device)
                        at = (slot * sent.round.length + begin,)
                        self._new[box.leaf, device] = self._staging.copy(
                            into, box.target_starts, flat, at, box.sizes
                        )


class SentRound(NamedTuple):
    """A round under way, and the buffers that were packed for it, with their devices."""

    round: Round
    buffers: list[tuple[Any, Device]]


class Exchange(NamedTuple):
    """A program that sends flat buffers, one array for each buffer of its routes."""

    routes: Routes
    sharding: NamedSharding
    send: Callable[[Sequence[jax.Array]], list[jax.Array]]


@lru_cache(maxsize=256)
def exchange_of(mesh: Mesh, move: Relocation) -> Exchange | None:
    """Return the program for all moves of one key; ``None`` if nothing leaves its process."""
    routes = move.routes()
    if routes is None:
        return None
    (axis,) = mesh.axis_names
    spec = PartitionSpec(axis)

    def send(flats: Sequence[jax.Array]) -> list[jax.Array]:
        if routes.pairs is None:
            return [jax.lax.all_to_all(flat, axis, 0, 0, tiled=True) for flat in flats]
        lanes = zip(flats, routes.pairs, strict=True)
        return [jax.lax.ppermute(flat, axis, pairs.tolist()) for flat, pairs in lanes]

    program = jax.jit(jax.shard_map(send, mesh=mesh, in_specs=spec, out_specs=spec))
    return Exchange(routes, NamedSharding(mesh, spec), program)
