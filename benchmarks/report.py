"""The page ``RESULTS.md``: first what a person reads, then a table of each section.

A table has the fastest rival of each work, and every way that a target is about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.less import LESS, is_less
from benchmarks.pairs import LEAST_ROUNDS
from benchmarks.results import Measured, Results, Stats, machines_of
from benchmarks.work import AtMost, Growth, OfSpeed, Target, Work

_INTRODUCTION = f"""\
# Results

Written by `python -m benchmarks`. All sides of a line ran in turns on virtual CPU devices, in
{LEAST_ROUNDS} rounds or more, until the ratio of their medians was settled to 2 % or the time for
the work was over; behind the schedule of 20 minutes, in fewer. Times are medians, with the
quartiles in brackets, and ratios are those of medians. Memory is the highest that a process held
beyond the arrays that it saved or got, in one round or more.

"In a fresh process" means that each round of each side ran in a new process, after its imports, the
start of JAX and a small call of the same kind. "On a disk" means that the page cache did not hold
the file; the host of a virtual machine may. All other works repeat their calls in one process.
"""

_TABLES = """
## All works

Each line has gda beside the fastest rival, or beside a way that a target is about.
`results.json` has all ways, and `benchmarks/` the program of each.

A floor is the quickest of the rivals and of some plain ways, such as raw writes by 2 threads, by 8,
and past the page cache; it was measured in the same rounds. A target that even the faster quarter
of the floor's rounds misses is replaced: gda must then reach the stated share of the floor's speed.
Beside a time that depends on a disk stands the time of a raw read or write of the same bytes.
"""

_QUICK = """
**A quick run: few rounds and small arrays, only to see that everything runs. The figures say
nothing.**
"""


def render(
    results: Results, sections: Mapping[str, Sequence[Work]], summary: str = "", *, quick: bool
) -> str:
    """Return the page, with ``summary`` before the tables of all works."""
    machines = machines_of(results)
    measured = {way for works in sections.values() for work in works for way in work.ways}
    less = [(way, reason) for way, reason in LESS.items() if way in measured]
    head = ["work", "gda", "another way", "its time", "gda is", "must be", "rounds", "reached"]
    if len(machines) > 1:
        head.append("run")
    tables, targets = [], []
    for name, works in sections.items():
        rows = [row for work in works if work.name in results for row in _rows(work, results)]
        of_section = [row for row in rows if row[-2]]
        targets += of_section
        tables.append(f"\n### {name}{': ' * bool(of_section)}{_reached(of_section)}\n")
        tables += table(head, (row[: len(head)] for row in rows))
    return "\n".join(
        [
            _INTRODUCTION,
            *[f"{number}. {machine}" for number, machine in enumerate(machines, 1)],
            *([_QUICK] if quick else []),
            f"\n**{_reached(targets)}.**",
            *([summary] if summary else []),
            _TABLES.rstrip("\n"),
            *tables,
            *(["\n### Ways that do less than the work beside them\n"] if less else []),
            *(table(["way", "it leaves out, or is"], less) if less else []),
            "",
        ]
    )


_ON_ACCELERATOR = """
## On an accelerator

Written by `python -m benchmarks --accelerator`, in 4 minutes, on arrays of one accelerator. Every
way stands beside gda, in the same rounds. A copy from or to pinned memory has the speed of the bus,
and reads no file.
"""


def render_accelerator(results: Results, works: Sequence[Work]) -> str:
    """Return the section of an accelerator; nothing if there are no results."""
    if not results:
        return ""
    head = ["work", "way", "time", "speed", "gda is", "rounds", "run"]
    rows = [row for work in works if work.name in results for row in _all_ways(work, results)]
    machines = [f"{number}. {each}" for number, each in enumerate(machines_of(results), 1)]
    return "\n".join([_ON_ACCELERATOR, *machines, "", *table(head, rows), ""])


def _all_ways(work: Work, results: Results) -> Iterator[list[str]]:
    measured = results[work.name]
    run = str(machines_of(results).index(measured.machine) + 1)
    if not measured.ways:
        yield [work.name, _missing(measured), "", "", "", "", run]
    for way, stats in measured.ways.items():
        words = ""
        if way != work.ours:
            words = comparison(work.unit, measured.ways[work.ours], stats)
        cells = [work.name, way, amount(stats, work.unit), _speed(work, stats), words]
        yield [*cells, str(measured.rounds), run]


def _speed(work: Work, stats: Stats) -> str:
    return f"{_three(work.nbytes / stats.median / 1e9)} GB/s" if work.nbytes else ""


def _reached(targets: Sequence[Sequence[str]]) -> str:
    if not targets:
        return ""
    return f"{sum(row[-2].startswith('yes') for row in targets)} of {len(targets)} targets reached"


def _rows(work: Work, results: Results) -> Iterator[list[str]]:
    """Yield the cells of each line of a work; the last two are the mark and the run."""
    measured = results[work.name]
    run = str(machines_of(results).index(measured.machine) + 1)
    rows = [*_target_rows(work, measured)]
    shown = {row[2] for row in rows}
    ours = measured.ways.get(work.ours)
    if ours is None:
        rows = rows or [[work.name, _missing(measured), "", "", "", "", "", ""]]
    elif rival := fastest_rival(work, measured):
        if rival not in shown:
            rows.append(_cells(work, measured, rival))
    elif not rows:
        rows.append([work.name, amount(ours, work.unit), "", "", "", "", str(measured.rounds), ""])
    yield from ([*row, run] for row in rows)


def fastest_rival(work: Work, measured: Measured) -> str | None:
    rivals = [way for way in measured.ways if way != work.ours and not is_less(way)]
    return min(rivals, key=lambda way: measured.ways[way].median, default=None)


def _cells(work: Work, measured: Measured, way: str) -> list[str]:
    ours, rival = measured.ways[work.ours], measured.ways[way]
    amounts = amount(ours, work.unit), amount(rival, work.unit)
    result = comparison(work.unit, ours, rival)
    return [work.name, amounts[0], way, amounts[1], result, "", str(measured.rounds), ""]


def _missing(measured: Measured) -> str:
    reason = measured.reason.replace("|", "\\|")
    return f"not measured: {reason}" if reason else "not measured"


def _target_rows(work: Work, measured: Measured) -> Iterator[list[str]]:
    by_way, rounds = measured.ways, str(measured.rounds)
    ours = by_way.get(work.ours)
    for way, target in work.rivals.items():
        if target is None:
            continue
        rival = by_way.get(way)
        if ours is None or rival is None:
            yield [work.name, "", way, "", "", str(target), "", _missing(measured)]
            continue
        result, must_be = _result(target, work.unit, ours, rival), str(target)
        is_reached = target.is_reached(ours.median, rival.median)
        mark = "yes" if is_reached else "**no**"
        floor_way, floor = _floor(work, measured)
        # A target that the floor misses, no way reaches. By its faster rounds: noise in the
        # floor must not replace a target.
        if work.floor and floor and not target.is_reached(floor.q1, rival.median):
            share = floor.median / ours.median
            result += f"; {share:.2f} of the speed of the floor"
            must_be = (
                f"{work.floor.share:g} of the speed of the floor, {floor_way}, "
                f"{amount(floor, 's')}, instead of {target}: {work.floor.reason}"
            )
            mark = "yes, the floor" if share >= work.floor.share else "**no**"
        elif way != work.raw:
            result += _beside_raw(work, measured)
        amounts = amount(ours, work.unit), amount(rival, work.unit)
        yield [work.name, amounts[0], way, amounts[1], result, must_be, rounds, mark]
    if work.limit and ours is None:
        yield [work.name, "", "", "", "", str(work.limit), "", _missing(measured)]
    elif work.limit and ours:
        mark = "yes" if work.limit.is_reached(ours.median, 0) else "**no**"
        result = _beside_raw(work, measured).removeprefix("; ")
        taken = amount(ours, work.unit)
        yield [work.name, taken, "", "", result, str(work.limit), rounds, mark]


def _floor(work: Work, measured: Measured) -> tuple[str, Stats | None]:
    """Return the quickest of the plain ways of the floor and of the rivals."""
    rival = fastest_rival(work, measured)
    ways = [*(work.floor.ways if work.floor else ()), *([rival] if rival else [])]
    by_way = {way: measured.ways[way] for way in ways if way in measured.ways}
    way = min(by_way, key=lambda way: by_way[way].median, default="")
    return way, by_way.get(way)


def _beside_raw(work: Work, measured: Measured) -> str:
    """Return the share of the speed of the disk, and its time."""
    raw = measured.ways.get(work.raw)
    if raw is None:
        return ""
    share = raw.median / measured.ways[work.ours].median
    return f"; {share:.2f} of the speed of {work.raw}, {amount(raw, 's')}"


def line(work: Work, measured: Measured) -> str:
    """Return what was measured in one line: every way, and how the first compares with it."""
    if measured.reason:
        return f"{work.name}: not measured: {measured.reason}"
    ours, *rivals = work.ways
    first = measured.ways[ours]
    said = [f"{ours} {amount(first, work.unit)}{' ' * bool(work.nbytes)}{_speed(work, first)}"]
    for way in rivals:
        one = measured.ways[way]
        said.append(
            f"{way} {amount(one, work.unit)}, {_result(work.rivals[way], work.unit, first, one)}"
        )
    return f"{work.name}: {'; '.join(said)}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for cells in [head, ["---"] * len(head), *rows]:
        yield f"| {' | '.join(cells)} |"


def _result(target: Target | None, unit: str, ours: Stats, rival: Stats) -> str:
    if isinstance(target, AtMost):
        return f"{ours.median / rival.median:.3f} of its time"
    if isinstance(target, Growth):
        return f"{ours.median / rival.median:.2f} times its time"
    if isinstance(target, OfSpeed):
        return f"{rival.median / ours.median:.2f} of its speed"
    return comparison(unit, ours, rival)


def comparison(unit: str, ours: Stats, rival: Stats) -> str:
    """Return in words how the first compares with the second: "2.14 times faster"."""
    a, b = ours.median, rival.median
    if unit == "MiB":
        return f"{_three(abs(b - a))} MiB {'less' if b >= a else 'more'}"
    word, times = ("faster", b / a) if b >= a else ("slower", a / b)
    return f"{times:,.0f} times {word}" if times >= 100 else f"{times:.2f} times {word}"


def amount(stats: Stats, unit: str, *, with_quartiles: bool = True) -> str:
    """Return the median with its unit, of a time with the one that suits it, and the quartiles."""
    units = [("s", 1), ("ms", 1e-3), ("µs", 1e-6)] if unit == "s" else [(unit, 1)]
    unit, one = next((each for each in units if stats.median >= each[1]), units[-1])
    median, low, high = (_three(each / one) for each in (stats.median, stats.q1, stats.q3))
    return f"{median} {unit}" + f" ({low} to {high})" * (with_quartiles and low != high)


def _three(number: float) -> str:
    """Write three digits."""
    return (
        f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"
    )
