"""Trees saved as safetensors files, against gathering them in one process, and against the disk.

The processes are real and share this machine's cores and its disk. Each times its own part; the
slowest counts.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import gda
from benchmarks.checkpoint.checkpoints import peak_of
from benchmarks.pairs import Side
from benchmarks.work import Faster, OfSpeed, WithinMiB, Work
from gda.arrays.process_local import distinct_shards
from gda.mesh import grid_of_array
from gda.testing.pool import Pool

PROCESSES, DEVICES = 4, 2
COLUMNS = 4096


class Model(NamedTuple):
    """Matrices of float32 of 64 MiB each, all sharded alike over two axes."""

    spec: PartitionSpec
    matrices: int = 8
    rows: int = 4096

    def smaller(self) -> Model:
        return self._replace(matrices=2, rows=256)


ROWS, BOTH = Model(PartitionSpec(("x", "y"))), Model(PartitionSpec("y", "x"))
COPIES = Model(PartitionSpec("y"))


# In every process.


@cache
def _tree(model: Model) -> dict[str, gda.GlobalArray]:
    mesh = Mesh(np.array(jax.devices()).reshape(PROCESSES, DEVICES), ("x", "y"))
    shape = (model.rows, COLUMNS)
    rows = np.arange(model.rows, dtype=np.float32)[:, None]

    def block(index: Any) -> Any:
        return np.repeat(rows[index[0]], len(range(*index[1].indices(COLUMNS))), axis=1)

    layout = NamedSharding(mesh, model.spec)
    return {
        f"w{number}": gda.GlobalArray.from_callback(shape, layout, block, dtype=np.float32)
        for number in range(model.matrices)
    }


def _gda(model: Model, folder: str) -> None:
    gda.storage.save_safetensors(folder, _tree(model))


def _gathered(model: Model, folder: str) -> None:
    """Gather every array in process 0, which saves them."""
    arrays = {name: g.gather(process=0) for name, g in _tree(model).items()}
    if jax.process_index() == 0:
        path = os.path.join(folder, "model.safetensors")
        save_file({name: np.asarray(values) for name, values in arrays.items()}, path)
        _sync(path)
    gda.check_processes_agree({}, name="saved")


def _raw(model: Model, folder: str) -> None:
    """Write the bytes of this process into a file of its own."""
    path = os.path.join(folder, str(jax.process_index()))
    with open(path, "wb", buffering=0) as file:
        for g in _tree(model).values():
            view = grid_of_array(g.array).view(jax.process_index())
            data_of = distinct_shards(g.array, grid_of_array(g.array))
            for number in view.written_blocks():
                file.write(np.asarray(data_of[number]).data)
    _sync(path)


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


WAYS = {"gda": _gda, "gathered": _gathered, "raw": _raw}


def seconds(way: str, model: Model, folder: str) -> float:
    """Return how long this process takes."""
    jax.block_until_ready(_tree(model))
    gda.check_processes_agree({}, name="ready")
    with gda.checking_agreement(False, timeout=600):
        start = time.perf_counter()
        WAYS[way](model, folder)
        return time.perf_counter() - start


def peak(model: Model, folder: str) -> float:
    """Return the MiB that this process holds at most beyond the arrays."""
    _gda(model.smaller(), folder)  # what is imported and started once does not count
    jax.block_until_ready(_tree(model))
    return max(peak_of(lambda: _gda(model, folder)), 1) / 2**20


# Here.


@cache
def _pool() -> Pool:
    return Pool(PROCESSES, devices=DEVICES)


def _in_new_folder(function: Any, *args: Any) -> float:
    folder = tempfile.mkdtemp(prefix="gda-safetensors-")
    try:
        return max(_pool().run(function, *args, folder, timeout=300))
    finally:
        shutil.rmtree(folder)
        os.sync()  # or the next side would pay for the removal


def _saving(model: Model, quick: bool, measured: Sequence[Any]) -> Sequence[Side]:
    model = model.smaller() if quick else model
    folder = Path(tempfile.mkdtemp(prefix="gda-safetensors-"))
    _pool().run(seconds, "gda", model, str(folder), timeout=300)
    tensors = gda.storage.open_safetensors(folder)
    rows = np.arange(model.rows, dtype=np.float32)
    assert all((tensor[:, -1] == rows).all() for tensor in tensors.values())
    shutil.rmtree(folder)
    return [Side(partial(_in_new_folder, *each, model), times_itself=True) for each in measured]


_RAW = "raw write and fsync, a file for each process"
_GATHERED = "gather(process=0), safetensors.numpy.save_file and fsync"


def works(quick: bool) -> list[Work]:
    """Return the works; small ones if ``quick``."""
    times = [
        Work(
            f"save_safetensors of 512 MiB of float32 in {PROCESSES} processes: {name}",
            partial(_saving, model, quick, [(seconds, way) for way in ("gda", *ways)]),
            rivals,
            ours="save_safetensors",
            raw=_RAW,
            seconds=10,
        )
        for name, model, ways, rivals in [
            ("rows", ROWS, ["raw", "gathered"], {_RAW: OfSpeed(0.7), _GATHERED: Faster(3)}),
            ("rows and columns, in runs of 4 KiB", BOTH, ["raw"], {_RAW: OfSpeed(0.6)}),
            ("rows, each in 4 processes", COPIES, ["raw"], {_RAW: OfSpeed(0.6)}),
        ]
    ]
    memory = Work(
        "memory of a process beyond the arrays, save_safetensors of 512 MiB",
        partial(_saving, BOTH, quick, [(peak,)]),
        limit=WithinMiB(128),  # two devices, each with 32 MiB of rows and 32 MiB on their way
        ours="save_safetensors",
        unit="MiB",
    )
    return [*times, memory]
