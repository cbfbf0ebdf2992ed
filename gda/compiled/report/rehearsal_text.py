"""The report on a rehearsal: its lines and tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from gda.compiled.devices.device_kinds import kind_named
from gda.compiled.hlo import format_axes, format_size, format_source
from gda.compiled.hlo.allocations import Temporary
from gda.compiled.rehearsal_facts import ArgumentBytes, RehearsalFacts
from gda.compiled.seconds import format_seconds
from gda.layout.spec import format_spec
from gda.layout.text import (
    counted,
    format_bytes,
    format_mesh,
    format_more,
    listed,
    printable,
    typed_shape,
)
from gda.show.array_table import array_table
from gda.show.report import Table

ANSWERS = {True: "fits", False: "does not fit", None: "capacity unknown"}
_ADVICE_SHOWN = 8
_PLACES_SHOWN = 6
_LEAST_OF_PEAK = 10  # a tenth of it
_LEAST_WHOLE = 100  # a hundredth of it: to shard less saves no time that is worth a line
_MUCH_REPEATED = 1.3  # rematerialisation by XLA is less
_REPEATED = 1.05
_FAR = 2  # times the products, if the devices shared them
_LINES_SHOWN = 3


def parts_of(
    rehearsal: RehearsalFacts, advice: Sequence[str], shortfall: str = ""
) -> list[str | Table]:
    """Return the report on a rehearsal, with the advice and the text of ``shortfall_of``."""
    parts: list[str | Table] = [_headline(rehearsal), ""]
    parts += [Table(_memory_cells(rehearsal), {"per device"}), "", *_notes(rehearsal), ""]
    if rehearsal.fits is False:
        of_all = _temporary_table(rehearsal.temporaries, rehearsal.num_devices)
        for shown in (of_all, _argument_table(rehearsal.arguments)):
            parts += [*shown, ""] if shown else []
        parts += [*rehearsal.message.splitlines(), ""] if rehearsal.message else []
    parts += [*_communication(rehearsal), *_places(rehearsal)]
    parts += [*_large_temporaries(rehearsal), *_advice(advice)]
    return [*parts, *(["", shortfall] if shortfall else [])]


def _headline(rehearsal: RehearsalFacts) -> str:
    mesh = f", mesh {format_mesh(rehearsal.mesh_shape)}" if rehearsal.mesh_shape else ""
    devices = f"{rehearsal.num_devices:,} x {rehearsal.device_kind}{mesh}"
    return f"{rehearsal.name} on {devices}: {ANSWERS[rehearsal.fits]}"


def _notes(rehearsal: RehearsalFacts) -> list[str]:
    """Return lines on everything but memory and communication."""
    lines = []
    if flops := rehearsal.flops:
        lines.append(f"{flops:.3g} floating-point operations per device in products")
    lines += filter(None, [repetition_of(rehearsal)])
    return [*lines, *_times(rehearsal), f"compiled in {rehearsal.compile_seconds:.1f} s"]


def repetition_of(rehearsal: RehearsalFacts) -> str:
    """Return text about work that several devices repeat; empty for little of it."""
    times, num_devices = rehearsal.repetitions or 1, rehearsal.num_devices
    if num_devices == 1 or times < _REPEATED:
        return ""
    if times < _MUCH_REPEATED:
        return (
            f"each product is computed {times:.3g} times on average: devices repeat work, or XLA "
            "computes some again to save memory"
        )
    if times > 0.9 * num_devices:
        return f"all {num_devices:,} devices compute the same batch: no product is shared"
    return f"devices repeat work: each product is computed {times:.2g} times on average"


def distance_of(rehearsal: RehearsalFacts) -> str:
    """Return text about a time far above that of the products divided by the devices.

    It names the longest lines, and those of large results that are not sharded over all devices,
    without gathered parameters and their gradients. Empty if the time is near, or unknown.
    """
    seconds, num_devices = rehearsal.seconds, rehearsal.num_devices
    if not (seconds.estimate and seconds.compute) or seconds.is_bound or num_devices == 1:
        return ""
    products = seconds.compute / (rehearsal.repetitions or 1)
    if seconds.estimate <= _FAR * products or rehearsal.fits is False:
        return ""
    state = (each for each in rehearsal.arguments if each.is_donated or each.could_be_donated)
    stacked = [tuple(n for n in each.shape if n > 1) for each in state]
    parameters = {*stacked, *(each[1:] for each in stacked)}
    whole = {
        f"{printable(format_source(each))} {typed_shape('', each.whole_shape or ())}: "
        f"{sharded_over(each.num_blocks, num_devices)}": None
        for each in rehearsal.temporaries
        if each.num_blocks is not None and each.num_blocks < num_devices
        if each.nbytes * _LEAST_WHOLE >= (rehearsal.peak_bytes or 0)
        if each.whole_shape not in parameters
    }
    longest = [
        f"{each.place} {format_seconds(each.seconds)}" for each in seconds.places if each.place
    ]
    at = f"; longest: {printable(listed(longest[:_LINES_SHOWN]))}" * bool(longest)
    named = "; the largest results that are not sharded over all: " if whole else ""
    return (
        f"of {format_seconds(seconds.estimate)} its products need {format_seconds(products)}, if "
        f"{num_devices:,} devices share them, and its memory traffic "
        f"{format_seconds(seconds.memory)}{at}{named}{listed([*whole][:_LINES_SHOWN])}"
    )


def sharded_over(blocks: int | None, num_devices: int) -> str:
    """Return the devices over which an array of so many blocks is sharded, in words."""
    return "" if blocks is None else f"{'none' if blocks == 1 else blocks} of {num_devices}"


def _times(rehearsal: RehearsalFacts) -> list[str]:
    """Return lines on the time of a call; none if the speeds of the devices are unknown."""
    seconds = rehearsal.seconds
    if not (seconds.estimate or seconds.is_bound):
        return []
    shares = {"MFU": seconds.mfu, "HFU": seconds.hfu if seconds.hfu != seconds.mfu else None}
    used = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share is not None)
    about, at_most = ("≥", "at most") if seconds.is_bound else ("about", "about")
    bounded = f", bounded by {seconds.bounded_by}" if seconds.bounded_by else ""
    lines = [
        f"takes {about} {format_seconds(seconds.estimate)}, at least "
        f"{format_seconds(seconds.bound)}{bounded}{'; ' * bool(used)}{used}",
        "(an estimate from the compiled program and published speeds: no device ran it)",
    ]
    lines.append(omissions_of(rehearsal) if seconds.not_counted else range_of(rehearsal))
    if rate := rehearsal.examples_per_second:
        lines.append(f"{at_most} {rate:,.4g} examples a second")
    if rehearsal.cost is not None:
        examples = rehearsal.examples
        each = (
            f", 1,000 examples {'≥ ' * seconds.is_bound}{rehearsal.cost * 1000 / examples:.3g}"
            if examples
            else ""
        )
        lines.append(
            f"a call costs {about} {rehearsal.cost:.3g}{each}, at {rehearsal.price:g} per device "
            "and hour"
        )
    return lines


def range_of(rehearsal: RehearsalFacts) -> str:
    """Return text about measured steps on the same kind of devices."""
    measured = rehearsal.measured_range
    if measured is None:
        return "(no measured step of such devices is known, to compare estimates with)"
    low, high = format(measured.low, ".2g"), format(measured.high, ".2g")
    times = low if low == high else f"{low} to {high}"
    several = "slices" if kind_named(measured.kind).gpu is None else "hosts"
    where = f" on several {several}" if measured.is_over_slow_links else ""
    return (
        f"(measured steps of {measured.kind}{where} took {times} times the estimate: "
        f"{counted(measured.num_steps, 'step')})"
    )


def omissions_of(rehearsal: RehearsalFacts) -> str:
    """Return text about work that the estimate omits."""
    return f"not counted: {listed([*map(printable, rehearsal.seconds.not_counted)])}"


def _memory_cells(rehearsal: RehearsalFacts) -> list[list[str]]:
    aliased, capacity = rehearsal.aliased_bytes, rehearsal.capacity_bytes
    peak = rehearsal.peak_bytes
    in_donated = f"{format_bytes(aliased)} of them in donated arguments" if aliased else ""
    share = f", {peak / capacity:.0%}" if capacity and peak is not None else ""
    rows = [
        ("arguments", rehearsal.argument_bytes, ""),
        ("outputs", rehearsal.output_bytes, in_donated),
        ("temporaries", rehearsal.temporary_bytes, ""),
        ("code", rehearsal.code_bytes or None, ""),  # compilers for CPUs and GPUs do not tell it
        ("peak", peak, "" if capacity is None else f"of {format_bytes(capacity)}{share}"),
    ]
    cells = [
        [label, format_bytes(nbytes), says] for label, nbytes, says in rows if nbytes is not None
    ]
    return [["memory", "per device", ""], *cells]


# Tables.


def _argument_table(arguments: Sequence[ArgumentBytes]) -> list[str | Table]:
    header = ["largest arguments", "array", "spec", "per device", ""]
    return array_table(header, arguments, _argument_cells, lambda each: each.nbytes)


def _argument_cells(argument: ArgumentBytes) -> list[str]:
    array = typed_shape(argument.dtype, argument.shape)
    spec = "" if argument.spec is None else format_spec(argument.spec)
    donated = "donated" if argument.is_donated else "could be donated" * argument.could_be_donated
    says = "on its host" if argument.is_on_host else donated
    return [argument.name, array, spec, format_bytes(argument.nbytes), says]


def _temporary_table(temporaries: Sequence[Temporary], num_devices: int) -> list[str | Table]:
    header = ["largest temporaries", "whole shape", "from", "sharded over", "per device"]
    cells_of = partial(_temporary_cells, num_devices=num_devices)
    return array_table(header, temporaries, cells_of, lambda each: each.nbytes)


def _temporary_cells(temporary: Temporary, num_devices: int) -> list[str]:
    whole = temporary.whole_shape
    return [
        typed_shape(temporary.dtype, temporary.shape),
        "" if whole is None else typed_shape("", whole),
        format_source(temporary),
        sharded_over(temporary.num_blocks, num_devices),
        format_bytes(temporary.nbytes),
    ]


def _communication(rehearsal: RehearsalFacts) -> list[str | Table]:
    traffic = rehearsal.traffic
    if not traffic:
        return [] if rehearsal.collectives is None else ["no communication"]
    has_slow = any(each.nbytes_slow is not None for each in traffic)
    has_times = any(each.least_seconds is not None for each in traffic)
    header = ["communication over", "collectives", "per device"]
    header += ["slow links"] * has_slow + ["at least"] * has_times
    rows = []
    for each in traffic:
        count = "?" if each.executions is None else f"{each.executions:,}"
        row = [format_axes(each.axes), count, format_size(each.nbytes)]
        row += [format_size(each.nbytes_slow)] * has_slow
        rows.append(row + [format_seconds(each.least_seconds)] * has_times)
    return [Table([header, *rows], header[1:])]


def _places(rehearsal: RehearsalFacts) -> list[str | Table]:
    """Return the lines of code that take longest, as a table."""
    header = ["longest", "about", "communicates", "memory traffic", "operations"]
    rows = [
        [
            printable(each.place or "no line"),
            format_seconds(each.seconds, each.is_bound),
            format_seconds(each.communication) if each.communication else "",
            format_bytes(each.nbytes),
            f"{'≥ ' * each.is_bound}{each.flops:.3g}",
        ]
        for each in rehearsal.seconds.places[:_PLACES_SHOWN]
    ]
    return ["", Table([header, *rows], header[1:])] if rows else []


def _large_temporaries(rehearsal: RehearsalFacts) -> list[str | Table]:
    """Return the lines of large temporaries with whole shapes, which take much of the peak."""
    least = (rehearsal.peak_bytes or 0) / _LEAST_OF_PEAK
    large = [each for each in rehearsal.temporaries if each.nbytes >= least]
    if rehearsal.fits is False or not any(each.whole_shape for each in large):
        return []
    return ["", *_temporary_table(large, rehearsal.num_devices)]


def _advice(advice: Sequence[str]) -> list[str]:
    lines = [f"- {each}" for each in advice[:_ADVICE_SHOWN]]
    if len(advice) > len(lines):
        lines.append(f"{format_more(len(advice) - len(lines))} in rehearsal.advice")
    return ["", "to save time or memory:", *lines] if lines else []
