"""The page ``RESULTS.md``: the machines, and the targets and other figures of each section."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from benchmarks.results import Measured, Results, Stats, machines_of
from benchmarks.work import AtMost, OfFloor, Target, Work

_INTRODUCTION = """\
# Results

{pictures}\
Written by `python -m benchmarks`; what each line does stands in `benchmarks/`. All sides of a line
ran in turns on virtual CPU devices, in as many rounds as settle the ratio of their medians to 2 %,
or as many as fit into a time limit. Times are medians, with the quartiles in brackets, and ratios
are those of medians. Memory is the highest that a process of its own held beyond the arrays that it
saved or got.

A floor is the least that any program could take, measured in the same rounds. A target that even
the faster quarter of the floor's rounds misses is replaced: gda must then reach the stated share of
the floor's speed. Beside a time that depends on a disk stands what a raw read or write of the same
bytes took.

The column *run* has the number of a line here:
"""

_QUICK = """
**A quick run: few rounds and small arrays, only to see that everything runs. The figures say
nothing.**
"""


def render(
    results: Results, sections: Mapping[str, Sequence[Work]], pictures: str = "", *, quick: bool
) -> str:
    """Return the page, which begins with ``pictures``."""
    targets = {
        name: [row for work in works for row in _with_run(results, work, _target_rows)]
        for name, works in sections.items()
    }
    lines = [
        _INTRODUCTION.format(pictures=pictures),
        *[f"{number}. {machine}" for number, machine in enumerate(machines_of(results), 1)],
        *([_QUICK] if quick else []),
        f"\n**{_reached([row for rows in targets.values() for row in rows])}.**",
    ]
    for name, works in sections.items():
        lines += _section(name, targets[name], works, results)
    return "\n".join(lines) + "\n"


def _reached(targets: Sequence[Sequence[str]]) -> str:
    return f"{sum(row[-2].startswith('yes') for row in targets)} of {len(targets)} targets reached"


def _section(
    name: str, targets: Sequence[list[str]], works: Iterable[Work], results: Results
) -> Iterator[str]:
    rows, tables = [], []
    for work in works:
        if work.raw and work.name in results and not results[work.name].reason:
            head = ["by", "time", f"of the speed of {work.raw}", "rounds", "run"]
            tables.append(f"\n### {work.name[0].upper()}{work.name[1:]}\n")
            tables += table(head, _with_run(results, work, _share_rows))
        else:
            rows += _with_run(results, work, _information_rows)
    if targets:
        yield f"\n## {name}: {_reached(targets)}\n"
        head = ["work", "gda", "rival", "its time", "gda is", "must be", "rounds", "reached", "run"]
        yield from table(head, targets)
    if rows:
        yield f"\n### {name}, for information\n" if targets else f"\n## {name}\n"
        head = ["work", "by", "time", "against", "time", "the first is", "rounds", "run"]
        yield from table(head, rows)
    yield from tables


def _with_run(
    results: Results, work: Work, rows_of: Callable[[Work, Measured], Iterable[list[str]]]
) -> Iterator[list[str]]:
    if work.name in results:
        measured = results[work.name]
        run = str(machines_of(results).index(measured.machine) + 1)
        yield from ([*row, run] for row in rows_of(work, measured))


def _share_rows(work: Work, measured: Measured) -> Iterator[list[str]]:
    """Yield every way with its share of the speed of the raw one."""
    raw = measured.ways.get(work.raw)
    for way, one in measured.ways.items():
        share = f"{raw.median / one.median:.2f}" if raw else ""
        yield [way, amount(one, "s"), share, str(measured.rounds)]


def _information_rows(work: Work, measured: Measured) -> Iterator[list[str]]:
    by_way, rounds = measured.ways, str(measured.rounds)
    has_targets = work.limit or any(work.rivals.values())
    if work.ours not in by_way:
        if not has_targets:
            yield [work.name, work.ours, _missing(measured), "", "", "", ""]
        return
    ours = by_way[work.ours]
    if not work.rivals and not work.limit:
        yield [work.name, work.ours, amount(ours, work.unit), "", "", "", rounds]
    for way, target in work.rivals.items():
        if target is None and way in by_way:
            rival = by_way[way]
            result = comparison(work.unit, ours, rival)
            amounts = amount(ours, work.unit), amount(rival, work.unit)
            yield [work.name, work.ours, amounts[0], way, amounts[1], result, rounds]


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
        floor = work.floor and by_way.get(work.floor.way)
        # A target that the floor misses, no program reaches. By its faster rounds: noise in the
        # floor must not replace a target.
        if work.floor and floor and not target.is_reached(floor.q1, rival.median):
            share = floor.median / ours.median
            result += f"; {share:.2f} of the speed of the floor"
            must_be = (
                f"{work.floor.share:g} of the speed of the floor, {work.floor.way}, "
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
        taken = amount(ours, work.unit)
        mark = "yes" if work.limit.is_reached(ours.median, 0) else "**no**"
        result = taken + _beside_raw(work, measured)
        yield [work.name, taken, "", "", result, str(work.limit), rounds, mark]


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
    said = [f"{ours} {amount(first, work.unit)}"]
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
    if isinstance(target, OfFloor):
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
    """Return the median with its unit; of a time, in the unit that suits it, also the quartiles."""
    if unit != "s":
        return f"{_three(stats.median)} {unit}"
    units = [("s", 1), ("ms", 1e-3), ("µs", 1e-6)]
    unit, seconds = next((each for each in units if stats.median >= each[1]), units[-1])
    median, low, high = (_three(each / seconds) for each in (stats.median, stats.q1, stats.q3))
    return f"{median} {unit}" + f" ({low} to {high})" * with_quartiles


def _three(number: float) -> str:
    """Write three digits."""
    return (
        f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"
    )
