"""The lines of text that ``print`` shows of a rehearsal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gda.compiled.hlo import format_axes, format_size, format_source
from gda.compiled.hlo.allocations import Temporary
from gda.layout.tables import table
from gda.layout.text import counted, format_bytes, format_mesh, format_more, typed_shape

if TYPE_CHECKING:
    from gda.compiled.rehearsal import ArgumentBytes, Rehearsal

ARGUMENTS_SHOWN = 8
_ADVICE_SHOWN = 8


def lines_of(rehearsal: Rehearsal) -> list[str]:
    """Return the report on a rehearsal."""
    lines = [headline_of(rehearsal), "", *_memory(rehearsal), ""]
    lines += [*notes_of(rehearsal), *_pointer(rehearsal), ""]
    if rehearsal.fits is False and rehearsal.message:
        if rehearsal.temporaries:
            lines += [*_of_temporaries(rehearsal.temporaries), ""]
        lines += [*_of_arguments(rehearsal.arguments), "", *rehearsal.message.splitlines(), ""]
    return [*lines, *_communication(rehearsal), *_to_change_this(rehearsal)]


def headline_of(rehearsal: Rehearsal) -> str:
    """Return the name, the devices and the answer."""
    answers = {True: "fits", False: "does not fit", None: "capacity unknown"}
    return f"{rehearsal.name} on {devices_of(rehearsal)}: {answers[rehearsal.fits]}"


def devices_of(rehearsal: Rehearsal) -> str:
    """Return the devices and the mesh."""
    devices = f"{rehearsal.num_devices:,} x {rehearsal.device_kind}"
    mesh_shape = rehearsal.mesh_shape
    return f"{devices}, mesh {format_mesh(mesh_shape)}" if mesh_shape else devices


def of_capacity(rehearsal: Rehearsal) -> str:
    """Return the capacity and the part of it that the peak takes; empty if it is unknown."""
    capacity, peak = rehearsal.capacity_bytes, rehearsal.peak_bytes
    if capacity is None:
        return ""
    share = f", {peak / capacity:.0%}" if capacity and peak is not None else ""
    return f"of {format_bytes(capacity)}{share}"


def notes_of(rehearsal: Rehearsal) -> list[str]:
    """Return lines on everything but memory and communication."""
    flops = rehearsal.flops
    words = f"{flops:.3g} floating-point operations per device in products" if flops else ""
    return [*([words] if words else []), f"compiled in {rehearsal.compile_seconds:.1f} s"]


def _memory(rehearsal: Rehearsal) -> list[str]:
    aliased = rehearsal.aliased_bytes
    in_donated = f"{format_bytes(aliased)} of them in donated arguments" if aliased else ""
    rows = [
        ("arguments", rehearsal.argument_bytes, ""),
        ("outputs", rehearsal.output_bytes, in_donated),
        ("temporaries", rehearsal.temporary_bytes, ""),
        ("code", rehearsal.code_bytes, ""),
        ("peak", rehearsal.peak_bytes, of_capacity(rehearsal)),
    ]
    cells = [
        [label, format_bytes(nbytes), says] for label, nbytes, says in rows if nbytes is not None
    ]
    return table([["memory", "per device", ""], *cells], right={"per device"})


def _of_temporaries(temporaries: Sequence[Temporary]) -> list[str]:
    rows = [
        [
            typed_shape(each.dtype, each.shape),
            format_bytes(each.nbytes),
            format_source(each) or each.op_name,
        ]
        for each in temporaries
    ]
    return table([["largest temporaries", "per device", "from"], *rows], right={"per device"})


def _of_arguments(arguments: Sequence[ArgumentBytes]) -> list[str]:
    rows = [
        [
            each.name,
            typed_shape(each.dtype, each.shape),
            format_bytes(each.nbytes),
            "donated" if each.is_donated else "",
        ]
        for each in arguments[:ARGUMENTS_SHOWN]
    ]
    header = ["largest arguments", "", "per device", ""]
    more = len(arguments) - len(rows)
    left = [f"and {counted(more, 'more argument')}"] if more > 0 else []
    return [*table([header, *rows], right={"per device"}), *left]


def _communication(rehearsal: Rehearsal) -> list[str]:
    if rehearsal.collectives is None:
        return []
    if not rehearsal.traffic:
        return ["no communication"]
    has_slow = any(each.nbytes_slow is not None for each in rehearsal.traffic)
    rows = [["communication over", "collectives", "per device", "slow links"]]
    rows += [
        [
            format_axes(each.axes),
            "?" if each.executions is None else f"{each.executions:,}",
            format_size(each.nbytes),
            format_size(each.nbytes_slow),
        ]
        for each in rehearsal.traffic
    ]
    return table(
        [row if has_slow else row[:-1] for row in rows],
        right={"collectives", "per device", "slow links"},
    )


def _shows_advice(rehearsal: Rehearsal) -> bool:
    return rehearsal.fits is False


def _pointer(rehearsal: Rehearsal) -> list[str]:
    """Return a line on advice that is not shown."""
    savings = [each.saves_bytes for each in rehearsal.advice if each.saves_bytes]
    if not savings or _shows_advice(rehearsal):
        return []
    changes = counted(len(savings), "change")
    return [
        f"rehearsal.advice has {changes} that would save memory, the first "
        f"{format_bytes(savings[0])}"
    ]


def _to_change_this(rehearsal: Rehearsal) -> list[str]:
    advice = rehearsal.advice if _shows_advice(rehearsal) else ()
    lines = [f"- {each.text}" for each in advice[:_ADVICE_SHOWN]]
    if len(advice) > len(lines):
        lines.append(f"{format_more(len(advice) - len(lines))} in rehearsal.advice")
    return ["", "to change this:", *lines] if lines else []
