"""The page ``RESULTS.md``: the machine, one table of all targets, and tables that inform."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.work import AtMost, OfFloor, Target, Work

Stats = Mapping[str, Any]
ByWay = Mapping[str, Stats]

_INTRODUCTION = """\
# Results

Written by `python -m benchmarks`; what each line does stands in `benchmarks/`. All sides of a line
ran in turns on virtual CPU devices, in as many rounds as settle the ratio of their medians to 2 %,
or as many as fit into a time limit. Times are medians, with the quartiles in brackets, and ratios
are those of medians. Memory is the highest that a process of its own held beyond the arrays that it
saved or got.

A floor is the least that any program could take, measured in the same rounds. A target that even
the faster quarter of the floor's rounds misses is replaced: gda must then reach the stated share of
the floor's speed.
"""

_QUICK = """
**A quick run: few rounds and small arrays, only to see that everything runs. The figures say
nothing.**
"""

_PACKAGES = {
    "JAX": "jax",
    "jaxlib": "jaxlib",
    "NumPy": "numpy",
    "gda": "gda",
    "Orbax": "orbax-checkpoint",
    "TensorStore": "tensorstore",
    "google-crc32c": "google-crc32c",
    "PyTorch": "torch",
    "rich": "rich",
    "libtpu (for the section Rehearsing)": "libtpu",
}


def render(
    runs: Sequence[dict[str, Any]], sections: Mapping[str, Sequence[Work]], quick: bool
) -> str:
    """Return the page, of what pytest-benchmark saved."""
    stats: dict[str, dict[str, Stats]] = {}
    for run in runs:
        for bench in run["benchmarks"]:
            info = bench["extra_info"]
            stats.setdefault(info["work"], {})[info["way"]] = bench["stats"]
    works = [work for each in sections.values() for work in each]
    targets = [row for work in works for row in _target_rows(work, stats.get(work.name, {}))]
    reached = sum(row[-1].startswith("yes") for row in targets)
    lines = [
        _INTRODUCTION,
        *_machine(runs),
        *([_QUICK] if quick else []),
        f"\n## Targets: {reached} of {len(targets)} reached\n",
        *_table(
            ["work", "gda", "rival", "its time", "gda is", "must be", "rounds", "reached"], targets
        ),
    ]
    for section, each in sections.items():
        lines += _section(section, each, stats)
    return "\n".join(lines) + "\n"


def _section(name: str, works: Iterable[Work], stats: Mapping[str, ByWay]) -> Iterator[str]:
    """Yield the lines that inform."""
    rows, tables = [], []
    for work in works:
        by_way = stats.get(work.name, {})
        if work.table_of:
            tables += [f"\n### {work.name[0].upper()}{work.name[1:]}\n", *_shares(work, by_way)]
        else:
            rows += _information_rows(work, by_way)
    if rows or tables:
        yield f"\n## {name}, for information\n"
    if rows:
        head = ["work", "by", "time", "against", "time", "the first is", "rounds"]
        yield from _table(head, rows)
    yield from tables


def _shares(work: Work, by_way: ByWay) -> Iterator[str]:
    """Yield a table of all ways, each with its share of the speed of the floor."""
    floor = by_way.get(work.table_of)
    rows = [
        [way, _time(one), f"{floor['median'] / one['median']:.2f}" if floor else "", _rounds(one)]
        for way, one in by_way.items()
    ]
    return _table(["by", "time", f"of the speed of {work.table_of}", "rounds"], rows)


def _information_rows(work: Work, by_way: ByWay) -> Iterator[list[str]]:
    ours = by_way.get(work.ours)
    if ours is None:
        return
    if not work.rivals and not work.limit:
        yield [work.name, work.ours, _amount(ours, work.unit), "", "", "", _rounds(ours)]
    for way, target in work.rivals.items():
        if target is None and way in by_way:
            rival = by_way[way]
            result = _result(None, work.unit, ours, rival)
            amounts = _amount(ours, work.unit), _amount(rival, work.unit)
            yield [work.name, work.ours, amounts[0], way, amounts[1], result, _rounds(ours)]


def _target_rows(work: Work, by_way: ByWay) -> Iterator[list[str]]:
    ours = by_way.get(work.ours)
    for way, target in work.rivals.items():
        if target is None:
            continue
        rival = by_way.get(way)
        if ours is None or rival is None:
            yield [work.name, "", way, "", "", str(target), "", "failed"]
            continue
        result, must_be = _result(target, work.unit, ours, rival), str(target)
        is_reached = target.is_reached(ours["median"], rival["median"])
        mark = "yes" if is_reached else "**no**"
        floor = work.floor and by_way.get(work.floor.way)
        # A target that the floor misses, no program reaches. By its faster rounds: noise in the
        # floor must not replace a target.
        if work.floor and floor and not target.is_reached(floor["q1"], rival["median"]):
            share = floor["median"] / ours["median"]
            result += f"; {share:.2f} of the speed of the floor"
            must_be = (
                f"{work.floor.share:g} of the speed of the floor, {work.floor.way}, "
                f"{_time(floor)}, instead of {target}: {work.floor.reason}"
            )
            mark = "yes, the floor" if share >= work.floor.share else "**no**"
        amounts = _amount(ours, work.unit), _amount(rival, work.unit)
        yield [work.name, amounts[0], way, amounts[1], result, must_be, _rounds(ours), mark]
    if work.limit and ours is None:
        yield [work.name, "", "", "", "", str(work.limit), "", "failed"]
    elif work.limit and ours:
        amount = _amount(ours, work.unit)
        mark = "yes" if work.limit.is_reached(ours["median"], 0) else "**no**"
        yield [work.name, amount, "", "", amount, str(work.limit), _rounds(ours), mark]


def _machine(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the day, the machine and the versions that figures are from."""
    machines = [run["machine_info"]["cpu"] for run in runs if "machine_info" in run]
    cpu = machines[0].get("brand_raw", "CPU") if machines else "CPU"
    packages = []
    for name, package in _PACKAGES.items():
        try:
            packages.append(f"{name} {version(package)}")
        except PackageNotFoundError:
            packages.append(f"no {name}")
    return [
        f"- {datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {cpu}",
        f"- Python {platform.python_version()}, {', '.join(packages)}",
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for cells in [head, ["---"] * len(head), *rows]:
        yield f"| {' | '.join(cells)} |"


def _result(target: Target | None, unit: str, ours: Stats, rival: Stats) -> str:
    a, b = ours["median"], rival["median"]
    if unit == "MiB":
        return f"{_three(abs(b - a))} MiB {'less' if b >= a else 'more'}"
    if isinstance(target, AtMost):
        return f"{a / b:.3f} of its time"
    if isinstance(target, OfFloor):
        return f"{b / a:.2f} of its speed"
    word, times = ("faster", b / a) if b >= a else ("slower", a / b)
    return f"{times:,.0f} times {word}" if times >= 100 else f"{times:.2f} times {word}"


def _rounds(stats: Stats) -> str:
    return f"{stats['rounds']}"


def _amount(stats: Stats, unit: str) -> str:
    return _time(stats) if unit == "s" else f"{_three(stats['median'])} {unit}"


def _time(stats: Stats) -> str:
    for unit, seconds in [("s", 1), ("ms", 1e-3), ("µs", 1e-6)]:
        if stats["median"] >= seconds or unit == "µs":
            median, low, high = (_three(stats[key] / seconds) for key in ("median", "q1", "q3"))
            return f"{median} {unit} ({low} to {high})"
    raise AssertionError("unreachable")


def _three(number: float) -> str:
    """Write three digits."""
    return (
        f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"
    )
