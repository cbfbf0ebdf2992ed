"""The results of ``gda rehearse`` for several meshes: their order, and a table to decide from."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from gda.cli.commands import OK, WRONG, terminal_width
from gda.layout.tables import table
from gda.layout.text import format_bytes, format_mesh, listed

if TYPE_CHECKING:
    from gda.cli.rehearsal_processes import RehearsalReport, RehearsalRequest
    from gda.compiled.rehearsal import Rehearsal

_DOES_NOT_FIT = 1


class RehearsalResult(NamedTuple):
    """The report on one mesh of one topology."""

    request: RehearsalRequest
    report: RehearsalReport

    @property
    def mesh(self) -> str:
        return format_mesh(self.request.mesh)

    @property
    def rehearsal(self) -> Rehearsal | None:
        return self.report.rehearsal

    @property
    def fits(self) -> bool | None:
        return self.rehearsal.fits if self.rehearsal else False

    @property
    def code(self) -> int:
        if self.rehearsal is None:
            return WRONG
        return _DOES_NOT_FIT if self.rehearsal.fits is False else OK

    def order(self) -> tuple[float, ...]:
        """Return the key of sorting: of what fits cost, then time; of the rest first the memory."""
        rehearsal = self.rehearsal
        if rehearsal is None:
            return (self.code,)
        nbytes, slow = (_bytes_sent(rehearsal, name) for name in ("nbytes", "nbytes_slow"))
        # Without speeds, work that devices repeat counts before bytes.
        seconds = rehearsal.seconds
        figures = (rehearsal.cost, seconds.estimate, rehearsal.flops)
        known = [math.inf if each is None else each for each in figures]
        peak = rehearsal.peak_bytes or math.inf
        is_unknown = seconds.is_bound or nbytes is None
        too_large = peak / (rehearsal.capacity_bytes or 1) if rehearsal.fits is False else 0
        return (self.code, too_large, is_unknown, *known, slow or 0, nbytes or 0, peak)

    def document(self) -> dict[str, Any]:
        request = self.request
        return {
            "topology": request.topology,
            "num_slices": request.num_slices,
            "mesh": request.mesh,
            "error": self.report.reason or None,
            **(self.rehearsal.to_dict() if self.rehearsal else {}),
        }


def _bytes_sent(rehearsal: Rehearsal, name: str) -> int | None:
    """Return the sum of ``nbytes`` or ``nbytes_slow`` over all axes; None if one is unknown."""
    from gda.compiled.hlo import summed

    return summed(getattr(each, name) for each in rehearsal.traffic)


def lines_of(results: Sequence[RehearsalResult]) -> list[str]:
    """Return the table of several meshes, and the reasons of those without a rehearsal."""
    from gda.compiled.report.rehearsal_text import (
        distance_of,
        omissions_of,
        range_of,
        repetition_of,
    )

    are_several = len({each.request.topology for each in results}) > 1
    rehearsed = [
        (f"{each.request.topology} {each.mesh}" if are_several else each.mesh, each.rehearsal)
        for each in results
        if each.rehearsal
    ]
    parts = _tables([each for each in results if each.rehearsal], are_several)
    ranges = {
        f"{each.request.topology}: " * are_several + range_of(each.rehearsal).strip("()"): None
        for each in results
        if each.rehearsal and each.rehearsal.seconds.estimate
        if not each.rehearsal.seconds.is_bound
    }
    parts.append([*ranges])
    if rehearsed and (words := distance_of(rehearsed[0][1])):
        is_first = "the first" if rehearsed[0][1].cost else "the fastest"
        parts.append([f"{rehearsed[0][0]} is {is_first} of these: {words}"])
    parts.append(_near_the_first(rehearsed))
    if rehearsed and (advice := rehearsed[0][1].advice):
        parts.append([f"{rehearsed[0][0]}, to save time or memory: {advice[0].text}"])
    repeated: dict[str, list[str]] = {}
    for mesh, rehearsal in rehearsed:
        repeated.setdefault(repetition_of(rehearsal), []).append(mesh)
    parts.append([f"{'; '.join(meshes)}: {words}" for words, meshes in repeated.items() if words])
    bounds = [(mesh, omissions_of(each)) for mesh, each in rehearsed if each.seconds.is_bound]
    parts.append([f"{mesh}: {words}" for mesh, words in bounds])
    if failed := [each for each in results if not each.rehearsal]:
        rows: dict[str, list[str]] = {}  # one for reasons that differ in numbers alone
        for each in failed:
            topology, why = each.request.topology, each.report.reason.partition(". ")[0]
            cells = [*[topology] * are_several, each.mesh, why]
            row = rows.setdefault(topology + re.sub(r"\{.*?\}|\d+", "", why), cells)
            row[-1] += f"; also {each.mesh}" * (row is not cells)
        header = [*["topology"] * are_several, "no rehearsal", "reason"]
        one = f"--topology {failed[0].request.topology} " * are_several
        last = f"for a traceback: {one}--mesh {failed[0].mesh} alone"
        parts.append([*table([header, *rows.values()], width=terminal_width()), last])
    return [*chain(*(["", *part] for part in parts if part))][1:]


def _near_the_first(rehearsed: Sequence[tuple[str, Rehearsal]]) -> list[str]:
    """Return a line about meshes that estimates do not tell apart, with their merits."""
    from gda.compiled.hlo import format_size

    fit = [of for of in rehearsed if of[1].fits is not False and not of[1].seconds.is_bound]
    figures = [each.cost or each.seconds.estimate or math.inf for _, each in fit]
    near = [fit[at] for at, figure in enumerate(figures) if figure <= 1.05 * figures[0] < math.inf]
    slow = sorted((_bytes_sent(each, "nbytes_slow") or 0, mesh) for mesh, each in near)
    peaks = sorted((each.peak_bytes or 0, mesh) for mesh, each in near)
    merits: dict[str, list[str]] = {}
    for of, has in ((slow, "sends least over slow links"), (peaks, "has the lowest peak")):
        if of and of[0][0] < of[-1][0]:
            merits.setdefault(of[0][1], []).append(f"{has} ({format_size(of[0][0])})")
    all_of = listed([f"{mesh} {listed(each)}" for mesh, each in merits.items()])
    words = f"the first {len(near)} are within 5%, less than estimates are right to"
    return [f"{words}: {all_of}"] * bool(merits)


class _Column(NamedTuple):
    name: str
    cell: Callable[[Rehearsal], str]
    is_shown: bool = True
    is_of_all: bool = False  # also of a mesh that does not fit


def _tables(results: Sequence[RehearsalResult], are_several: bool) -> list[list[str]]:
    """Return the heading and the table, or several if one is too wide for the terminal."""
    rehearsals = [each.rehearsal for each in results if each.rehearsal]
    if not rehearsals:
        return []
    groups: list[list[_Column]] = [[]]
    for column in (*_columns(rehearsals), *_columns_of_reasons(rehearsals)):
        wider = [*groups[-1], column]
        if max(map(len, _table(results, wider, are_several, None))) <= terminal_width():
            groups[-1] = wider
        else:
            groups.append([column])
    tables = [_table(results, each, are_several, terminal_width()) for each in groups if each]
    return [_heading(results, are_several), *tables]


def _heading(results: Sequence[RehearsalResult], are_several: bool) -> list[str]:
    request, devices = results[0].request, dict[str, str]()
    for each in results:
        assert each.rehearsal
        capacity = each.rehearsal.capacity_bytes
        each_with = "" if capacity is None else f" with {format_bytes(capacity)} each"
        on = f"{each.rehearsal.num_devices:,} x {each.rehearsal.device_kind}{each_with}"
        devices.setdefault(each.request.topology, on)
    program, last = f"{request.file}:{request.function}", "bytes are those of one device"
    if not are_several:
        return [f"{program} on {devices[request.topology]}; {last}"]
    return [f"{program}; {last}", *(f"{name}: {on}" for name, on in sorted(devices.items()))]


def _table(
    results: Sequence[RehearsalResult],
    columns: Sequence[_Column],
    are_several: bool,
    width: int | None,
) -> list[str]:
    header = [*["topology"] * are_several, "mesh", *(each.name for each in columns)]
    rows = []
    for result in results:
        rehearsal = result.rehearsal
        assert rehearsal
        cells = [
            each.cell(rehearsal) if each.is_of_all or rehearsal.fits is not False else ""
            for each in columns
        ]
        rows.append([*[result.request.topology] * are_several, result.mesh, *cells])
    numbers = {each.name for each in columns} - {"fits"}
    return table([header, *rows], right=numbers, width=width)


def _columns(rehearsals: Sequence[Rehearsal]) -> list[_Column]:
    """Return the columns to decide from."""
    from gda.compiled.hlo import format_size

    def cost(rehearsal: Rehearsal, figure: float | None) -> str:
        return "" if figure is None else f"{'≥ ' * rehearsal.seconds.is_bound}{figure:,.3g}"

    def rate(rehearsal: Rehearsal) -> str:
        found = rehearsal.examples_per_second
        digits = ",.0f" if found and found >= 1000 else ".4g"
        return "" if found is None else f"{'≤ ' * rehearsal.seconds.is_bound}{found:{digits}}"

    def fits(rehearsal: Rehearsal) -> str:
        return {True: "yes", False: "no", None: "?"}[rehearsal.fits]

    is_paid = any(each.cost is not None for each in rehearsals)
    have_examples = any(each.examples for each in rehearsals)
    times = [each.seconds for each in rehearsals]
    columns = [
        _Column("fits", fits, is_of_all=True),
        _Column("peak", lambda each: format_size(each.peak_bytes), is_of_all=True),
        _Column("about", lambda each: str(each.seconds), any(each.estimate for each in times)),
        _Column("examples/s", rate, have_examples),
        _Column(
            "per million",
            lambda each: cost(each, each.cost_per_million),
            is_paid and have_examples,
        ),
        _Column("a call costs", lambda each: cost(each, each.cost), is_paid and not have_examples),
    ]
    return [each for each in columns if each.is_shown]


def _columns_of_reasons(rehearsals: Sequence[Rehearsal]) -> list[_Column]:
    """Return the columns with the range of a time, and with what is behind it."""
    from gda.compiled.hlo import format_axes, format_size
    from gda.compiled.report.rehearsal_text import sharded_over
    from gda.compiled.seconds import format_seconds

    def share(of: float | None) -> str:
        return "" if of is None else f"{of:.0%}"

    def measured(of: Rehearsal) -> str:
        if not (times := of.measured_range) or of.seconds.estimate is None:
            return ""
        low, high = (format_seconds(of.seconds.estimate * n) for n in (times.low, times.high))
        unit = high.partition(" ")[2]
        return high if low == high else f"{low.removesuffix(f' {unit}')} to {high}"

    def over(axes: Any) -> Callable[[Rehearsal], str]:
        return lambda of: format_size({each.axes: each.nbytes for each in of.traffic}.get(axes, 0))

    axes = {each.axes for rehearsal in rehearsals for each in rehearsal.traffic}
    ordered = sorted(axes, key=lambda key: (key is None, len(key or ()), key or ()))
    has_slow = any(_bytes_sent(rehearsal, "nbytes_slow") for rehearsal in rehearsals)
    times = [each.seconds for each in rehearsals]
    columns = [
        _Column("range", measured, any(each.measured_range for each in rehearsals)),
        _Column("MFU", lambda each: share(each.seconds.mfu), any(each.mfu for each in times)),
        _Column(
            "HFU",
            lambda each: share(each.seconds.hfu),
            any(each.hfu and share(each.hfu) != share(each.mfu) for each in times),
        ),
        *(_Column(f"over {format_axes(each)}", over(each)) for each in ordered),
        _Column(
            "over slow links", lambda each: format_size(_bytes_sent(each, "nbytes_slow")), has_slow
        ),
        _Column(
            "activations",
            lambda each: sharded_over(each.activation_blocks, each.num_devices),
            any(each.activation_blocks for each in rehearsals),
        ),
    ]
    return [each for each in columns if each.is_shown]
