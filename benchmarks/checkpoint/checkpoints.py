"""Checkpoints: saved and restored, by gda and by what else there is.

The arrays are float32 of a normal distribution, as weights are; compression finds little in them.
Every save goes to a fresh folder of one file system and is timed until it is durable; what is there
from before is removed outside of the timing. Every restore finds its files in the page cache, so
that what a way does with the bytes is compared, and not the disk. The ways are those of
``checkpointers``.

``python -m benchmarks.checkpoint.checkpoints`` measures these works alone and prints a table.
"""

from __future__ import annotations

import argparse
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
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from benchmarks.arrays.building import MIB
from benchmarks.checkpoint.checkpointers import (
    BEGIN,
    COPY,
    FOR_MANY,
    GDA,
    ORBAX,
    RAW,
    WAYS,
    Block,
    Like,
    Tree,
    fsync,
)
from benchmarks.pairs import Side, measure
from benchmarks.work import AtMost, Faster, WithinMiB, Work
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
LARGE = Scale("1 GiB, 4 arrays", 4, 8192)
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


def _tree(scale: Scale, spec: PartitionSpec) -> Tree:
    """Return the arrays of this scale, equal in every process."""
    tree = {}
    for name, like in _like(scale, spec).items():
        values = _values(scale)[len(tree)]
        # Copied, because nothing but a device should hold what a device has.
        tree[name] = jax.make_array_from_callback(
            like.shape, like.sharding, lambda index, values=values: values[index].copy()
        )
    return jax.block_until_ready(tree)


def _like(scale: Scale, spec: PartitionSpec) -> Like:
    sharding = NamedSharding(_mesh(), spec)
    like = jax.ShapeDtypeStruct((scale.side, scale.side), np.float32, sharding=sharding)
    return {f"layer{i}": like for i in range(scale.arrays)}


def _is_right(restored: Mapping[str, Any], scale: Scale, like: Like) -> bool:
    return restored.keys() == like.keys() and all(
        restored[name].sharding == like[name].sharding
        and all(np.array_equal(s.data, values[s.index]) for s in restored[name].addressable_shards)
        for name, values in zip(like, _values(scale), strict=True)
    )


def _delete(tree: Any) -> None:
    jax.tree.map(lambda array: array.delete(), tree)
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


# The works: each returns a side for every way.


def _saving(scale: Scale, ways: Sequence[str]) -> list[Side]:
    tree, scratch = _tree(scale, ROWS), Scratch()

    def side(way: str) -> Side:
        return Side(lambda path: WAYS[way].save(path, tree), scratch.fresh)

    return [side(way) for way in ways]


def _restoring(scale: Scale, spec: PartitionSpec, ways: Sequence[str]) -> list[Side]:
    tree, scratch = _tree(scale, ROWS), Scratch()
    like = _like(scale, spec)

    def side(way: str) -> Side:
        path = scratch.another()
        WAYS[way].save(path, tree)

        def run() -> Any:
            return jax.block_until_ready(WAYS[way].restore(path, like))

        restored = run()
        assert _is_right(restored, scale, like), way
        _delete(restored)
        return Side(run, scratch.keep, done=_delete)

    sides = [side(way) for way in ways]
    _delete(tree)
    return sides


def _beginning(scale: Scale, ways: Sequence[str]) -> list[Side]:
    tree, scratch = _tree(scale, ROWS), Scratch()

    def side(begin: Callable[[Path, Tree], Callable[[], object]]) -> Side:
        return Side(lambda path: begin(path, tree), scratch.fresh, done=lambda wait: wait())

    return [side(BEGIN[way]) for way in ways]


# In several processes. Each times its own part; the slowest counts.


@cache
def _pool() -> Pool:
    return Pool(PROCESSES, devices=DEVICES // PROCESSES)


@cache
def _replicated(scale: Scale) -> Tree:
    return _tree(scale, WHOLE)


def save_seconds(way: str, path: Path, scale: Scale) -> float:
    tree = _replicated(scale)
    start = time.perf_counter()
    WAYS[way].save(path, tree)
    return time.perf_counter() - start


def restore_seconds(way: str, path: Path, scale: Scale) -> float:
    start = time.perf_counter()
    restored = jax.block_until_ready(WAYS[way].restore(path, _like(scale, WHOLE)))
    seconds = time.perf_counter() - start
    _delete(restored)
    return seconds


def restores_right(way: str, path: Path, scale: Scale) -> bool:
    like = _like(scale, WHOLE)
    return _is_right(WAYS[way].restore(path, like), scale, like)


def _saving_in_processes(scale: Scale, ways: Sequence[str]) -> list[Side]:
    pool, scratch = _pool(), Scratch()

    def side(way: str) -> Side:
        return Side(
            lambda path: max(pool.run(save_seconds, way, path, scale)),
            scratch.fresh,
            times_itself=True,
        )

    return [side(way) for way in ways]


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

    return [side(way) for way in ways]


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
    path, tree = scratch.another(), _tree(scale, ROWS)
    _values.cache_clear()
    peaks = {"save": _peak_of(lambda: WAYS[way].save(path, tree))}
    _delete(tree)
    for phase, spec in [("same", ROWS), ("other", COLUMNS)]:
        like = _like(scale, spec)
        peaks[phase] = _peak_of(lambda like=like: WAYS[way].restore(path, like)) - scale.nbytes
    return peaks


def _peak_of(run: Callable[[], Any]) -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that is used again would not be seen
    Path("/proc/self/clear_refs").write_text("5")  # from here on, the peak is a new one
    before = _memory("VmHWM")
    result = jax.block_until_ready(run())
    peak = _memory("VmHWM")
    _delete(result)
    return peak - before


def _memory(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.findall(rf"{field}:\s+(\d+) kB", status)[0]) * 1024


def _remembering(phase: str, scale: Scale, ways: Sequence[str]) -> list[Side]:
    return [Side(partial(_mebibytes, way, phase, scale), times_itself=True) for way in ways]


def _mebibytes(way: str, phase: str, scale: Scale) -> float:
    return max(_peaks(way, scale)[phase], _PAGE) / MIB  # never 0, of which nothing is a multiple


# What is compared.


@dataclass(frozen=True)
class Group:
    """A work and the ways of doing it, which are measured in turns.

    Attributes:
      prepare: makes a side for every way that it gets.
      targets: what gda must reach, by way.
      limit: what it must keep to, whatever the others take.
    """

    name: str
    prepare: Callable[[Sequence[str]], list[Side]]
    ways: Sequence[str] = tuple(WAYS)
    targets: Mapping[str, Faster | AtMost] = field(default_factory=dict)
    limit: WithinMiB | None = None
    rounds: int = 5

    def works(self) -> list[Work]:
        prepare = partial(self.prepare, self.ways)  # one object: it is measured once for all works
        unit = "MiB" if self.limit else "s"
        works = [
            Work(
                self.name,
                prepare,
                way,
                self.targets.get(way),
                rounds=self.rounds,
                against=number,
                unit=unit,
            )
            for number, way in enumerate(self.ways[1:], start=1)
        ]
        alone = partial(self.prepare, self.ways[:1])
        if self.limit:
            works.append(Work(self.name, alone, target=self.limit, rounds=1, unit=unit))
        return works


def groups(smaller: bool = False) -> list[Group]:
    """Return what is compared, or the same with small arrays, only to see that everything runs."""
    medium, large, small, replicated = (
        scale.smaller() if smaller else scale for scale in (MEDIUM, LARGE, SMALL, REPLICATED)
    )
    same, other = "onto the layout it had", "onto another layout"
    return [
        Group(f"save {MEDIUM.name}", partial(_saving, medium)),
        Group(
            f"save {LARGE.name}",
            partial(_saving, large),
            targets={ORBAX: Faster(2.5), RAW: AtMost(1.3)},
            rounds=3,
        ),
        Group(f"save {SMALL.name}", partial(_saving, small), FOR_MANY, {ORBAX: Faster(10)}),
        Group(f"save {REPLICATED.name}, 4 processes", partial(_saving_in_processes, replicated)),
        Group(f"restore {MEDIUM.name} {same}", partial(_restoring, medium, ROWS)),
        Group(
            f"restore {LARGE.name} {same}",
            partial(_restoring, large, ROWS),
            targets={ORBAX: Faster(3), RAW: AtMost(1)},
            rounds=3,
        ),
        Group(
            f"restore {MEDIUM.name} {other}",
            partial(_restoring, medium, COLUMNS),
            targets={ORBAX: Faster(2)},
        ),
        Group(
            f"restore {LARGE.name} {other}",
            partial(_restoring, large, COLUMNS),
            targets={ORBAX: Faster(2)},
            rounds=3,
        ),
        Group(
            f"restore {SMALL.name} {same}",
            partial(_restoring, small, ROWS),
            FOR_MANY,
            {ORBAX: Faster(4)},
        ),
        Group(
            f"restore {REPLICATED.name}, 4 processes",
            partial(_restoring_in_processes, replicated),
        ),
        Group(
            f"how long the caller is held while {MEDIUM.name} are saved behind it",
            partial(_beginning, medium),
            tuple(BEGIN),
            {COPY: AtMost(1)},
        ),
        *[
            Group(
                f"memory beyond the arrays, {name}",
                partial(_remembering, phase, large),
                limit=WithinMiB(limit),
                rounds=1,
            )
            for phase, name, limit in [
                ("save", f"save {LARGE.name}", 64),
                ("same", f"restore {LARGE.name} {same}", 128),
                ("other", f"restore {LARGE.name} {other}", 128),
            ]
        ],
    ]


WORKS = [work for group in groups() for work in group.works()]


# Alone.


def use_cpu_devices() -> None:
    """Give this process the devices that pytest gives the benchmarks."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint.checkpoints")
    parser.add_argument("--smoke", action="store_true", help="small arrays, one round")
    parser.add_argument("--rounds", type=int, help="of each way, instead of 3 or 5")
    parser.add_argument("--only", default="", help="the works that have this in their name")
    parser.add_argument(
        "--without", action="append", default=[], choices=[*WAYS, COPY], help="leave a way out"
    )
    options = parser.parse_args(arguments)
    use_cpu_devices()
    console = Console()
    for group in groups(options.smoke):
        if options.only in group.name:
            ways = [way for way in group.ways if way not in options.without]
            rounds = options.rounds or (1 if options.smoke else group.rounds)
            console.print(_table(group, ways, measure(group.prepare(ways), rounds)))
    if options.smoke:
        console.print("A smoke run: the arrays are small, and the figures say nothing.")
    return 0


def _table(group: Group, ways: Sequence[str], seconds: Sequence[Sequence[float]]) -> Table:
    table = Table(
        "", "median", "lowest", "highest", f"of {ways[0]}'s", "aimed at", title=group.name
    )
    ours = median(seconds[0])
    for way, samples in zip(ways, seconds, strict=True):
        amounts = [_amount(f(samples), group) for f in (median, min, max)]
        aim = group.limit if way == GDA else group.targets.get(way)
        ratio = "" if group.limit else f"{median(samples) / ours:.2f}"
        table.add_row(way, *amounts, ratio, str(aim or ""))
    return table


def _amount(number: float, group: Group) -> str:
    return f"{number:,.1f} MiB" if group.limit else f"{number * 1e3:,.1f} ms"


if __name__ == "__main__":
    # As a module that other processes find by its name, which this one is not.
    from benchmarks.checkpoint import checkpoints

    sys.exit(checkpoints.main())
