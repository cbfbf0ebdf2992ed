"""Checkpoints: saved and restored, by gda and by what else there is.

The arrays are float32 of a normal distribution, as weights are; compression finds little in them.
Every save goes to a fresh folder of one file system and is timed until it is durable; what is there
from before is removed outside of the timing. Every restore finds its files in the page cache, so
that what a way does with the bytes is compared, and not the disk. The ways are those of
``checkpointers``, and so are the plain ways: the same bytes in the same round, in files of 32 MiB,
read and read with checksums by as many threads as there are cores, and written in three ways.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.arrays.building import MIB
from benchmarks.checkpoint.checkpointers import (
    BEGIN,
    GDA,
    JAX,
    MEMMAP,
    OPENED,
    ORBAX,
    ORBAX_V1,
    SAFETENSORS,
    SAVEZ,
    TENSORSTORE,
    TORCH,
    UNCOMPRESSED,
    WAYS,
    Block,
    Like,
    Tree,
    fsync,
    gda_begin,
    page_aligned,
    read,
    read_checked,
    write,
    write_directly,
)
from benchmarks.pairs import Side
from benchmarks.work import AtMost, Faster, Floor, OfSpeed, Target, Within, WithinMiB, Work
from gda import storage
from gda.testing.pool import Pool

P = PartitionSpec

DEVICES, PROCESSES = 8, 4
_PAGE = 4096
ROWS, COLUMNS, WHOLE = P("x"), P(None, "x"), P()


@dataclass(frozen=True)
class Scale:
    """The size of a save: a number of square arrays of float32."""

    name: str
    arrays: int
    side: int

    @property
    def nbytes(self) -> int:
        return self.arrays * self.side**2 * 4

    def smaller(self) -> Scale:
        return replace(self, arrays=min(self.arrays, 50), side=max(self.side // 16, 64))


MEDIUM = Scale("256 MiB, 4 arrays", 4, 4096)
# Larger, and the page cache would not hold what all ways saved.
LARGE = Scale("512 MiB, 2 arrays", 2, 8192)
SMALL = Scale("1,000 arrays of 64 x 64", 1000, 64)
REPLICATED = Scale("64 MiB, 16 replicated arrays", 16, 1024)


# Arrays and folders.


def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:DEVICES]), ("x",))


@lru_cache(maxsize=1)
def _values(scale: Scale) -> list[Block]:
    rng = np.random.default_rng(0)
    shape = (scale.side, scale.side)
    return [rng.standard_normal(shape, np.float32) for _ in range(scale.arrays)]


def arrays_of(scale: Scale, spec: PartitionSpec) -> Tree:
    """Return the arrays of this scale, equal in every process."""
    tree = {}
    for name, like in like_of(scale, spec).items():
        values = _values(scale)[len(tree)]
        # Copied, because nothing but a device should hold what a device has.
        tree[name] = jax.make_array_from_callback(
            like.shape, like.sharding, lambda index, values=values: values[index].copy()
        )
    return jax.block_until_ready(tree)


def like_of(scale: Scale, spec: PartitionSpec) -> Like:
    sharding = NamedSharding(_mesh(), spec)
    like = jax.ShapeDtypeStruct((scale.side, scale.side), np.float32, sharding=sharding)
    return {f"layer{i}": like for i in range(scale.arrays)}


def _is_right(restored: Mapping[str, Any], scale: Scale, like: Like) -> bool:
    def equal(array: Any, sharding: Any, values: Block) -> bool:
        if isinstance(array, np.ndarray):  # of PyTorch
            return np.array_equal(array, values)
        shards = array.addressable_shards
        is_there = all(np.array_equal(shard.data, values[shard.index]) for shard in shards)
        return is_there and array.sharding == sharding

    return restored.keys() == like.keys() and all(
        equal(restored[name], like[name].sharding, values)
        for name, values in zip(like, _values(scale), strict=True)
    )


def delete(tree: Any) -> None:
    for array in jax.tree.leaves(tree):
        if isinstance(array, jax.Array):
            array.delete()
    # JAX lets go of NumPy memory only in the next call to it, and that would be a timed one.
    jax.device_put(np.float32(0)).block_until_ready()


class Scratch:
    """A folder for checkpoints, which goes with it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gda-benchmark-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._number = 0

    def another(self) -> Path:
        self._number += 1
        return self.folder / str(self._number)

    def keep(self) -> tuple[()]:
        """Leave the checkpoints that are there to the next run."""
        gc.collect()  # it rests while ways are measured, and some leave cycles that hold arrays
        return ()

    def fresh(self) -> tuple[Path]:
        """Return the path of the only checkpoint there will be."""
        self.keep()
        for old in self.folder.iterdir():
            shutil.rmtree(old)
        fsync(self.folder)  # or the next save would pay for the removal
        return (self.another(),)


# The works: each returns a side for every way, and for every plain way.

WRITE, READ = "raw write and fsync", "raw read into fresh memory"
WRITES = WRITE, f"{WRITE}, 8 threads", "raw write past the page cache (O_DIRECT)"
CHECKED = "raw read with CRC-32C, into aligned memory"
DECODED = "TensorStore, each chunk decoded once into warm memory"
_FILE_BYTES = 32 * MIB


def blocks_of(scale: Scale) -> list[Block]:
    """Return the bytes of all arrays in parts of equal size, at most those of a file."""
    values = _values(scale)
    if values[0].nbytes < _FILE_BYTES:
        return np.array_split(np.concatenate(values), -(-scale.nbytes // _FILE_BYTES))
    return [part for each in values for part in np.split(each, each.nbytes // _FILE_BYTES)]


def sides_that_save(scale: Scale, ways: Sequence[str]) -> list[Side]:
    tree, blocks, scratch = arrays_of(scale, ROWS), blocks_of(scale), Scratch()

    def side(way: str) -> Side:
        own = WAYS[way].own(tree)
        return Side(lambda path: WAYS[way].save(path, own), scratch.fresh)

    in_pages = [page_aligned(block) for block in blocks]
    plain = [
        partial(write, blocks=blocks),
        partial(write, blocks=blocks, threads=8),
        partial(write_directly, blocks=in_pages),
    ]
    return [*map(side, ways), *[Side(each, scratch.fresh) for each in plain]]


def sides_that_restore(scale: Scale, spec: PartitionSpec, ways: Sequence[str]) -> list[Side]:
    tree, blocks, scratch = arrays_of(scale, ROWS), blocks_of(scale), Scratch()
    like, raw = like_of(scale, spec), scratch.another()

    def side(way: str) -> Side:
        path = scratch.another()
        WAYS[way].save(path, WAYS[way].own(tree))

        def run() -> Any:
            return jax.block_until_ready(WAYS[way].restore(path, like))

        def done(restored: Any) -> None:
            if way not in checked:
                assert _is_right(restored, scale, like), way
                checked.add(way)
            delete(restored)

        return Side(run, scratch.keep, done=done)

    checked: set[str] = set()
    sides = [side(way) for way in ways]
    delete(tree)
    write(raw, blocks)
    return [*sides, *[Side(partial(each, raw), scratch.keep) for each in (read, read_checked)]]


def _opening_orbax(scale: Scale) -> list[Side]:
    scratch, tree = Scratch(), arrays_of(scale, ROWS)
    path = scratch.another()
    WAYS[ORBAX].save(path, tree)
    delete(tree)
    stores = storage.open_orbax(path)
    memory = {name: np.ones(store.shape, np.float32) for name, store in stores.items()}

    def decode() -> None:
        written = [tensorstore.array(memory[name]).write(store) for name, store in stores.items()]
        for each in written:
            each.commit.result()

    return [*sides_that_restore(scale, COLUMNS, [OPENED, ORBAX]), Side(decode, scratch.keep)]


def sides_that_begin(scale: Scale, ways: Sequence[str]) -> list[Side]:
    tree, scratch = arrays_of(scale, ROWS), Scratch()

    def side(begin: Callable[[Path, Tree], Callable[[], object]]) -> Side:
        return Side(lambda path: begin(path, tree), scratch.fresh, done=lambda wait: wait())

    return [side(BEGIN[way]) for way in ways]


def _beginning_with_many(leaves: int) -> list[Side]:
    scratch, sharding = Scratch(), NamedSharding(_mesh(), ROWS)
    values = [np.zeros((DEVICES, 16), np.float32)] * leaves

    def fresh() -> tuple[Path, Tree]:
        """Return new arrays, of which nothing has asked for a block."""
        arrays = jax.block_until_ready(jax.device_put(values, sharding))
        return *scratch.fresh(), {f"layer{i}": array for i, array in enumerate(arrays)}

    def views(path: Path, tree: Tree) -> list[Block]:
        return [np.asarray(s.data) for array in tree.values() for s in array.addressable_shards]

    blocks = leaves * DEVICES
    return [
        Side(gda_begin, fresh, done=lambda wait: wait(), calls=blocks),
        Side(views, fresh, calls=blocks),
    ]


# In several processes. Each times its own part; the slowest counts.


@cache
def _pool() -> Pool:
    return Pool(PROCESSES, devices=DEVICES // PROCESSES)


@cache
def _replicated(scale: Scale) -> Tree:
    return arrays_of(scale, WHOLE)


def save_seconds(way: str, path: Path, scale: Scale) -> float:
    tree = _replicated(scale)
    start = time.perf_counter()
    WAYS[way].save(path, tree)
    return time.perf_counter() - start


def restore_seconds(way: str, path: Path, scale: Scale) -> float:
    start = time.perf_counter()
    restored = jax.block_until_ready(WAYS[way].restore(path, like_of(scale, WHOLE)))
    seconds = time.perf_counter() - start
    delete(restored)
    return seconds


def restores_right(way: str, path: Path, scale: Scale) -> bool:
    like = like_of(scale, WHOLE)
    return _is_right(WAYS[way].restore(path, like), scale, like)


def _saving_in_processes(scale: Scale, ways: Sequence[str]) -> list[Side]:
    pool, scratch = _pool(), Scratch()

    def side(way: str) -> Side:
        return Side(
            lambda path: max(pool.run(save_seconds, way, path, scale)),
            scratch.fresh,
            times_itself=True,
        )

    return [*map(side, ways), Side(partial(write, blocks=blocks_of(scale)), scratch.fresh)]


def _restoring_in_processes(scale: Scale, ways: Sequence[str]) -> list[Side]:
    pool, scratch = _pool(), Scratch()

    def side(way: str) -> Side:
        path = scratch.another()
        pool.run(save_seconds, way, path, scale)
        assert all(pool.run(restores_right, way, path, scale)), way
        return Side(
            lambda: max(pool.run(restore_seconds, way, path, scale)),
            scratch.keep,
            times_itself=True,
        )

    sides, raw = [side(way) for way in ways], scratch.another()
    write(raw, blocks_of(scale))
    return [*sides, Side(partial(read, raw), scratch.keep)]


# Memory, in a process for each way, which nothing else has touched.


@cache
def _peaks(way: str, scale: Scale) -> dict[str, int]:
    command = (
        "import json; from benchmarks.checkpoint import checkpoints as c; c.use_cpu_devices(); "
        f"print(json.dumps(c.measure_peaks({way!r}, c.{scale!r})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", command],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def measure_peaks(way: str, scale: Scale) -> dict[str, int]:
    """Return how many bytes this process held at most, beyond the arrays, in every phase."""
    _phases(way, scale.smaller())  # what is imported and started once does not count
    return _phases(way, scale)


def _phases(way: str, scale: Scale) -> dict[str, int]:
    scratch = Scratch()
    path, tree = scratch.another(), arrays_of(scale, ROWS)
    _values.cache_clear()
    peaks = {"save": peak_of(lambda: WAYS[way].save(path, tree))}
    delete(tree)
    for phase, spec in [("same", ROWS), ("other", COLUMNS)]:
        like = like_of(scale, spec)
        peaks[phase] = peak_of(lambda like=like: WAYS[way].restore(path, like)) - scale.nbytes
    return peaks


def peak_of(run: Callable[[], Any]) -> int:
    """Return how many bytes this process holds at most while it runs, beyond those it held."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that is used again would not be seen
    before = begin_peak()
    result = jax.block_until_ready(run())
    peak = peak_bytes()
    delete(result)
    return peak - before


def begin_peak() -> int:
    """Begin a new peak of the memory of this process; return what it holds."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """Return the most memory that this process has held since then."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024


def _remembering(phase: str, scale: Scale, ways: Sequence[str]) -> list[Side]:
    return [Side(partial(_mebibytes, way, phase, scale), times_itself=True) for way in ways]


def _mebibytes(way: str, phase: str, scale: Scale) -> float:
    return max(_peaks(way, scale)[phase], _PAGE) / MIB  # never 0, of which nothing is a multiple


# The works.


def works(quick: bool = False) -> list[Work]:
    """Return the works; if ``quick``, with small arrays, only to see that everything runs."""
    medium, large, small, replicated = (
        scale.smaller() if quick else scale for scale in (MEDIUM, LARGE, SMALL, REPLICATED)
    )
    same, other = "onto the layout it had", "onto another layout"
    few = (ORBAX, ORBAX_V1)
    to_save = [way for way in WAYS if way not in (GDA, MEMMAP, OPENED, SAVEZ)]
    to_move = [way for way in WAYS if way not in (GDA, OPENED, SAVEZ, TORCH)]
    of_small = [ORBAX, JAX, SAFETENSORS]
    # Not those that map files, whose pages would count: the kernel takes them back when it must.
    of_memory = [*few, UNCOMPRESSED, JAX, TENSORSTORE]

    def saving(
        scale: Scale, rivals: Sequence[str], targets: Mapping[str, Target], share: float
    ) -> Work:
        return Work(
            f"save {scale.name}",
            partial(sides_that_save, scale, [GDA, *rivals]),
            {way: targets.get(way) for way in [*rivals, *WRITES]},
            floor=Floor("A durable save writes all bytes.", WRITES, share),
            raw=WRITE,
            seconds=12,
        )

    def restoring(
        scale: Scale,
        spec: PartitionSpec,
        rivals: Sequence[str],
        targets: Mapping[str, Target],
    ) -> Work:
        return Work(
            f"restore {scale.name} {same if spec == ROWS else other}",
            partial(sides_that_restore, scale, spec, [GDA, *rivals]),
            {way: targets.get(way) for way in [*rivals, READ, CHECKED]},
            raw=READ,
            seconds=12,
        )

    def in_processes(verb: str, prepare: Callable[..., list[Side]], raw: str) -> Work:
        return Work(
            f"{verb} {REPLICATED.name}, {PROCESSES} processes",
            partial(prepare, replicated, [GDA, *few]),
            dict.fromkeys([*few, raw]),
            raw=raw,
            seconds=6,
        )

    return [
        saving(large, to_save, {ORBAX: Faster(2.5), WRITE: OfSpeed(0.95)}, 0.95),
        saving(small, of_small, {ORBAX: Faster(10)}, 0.8),
        restoring(
            large,
            ROWS,
            [way for way in (ORBAX, JAX, SAFETENSORS, MEMMAP, TORCH) if way in WAYS],
            {ORBAX: Faster(3), MEMMAP: AtMost(1), READ: OfSpeed(0.8), CHECKED: OfSpeed(0.9)},
        ),
        restoring(large, COLUMNS, to_move, {ORBAX: Faster(2)}),
        restoring(small, ROWS, of_small, {ORBAX: Faster(4)}),
        Work(
            f"load an Orbax run, {medium.name}, {other}",
            partial(_opening_orbax, medium),
            dict.fromkeys([ORBAX, READ, CHECKED, DECODED]) | {ORBAX: Faster(2)},
            floor=Floor("Each chunk must be decoded, which TensorStore does.", (DECODED,)),
            raw=READ,
            seconds=10,
        ),
        Work(
            f"memory beyond the arrays, load an Orbax run, {medium.name}, {other}",
            partial(_remembering, "other", medium, [OPENED, ORBAX]),
            {ORBAX: None},
            WithinMiB(64),
            seconds=0,
            unit="MiB",
        ),
        Work(
            f"how long the caller is held while {medium.name} are saved behind it",
            partial(sides_that_begin, medium, tuple(BEGIN)),
            {way: None for way in BEGIN if way != GDA},
            Within(2),
            seconds=6,
        ),
        Work(
            "how long the caller is held for each block, 10,000 arrays on 8 devices",
            partial(_beginning_with_many, 100 if quick else 10_000),
            {"views of the blocks by NumPy": None},
            Within(0.01),
            seconds=6,
        ),
        *[
            Work(
                f"memory beyond the arrays, {name}",
                partial(_remembering, phase, large, [GDA, *of_memory]),
                dict.fromkeys(of_memory),
                WithinMiB(limit),
                seconds=0,
                unit="MiB",
            )
            for phase, name, limit in [
                ("save", f"save {large.name}", 64),
                ("same", f"restore {large.name} {same}", 128),
                ("other", f"restore {large.name} {other}", 128),
            ]
        ],
        # Last, because the pool stays.
        in_processes("save", _saving_in_processes, WRITE),
        in_processes("restore", _restoring_in_processes, READ),
    ]


# In a process for the memory of a way.


def use_cpu_devices() -> None:
    """Give this process the devices that pytest gives the benchmarks."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
