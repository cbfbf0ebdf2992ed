"""A tree of one program pulled by another, against plain sockets and against files.

The programs are pools of real processes of this machine, and share its cores. Each process that
pulls times its own part; the slowest counts.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import gda
from benchmarks.checkpoint.checkpoints import begin_peak, peak_bytes, peak_of
from benchmarks.pairs import Side
from benchmarks.work import Faster, OfSpeed, Within, WithinMiB, Work
from gda.exchange.pieces import Needed, pulled_pieces
from gda.layout.reshard.flow import tiling_of
from gda.testing.pool import Pool

OFFERING, PULLING = 4, 2
ROWS, COLUMNS = PartitionSpec("x"), PartitionSpec(None, "x")
MIB = 2**20
BOUND = 128 + 64  # MiB: max_bytes, and what a process may take for itself


# In every process.


@cache
def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("x",))


@cache
def _tree(mebibytes: int, count: int) -> dict[str, gda.GlobalArray]:
    columns = 4096 if count == 1 else 64
    shape = (mebibytes * MIB // 4 // columns if count == 1 else 64, columns)

    def block(number: int, index: Any) -> Any:
        rows, _ = (range(*s.indices(n)) for s, n in zip(index, shape, strict=True))
        return np.repeat(np.array(rows, np.float32)[:, None] + number, columns, axis=1)

    return {
        f"w{number}": gda.GlobalArray.from_callback(shape, _mesh(), ROWS, partial(block, number))
        for number in range(count)
    }


_offers: list[gda.Offer] = []


def offer(mebibytes: int, count: int) -> str:
    while _offers:
        _offers.pop().close()
    _offers.append(gda.offer(_tree(mebibytes, count)))
    return _offers[0].address


def pull(address: str) -> float:
    start = time.perf_counter()
    jax.block_until_ready(gda.pull(address, _mesh(), COLUMNS, plain=True, timeout=100))
    return time.perf_counter() - start


def is_right(address: str) -> bool:
    tree = gda.pull(address, _mesh(), COLUMNS, plain=True)
    return all(
        bool((np.asarray(shard.data)[:, 0] == np.arange(leaf.shape[0]) + int(name[1:])).all())
        for name, leaf in tree.items()
        for shard in leaf.addressable_shards
    )


def save(path: str, mebibytes: int, count: int) -> float:
    start = time.perf_counter()
    gda.checkpoint.save(path, _tree(mebibytes, count))
    return time.perf_counter() - start


def restore(path: str) -> float:
    start = time.perf_counter()
    jax.block_until_ready(gda.checkpoint.restore(path, mesh=_mesh(), specs=COLUMNS, plain=True))
    return time.perf_counter() - start


def peak_of_pull(address: str, mebibytes: int) -> float:
    """Return the MiB that this process holds at most beyond its part of the tree."""
    pulled = partial(gda.pull, address, _mesh(), COLUMNS, plain=True, timeout=100)
    pulled()
    return max(peak_of(pulled) / MIB - mebibytes / PULLING, 1)


_before: list[int] = []


def begin() -> None:
    _before[:] = [begin_peak()]


def peak() -> float:
    """Return the MiB that this process has held at most beyond those at the beginning."""
    return max((peak_bytes() - _before[0]) / MIB, 1)


# Sockets: as many bytes, from each process to each.

_listening: list[Any] = []


def send_to_all(nbytes: int) -> int:
    """Let every process that connects have so many bytes; return the port."""
    data = np.ones(nbytes, np.uint8).data
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=send, args=(connection,), daemon=True).start()

    def send(connection: socket.socket) -> None:
        while connection.recv(1):
            connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    _listening.append(server)
    return server.getsockname()[1]


@cache
def _links(ports: tuple[int, ...], nbytes: int) -> list[tuple[socket.socket, memoryview]]:
    connections = [socket.create_connection(("127.0.0.1", port)) for port in ports]
    return [(each, np.ones(nbytes, np.uint8).data) for each in connections]


def receive_from_all(ports: tuple[int, ...], nbytes: int) -> float:
    """Receive so many bytes from every port, in memory that was used before."""

    def receive(connection: socket.socket, data: memoryview) -> None:
        connection.sendall(b"1")
        done = 0
        while done < nbytes:
            done += connection.recv_into(data[done:])

    links = _links(ports, nbytes)
    start = time.perf_counter()
    threads = [threading.Thread(target=receive, args=each) for each in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


# Here.


@cache
def _pools() -> tuple[Pool, Pool]:
    return Pool(OFFERING), Pool(PULLING)


def _prepared(mebibytes: int, count: int, ways: Sequence[str]) -> Sequence[Side]:
    offering, pulling = _pools()
    address = offering.run(offer, mebibytes, count)[0]
    assert all(pulling.run(is_right, address))
    nbytes = mebibytes * MIB // OFFERING // PULLING
    ports = tuple(offering.run(send_to_all, nbytes)) if "sockets" in ways else ()

    def through_files() -> float:
        path = tempfile.mkdtemp(prefix="gda-programs-")
        try:
            saved = max(offering.run(save, f"{path}/saved", mebibytes, count))
            return saved + max(pulling.run(restore, f"{path}/saved"))
        finally:
            shutil.rmtree(path)

    runs: dict[str, Callable[[], float]] = {
        "pull": lambda: max(pulling.run(pull, address)),
        "sockets": lambda: max(pulling.run(receive_from_all, ports, nbytes)),
        "files": through_files,
    }
    return [Side(runs[way], times_itself=True) for way in ways]


def _remembered(mebibytes: int, is_offering: bool) -> Sequence[Side]:
    offering, pulling = _pools()
    address = offering.run(offer, mebibytes, 1)[0]

    def run() -> float:
        offering.run(begin)
        of_pulls = pulling.run(peak_of_pull, address, mebibytes)
        return max(offering.run(peak) if is_offering else of_pulls)

    return [Side(run, times_itself=True)]


# A plan for devices that are not here.

_DEVICES = 1024, 256
_PER_PROCESS = 8
# Of a transformer of 7 billion parameters: its matrices and vectors, as many as it has.
_SHAPES = {(32000, 4096): 2, (4096, 4096): 128, (4096, 11008): 64, (11008, 4096): 32, (4096,): 65}


def _grids(shape: tuple[int, ...]) -> list[gda.ShardGrid]:
    specs = [("data", "model"), ("model", "data")] if len(shape) > 1 else [("data",), ("model",)]
    meshes = [{"data": devices // 8, "model": 8} for devices in _DEVICES]
    return [
        gda.ShardGrid(shape, mesh, spec, process_of=np.arange(devices) // _PER_PROCESS)
        for mesh, spec, devices in zip(meshes, specs, _DEVICES, strict=True)
    ]


def plan() -> int:
    """Plan, for all arrays, what one process pulls; return the number of pieces."""
    count = 0
    for shape, arrays in _SHAPES.items():
        for _ in range(arrays):
            source, target = _grids(shape)
            tiling = tiling_of(target)
            starts = [
                tuple(each.indices(size)[0] for each, size in zip(index, shape, strict=True))
                for index, _ in target.shards_at(range(_PER_PROCESS))
            ]
            distinct = tuple({tiling.block_at(start): start for start in starts}.values())
            needed = Needed(tiling, distinct, (0,) * len(distinct), _DEVICES[1] // _PER_PROCESS)
            count += len(pulled_pieces(source, needed, frozenset()))
    return count


def _planned() -> Sequence[Side]:
    return [Side(plan)]


_SOCKETS, _FILES = "plain sockets between as many processes", "checkpoint.save and restore"


def works(quick: bool = False) -> list[Work]:
    """Return the works; small ones if ``quick``."""
    # From two sizes follow the time that a pull takes for no bytes, and that for each more.
    sizes = [(16, None, None)] if quick else [(1024, OfSpeed(0.5), Faster(2)), (64, None, None)]
    programs = f"from {OFFERING} processes to {PULLING}"
    times = [
        Work(
            f"pull of {mebibytes} MiB of float32 {programs}, rows to columns",
            partial(_prepared, mebibytes, 1, ["pull", "sockets", "files"]),
            {_SOCKETS: sockets, _FILES: files},
            ours="gda.pull",
            devices=1,
            seconds=15 if mebibytes == 1024 else 5,
        )
        for mebibytes, sockets, files in sizes
    ]
    small = Work(
        f"pull of 1,000 arrays of 16 KiB {programs}, rows to columns",
        partial(_prepared, 16, 1000, ["pull", "files"]),
        {_FILES: None},
        ours="gda.pull",
        devices=1,
        seconds=6,
    )
    largest = sizes[0][0]
    memory = [
        Work(
            f"memory of a process that {what} beyond its part, {largest} MiB {programs}",
            partial(_remembered, largest, what == "offers"),
            limit=WithinMiB(BOUND),
            ours="gda.pull",
            devices=1,
            unit="MiB",
        )
        for what in ("pulls", "offers")
    ]
    planned = Work(
        f"plan of one of {_DEVICES[1] // _PER_PROCESS} processes for a pull of 7 billion "
        f"parameters, from {_DEVICES[0]:,} devices to {_DEVICES[1]}",
        _planned,
        limit=Within(2000),
        ours="gda.pull",
        devices=1,
    )
    return [*times, small, *memory, planned]
