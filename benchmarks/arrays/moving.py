"""Arrays that move between meshes, against JAX, the disk, and plain copies and loopback.

The processes are real and share this machine's cores. Each times its own part; the slowest counts.
"""

from __future__ import annotations

import math
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gda
from benchmarks.checkpoint.checkpoints import peak_of
from benchmarks.pairs import Side
from benchmarks.work import AtMost, Faster, OfSpeed, WithinMiB, Work
from gda.arrays.transport import carrying
from gda.arrays.transport.carrying import exchange_of
from gda.layout.reshard.rounds import Relocation, Streams
from gda.mesh import mesh_of_all, own_settings
from gda.multihost.allgather import all_gather
from gda.testing.pool import Pool

PROCESSES, DEVICES = 4, 2
ROWS, COLUMNS = PartitionSpec("x"), PartitionSpec(None, "x")
MAX_BYTES = 64 * 2**20


class Move(NamedTuple):
    """A move of a matrix of float32 between devices, which are numbered over all processes."""

    before: tuple[int, ...]
    old: PartitionSpec
    after: tuple[int, ...]
    new: PartitionSpec
    mebibytes: int = 1024

    @property
    def shape(self) -> tuple[int, int]:
        return 16 * self.mebibytes, 16 * 1024

    def smaller(self) -> Move:
        return self._replace(mebibytes=16)

    def layout(self, devices: Sequence[int], spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(Mesh(np.array(jax.devices())[list(devices)], ("x",)), spec)

    @property
    def sharding(self) -> NamedSharding:
        return self.layout(self.after, self.new)

    def plan(self) -> gda.ReshardPlan:
        grids = [
            gda.ShardGrid(
                self.shape,
                {"x": len(devices)},
                spec,
                process_of=[device // DEVICES for device in devices],
            )
            for devices, spec in [(self.before, self.old), (self.after, self.new)]
        ]
        return gda.ReshardPlan(*grids, itemsize=4, source_ids=self.before, target_ids=self.after)


HALVES = Move((0, 1, 2, 3), ROWS, (4, 5, 6, 7), ROWS)
TRANSPOSED = Move(tuple(range(8)), ROWS, tuple(range(8)), COLUMNS)
EXCHANGED = Move(tuple(range(8)), ROWS, (7, 6, 5, 4, 3, 2, 1, 0), ROWS)
FEWER = Move(tuple(range(8)), ROWS, (0, 1, 2, 3), COLUMNS)


# In every process.


@lru_cache(maxsize=1)  # or the arrays of all moves would take 4 GiB
def _array(move: Move) -> gda.GlobalArray:
    sharding = move.layout(move.before, move.old)

    def block(index: Any) -> Any:
        rows, columns = (range(*s.indices(n)) for s, n in zip(index, move.shape, strict=True))
        return np.repeat(np.array(rows, np.float32)[:, None], len(columns), axis=1)

    return gda.GlobalArray.from_callback(move.shape, sharding, block, dtype=np.float32)


def _reshard(move: Move) -> Any:
    return _array(move).reshard(move.sharding, max_device_bytes=MAX_BYTES).array


def _device_put(move: Move) -> Any:
    return jax.device_put(_array(move).array, move.sharding)


def _through_disk(move: Move, path: str) -> Any:
    gda.checkpoint.save(path, _array(move))
    like = jax.ShapeDtypeStruct(move.shape, np.float32, sharding=move.sharding)
    return gda.checkpoint.restore(path, like)


def _loopback(move: Move) -> None:
    """Send as many bytes from process to process by loopback, and copy as many within each."""
    _exchange(*_buffers(move))


@lru_cache(maxsize=1)
def _buffers(move: Move) -> tuple[Any, Any, Any]:
    """Return a connection for each link, with bytes or their number, and bytes to copy here."""
    plan, me = move.plan(), jax.process_index()
    server = socket.create_server(("127.0.0.1", 0), backlog=PROCESSES)
    mine = np.array([server.getsockname()[1]], np.int64).view(np.uint8)
    ports = all_gather(mine, tuple(range(PROCESSES))).view(np.int64)[:, 0]
    sends, gets = [], []
    links: Counter[tuple[int, int]] = Counter()
    for move_of_piece in plan.moves():
        ends = move.before[move_of_piece.source], move.after[move_of_piece.target]
        links[ends[0] // DEVICES, ends[1] // DEVICES] += move_of_piece.nbytes
    for (source, target), nbytes in sorted(links.items()):
        if source == me != target:
            connection = socket.create_connection(("127.0.0.1", int(ports[target])))
            connection.sendall(bytes([me]))
            sends.append((connection, memoryview(bytearray(nbytes))))
    nbytes_from = {
        source: nbytes for (source, target), nbytes in links.items() if target == me != source
    }
    for _ in nbytes_from:
        connection, _ = server.accept()
        gets.append((connection, nbytes_from[connection.recv(1)[0]]))
    server.close()
    within = plan.nbytes_total - plan.nbytes_between_processes
    devices = [device // DEVICES for device in move.after]
    share = within * devices.count(me) // len(devices)
    return sends, gets, np.ones(share, np.uint8)


def _exchange(sends: Any, gets: Any, kept: Any) -> None:
    def receive(connection: socket.socket, nbytes: int) -> None:
        # Into new memory, as a new array has to be.
        data, done = memoryview(np.empty(nbytes, np.uint8)), 0  # pyright: ignore
        while done < nbytes:
            done += connection.recv_into(data[done:])

    threads = [
        threading.Thread(target=connection.sendall, args=(data,)) for connection, data in sends
    ]
    threads += [threading.Thread(target=receive, args=each) for each in gets]
    for thread in threads:
        thread.start()
    kept.copy()
    for thread in threads:
        thread.join()


def _collectives(move: Move) -> None:
    """Run the programs of the reshard, with as many rounds, on buffers that are there already."""
    send, rounds = _filled(move)
    with own_settings():
        for arrays in rounds:
            jax.block_until_ready(send(arrays))


@cache
def _filled(move: Move) -> tuple[Any, list[list[jax.Array]]]:
    plan, mesh = move.plan(), mesh_of_all(jax.devices()[i] for i in {*move.before, *move.after})
    relocation = Relocation(0, (plan.source, plan.target), (move.before, move.after))
    exchange: Any = exchange_of(mesh, relocation)
    most = min(MAX_BYTES // carrying.BUFFERS, carrying.ROUND_BYTES_ON_CPU) // 4
    streams = Streams([relocation], exchange.routes, jax.process_index())
    made: dict[int, jax.Array] = {}

    def buffer(size: int) -> jax.Array:
        if size not in made:
            shape = (size * exchange.sharding.mesh.size,)
            made[size] = jax.make_array_from_callback(
                shape, exchange.sharding, lambda _: np.ones(size, np.float32)
            )
        return made[size]

    rounds = streams.rounds(most // sum(exchange.routes.widths))
    widths = exchange.routes.widths
    return exchange.send, [[buffer(width * this.length) for width in widths] for this in rounds]


WAYS = {"gda": _reshard, "device_put": _device_put, "disk": _through_disk}
WAYS |= {"loopback": _loopback, "collectives": _collectives}


def seconds(way: str, move: Move, *args: Any) -> float:
    """Return how long this process takes."""
    if way not in ("loopback", "collectives"):
        _array(move).block_until_ready()
    with gda.checking_agreement(False):  # the pool switches it on; a training run would not
        start = time.perf_counter()
        jax.block_until_ready(WAYS[way](move, *args))
        return time.perf_counter() - start


def is_right(move: Move, *ways: str) -> bool:
    rows = np.arange(move.shape[0], dtype=np.float32)[:, None]
    return all(
        bool((np.asarray(shard.data) == rows[shard.index[0]]).all())
        for way in ways
        for shard in WAYS[way](move).addressable_shards
    )


def peak(move: Move) -> float:
    """Return the MiB that this process holds at most beyond both arrays."""
    _reshard(move.smaller())  # what is compiled and started once does not count
    _array(move).block_until_ready()
    mine = sum(device // DEVICES == jax.process_index() for device in move.after)
    block = math.prod(move.shape) * 4 // len(move.after)
    return max(peak_of(lambda: _reshard(move)) - mine * block, 1) / 2**20


# Here.


@cache
def _pool() -> Pool:
    return Pool(PROCESSES, devices=DEVICES)


def _moving(move: Move, ways: Sequence[str], quick: bool) -> Sequence[Side]:
    move = move.smaller() if quick else move
    pool = _pool()
    assert all(pool.run(is_right, move, *(way for way in ways if way in ("gda", "device_put"))))

    def side(way: str) -> Side:
        if way != "disk":
            return Side(lambda: max(pool.run(seconds, way, move)), times_itself=True)

        def fresh() -> tuple[str]:
            return (tempfile.mkdtemp(prefix="gda-moving-"),)

        def through(path: str) -> float:
            try:
                return max(pool.run(seconds, way, move, str(Path(path) / "saved")))
            finally:
                shutil.rmtree(path)

        return Side(through, fresh, times_itself=True)

    return [side(way) for way in ways]


def _remembering(move: Move, quick: bool) -> Sequence[Side]:
    pool = _pool()
    move = move.smaller() if quick else move
    return [Side(lambda: max(pool.run(peak, move)), times_itself=True)]


# The collectives inform: they are XLA's, over gloo, and a reshard takes at least as long.
_RIVALS = {
    "collectives": ("the same collectives alone", None),
    "device_put": ("jax.device_put", AtMost(1.1)),
    "disk": ("checkpoint.save and restore", Faster(3)),
    "loopback": ("loopback between processes and memory within", OfSpeed(0.5)),
}


def works(quick: bool) -> list[Work]:
    """Return the works; small ones if ``quick``."""
    times = [
        Work(
            f"reshard of 1 GiB of float32 in {PROCESSES} processes: {name}",
            partial(_moving, move, ["gda", *rivals], quick),
            dict(_RIVALS[rival] for rival in rivals),
            ours="reshard",
            seconds=12,
        )
        for name, move, rivals in [
            (
                "rows on 4 devices to rows on the 4 others",
                HALVES,
                ["disk", "collectives", "loopback"],
            ),
            ("rows on 8 devices to columns on 4 of them", FEWER, ["collectives", "loopback"]),
            (
                "rows to columns on the same 8 devices",
                TRANSPOSED,
                ["device_put", "collectives", "loopback"],
            ),
            (
                "rows on 8 devices in the opposite order",
                EXCHANGED,
                ["device_put", "collectives", "loopback"],
            ),
        ]
    ]
    memory = [
        Work(
            f"memory of a process with {DEVICES} devices beyond both arrays, reshard of 1 GiB with "
            f"max_device_bytes of {MAX_BYTES // 2**20} MiB: {name}",
            partial(_remembering, move, quick),
            limit=WithinMiB(DEVICES * MAX_BYTES // 2**20),
            ours="reshard",
            unit="MiB",
        )
        for name, move in [
            ("rows on 4 devices to rows on the 4 others", HALVES),
            ("rows to columns on the same 8 devices", TRANSPOSED),
        ]
    ]
    return [*times, *memory]
