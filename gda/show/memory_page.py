"""The report of ``gda.memory`` as HTML, with a bar for each device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gda.layout.text import format_bytes, format_more
from gda.show.drawing.colors import colors_of
from gda.show.drawing.sheet import escape
from gda.show.memory_report import ROWS_SHOWN, DeviceMemory, MemoryReport, devices_of, more_rows
from gda.show.page import STYLE

_OTHER = "not in arrays"
_GREY = "rgba(128,128,128,.45)"
_MOST_BARS = 64


def page_of(report: MemoryReport) -> str:
    """Return a report as one HTML element, light or dark, without network or script.

    >>> page_of(MemoryReport((), ()))[-34:]
    '<p>0 B in 0 arrays</p></div></div>'
    """
    texts = [report.headline, *report.notes]
    parts = [f"<p>{escape(text)}</p>" for text in texts]
    if report.arrays:
        parts.insert(1, _bars(report))
        parts.insert(2, _arrays(report))
    return f'<div class="gda-show"><style>{STYLE}</style><div>{"".join(parts)}</div></div>'


def _bars(report: MemoryReport) -> str:
    """Return a table with a bar for each device, and the legend of its colours."""
    devices = report.devices[:_MOST_BARS]
    trees = [*dict.fromkeys(name for each in devices for name in each.by_tree)]
    color_of = dict(zip(trees, colors_of(len(trees)), strict=False)) | {_OTHER: _GREY}
    longest = max(max(each.bytes_limit or 0, _taken(each)) for each in devices) or 1
    rows = [
        [escape(devices_of([each])), _bar(each, color_of, longest), escape(_numbers(each))]
        for each in devices
    ]
    if len(report.devices) > len(devices):
        rows.append([escape(format_more(len(report.devices) - len(devices))), "", ""])
    shown = color_of if any(each.bytes_not_in_arrays for each in devices) else trees
    legend = " ".join(f"{_segment('12px', color_of[name])} {escape(name)} " for name in shown)
    return _table(["device", legend, "bytes"], rows)


def _taken(device: DeviceMemory) -> int:
    return device.nbytes + (device.bytes_not_in_arrays or 0)


def _numbers(device: DeviceMemory) -> str:
    text = format_bytes(_taken(device))
    return f"{text} of {format_bytes(device.bytes_limit)}" if device.bytes_limit else text


def _bar(device: DeviceMemory, color_of: dict[str, str], longest: int) -> str:
    parts = device.by_tree | {_OTHER: device.bytes_not_in_arrays or 0}
    segments = "".join(
        _segment(f"{100 * size / longest:.3g}%", color_of[name], f"{name}: {format_bytes(size)}")
        for name, size in parts.items()
        if size
    )
    return (
        '<div style="width:22em;height:12px;margin-top:2px;line-height:0;overflow:hidden;'
        f'white-space:nowrap;border:1px solid rgba(128,128,128,.5)">{segments}</div>'
    )


def _segment(width: str, color: str, title: str = "") -> str:
    hover = f' title="{escape(title)}"' if title else ""
    return (
        f'<span{hover} style="display:inline-block;height:12px;width:{width};'
        f'background:{color}"></span>'
    )


def _arrays(report: MemoryReport) -> str:
    rows = [
        [
            *map(escape, (row.label, row.kind, row.place)),
            *map(format_bytes, (row.nbytes_per_device, row.nbytes)),
            format_bytes(row.nbytes_shared) if row.nbytes_shared else "",
        ]
        for row in report.arrays[:ROWS_SHOWN]
    ]
    if more := more_rows(report):
        rows.append([escape(more), "", "", "", "", ""])
    shared = "shared" if any(row.nbytes_shared for row in report.arrays[:ROWS_SHOWN]) else ""
    return _table(["array", "", "layout", "per device", "in all", shared], rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are markup."""
    head = "".join(f'<th scope="col">{cell}</th>' for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<table class="gda-facts gda-memory"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>"
    )
