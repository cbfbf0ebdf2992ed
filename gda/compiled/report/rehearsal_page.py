"""A rehearsal as a picture, in HTML for a notebook or a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from gda.compiled.hlo import table_of
from gda.compiled.hlo.allocations import Temporary
from gda.compiled.report.rehearsal_text import (
    ANSWERS,
    argument_table,
    devices_of,
    notes_of,
    of_capacity,
    temporary_table,
    traffic_cells,
)
from gda.layout.text import format_bytes
from gda.show import markup
from gda.show.array_table import ArrayTable
from gda.show.drawing.colors import INK, colors_of
from gda.show.drawing.sheet import escape

if TYPE_CHECKING:
    from gda.compiled.rehearsal import ArgumentBytes, AxisTraffic, Rehearsal

_BLUE, _ORANGE, _YELLOW, _GREEN, _, _LIGHT_BLUE = colors_of(6)
_DONATED, _OTHER = "arguments, donated", "arguments, not donated"
_OUTPUTS, _TEMPORARIES, _BOTH, _CODE = "outputs", "temporaries", "outputs and temporaries", "code"
_COLOR_OF = {
    _DONATED: _BLUE,
    _OTHER: _LIGHT_BLUE,
    _OUTPUTS: _GREEN,
    _TEMPORARIES: _ORANGE,
    _BOTH: _ORANGE,
    _CODE: _YELLOW,
}
_LINKS = {"fast links": _BLUE, "slow links": _ORANGE}
_COLOR_OF_ANSWER = {True: _GREEN, False: _ORANGE, None: _YELLOW}
_WIDE, _NARROW = 60, 14  # em
_HIGH = 28  # pixels
# Over the part of a program that a device has no memory for, on any colour and background.
_EXCESS = "repeating-linear-gradient(45deg,rgba(170,0,0,.55) 0 4px,transparent 4px 9px)"


def page_of(rehearsals: Iterable[Rehearsal]) -> str:
    """Return a whole page with a picture of each rehearsal, without network or script."""
    return markup.page("Rehearsals", map(element_of, rehearsals))


def element_of(rehearsal: Rehearsal) -> str:
    """Return the picture of a rehearsal as one HTML element, light or dark."""
    answer, color = ANSWERS[rehearsal.fits], _COLOR_OF_ANSWER[rehearsal.fits]
    badge = (
        f'<span style="background:{color};color:{INK};padding:2px 10px;border-radius:10px;'
        f'font-weight:600">{answer}</span>'
    )
    about = escape(f"{rehearsal.name} on {devices_of(rehearsal)}")
    first = f'<span style="font-size:15px"><b>{about}</b> &nbsp; {badge}</span>'
    parts = [markup.text(first), *_sections(rehearsal)]
    return markup.element(f'<div style="max-width:100%;overflow-x:auto">{"".join(parts)}</div>')


def _sections(rehearsal: Rehearsal) -> Iterator[str]:
    yield markup.section("Memory of a device", _memory(rehearsal))
    if advice := rehearsal.advice:
        items = "".join(f"<li>{escape(each.text)}</li>" for each in advice)
        yield markup.section("To save memory or communication", markup.text(items, tag="ol"))
    if rehearsal.traffic:
        yield markup.section("Communication of a device in one call", _traffic(rehearsal.traffic))
    if rehearsal.arguments:
        yield markup.section("Largest arguments", _arguments(rehearsal.arguments))
    if rehearsal.temporaries:
        yield markup.section("Largest temporaries", _temporaries(rehearsal.temporaries))
    if rehearsal.collectives:
        yield markup.section("Collectives", table_of(rehearsal.collectives))
    if rehearsal.message:
        message = markup.text(escape(rehearsal.message), tag="pre")
        yield markup.section("The words of the compiler", message)


# Memory.


def _memory(rehearsal: Rehearsal) -> str:
    parts = _parts(rehearsal)
    taken, capacity = sum(parts.values()), rehearsal.capacity_bytes or 0
    longest = max(taken, capacity, 1)
    shown = markup.bar(parts, _COLOR_OF, longest, _WIDE, _HIGH)
    if capacity:
        shown += (
            f'<div style="position:absolute;left:{100 * capacity / longest:.3g}%;right:0;top:0;'
            f'bottom:0;background:{_EXCESS}"></div>'
        )
    sizes = {f"{name} {format_bytes(size)}": _COLOR_OF[name] for name, size in parts.items()}
    return "".join(
        [
            markup.text(f"<b>{escape(_peak(rehearsal))}</b>"),
            f'<div style="position:relative;width:{_WIDE}em;max-width:100%">{shown}</div>',
            markup.text(markup.legend(sizes)),
            *(markup.text(escape(line)) for line in notes_of(rehearsal)),
        ]
    )


def _parts(rehearsal: Rehearsal) -> dict[str, int]:
    """Return the bytes of the peak by their kind."""
    donated = sum(each.nbytes for each in rehearsal.arguments if each.is_donated)
    parts = {_DONATED: donated, _OTHER: max(rehearsal.argument_bytes - donated, 0)}
    if rehearsal.output_bytes is None:  # a program that does not fit
        parts[_BOTH] = max((rehearsal.peak_bytes or 0) - rehearsal.argument_bytes, 0)
    else:
        parts[_OUTPUTS] = rehearsal.output_bytes - (rehearsal.aliased_bytes or 0)
        parts[_TEMPORARIES] = rehearsal.temporary_bytes or 0
        parts[_CODE] = rehearsal.code_bytes or 0
    return {name: nbytes for name, nbytes in parts.items() if nbytes}


def _peak(rehearsal: Rehearsal) -> str:
    capacity, peak = rehearsal.capacity_bytes, rehearsal.peak_bytes
    if peak is None:
        return "the compiler does not tell the peak"
    text = f"peak {format_bytes(peak)} {of_capacity(rehearsal)}".strip()
    if capacity is None:
        return text
    over = peak - capacity
    return f"{text}: {format_bytes(abs(over))} {'too much (hatched)' if over > 0 else 'free'}"


# Tables with bars.


def _traffic(traffic: Sequence[AxisTraffic]) -> str:
    longest = max(1, *(each.nbytes or 0 for each in traffic))
    bars = []
    for each in traffic:
        slow = each.nbytes_slow or 0
        parts = {"fast links": (each.nbytes or 0) - slow, "slow links": slow}
        bars.append(markup.bar(parts, _LINKS, longest, _NARROW))
    legend = markup.legend(_LINKS) if any(each.nbytes_slow for each in traffic) else ""
    return markup.table_with_bars(traffic_cells(traffic), 2, bars, legend)


def _arguments(arguments: Sequence[ArgumentBytes]) -> str:
    parts = ({_DONATED if each.is_donated else _OTHER: each.nbytes} for each in arguments)
    return _with_bars(argument_table(arguments), parts)


def _temporaries(temporaries: Sequence[Temporary]) -> str:
    return _with_bars(
        temporary_table(temporaries), ({_TEMPORARIES: each.nbytes} for each in temporaries)
    )


def _with_bars(shown: ArrayTable, parts: Iterable[Mapping[str, int]]) -> str:
    """Return the table of arrays, the largest first, with a bar for each."""
    of_shown = [*islice(parts, len(shown.rows))]
    longest = max(1, *of_shown[0].values())
    bars = [markup.bar(each, _COLOR_OF, longest, _NARROW) for each in of_shown]
    return "".join([shown.html(bars=bars), *map(markup.text, shown.more)])
