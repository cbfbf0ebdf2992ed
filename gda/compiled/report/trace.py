"""A rehearsal as a file of Chrome's trace-event format, which Perfetto opens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gda.compiled.hlo import format_size, format_source
from gda.compiled.rehearsal_facts import RehearsalFacts
from gda.compiled.seconds import format_seconds
from gda.layout.text import format_bytes, format_mesh, printable, typed_shape

_FIRST_TRACKS = ("loops", "compute", "memory", "copies", "waits")
_FIRST_TID = 2  # the process is 1: Perfetto takes a thread of this number for its main thread
_NOT_KNOWN = (
    "an estimate from the compiled program and published speeds: no device ran it",
    "each loop is drawn as its first turn: args.turns and args.takes have those of all turns",
    "a kernel's products and its accesses begin together; the order inside a fusion is unknown",
    "a collective has its links for itself; contention with other programs or hosts is unknown",
    "live bytes are those at the begin of each event, without what libraries and collectives take",
)


def write_trace(rehearsal: RehearsalFacts, path: Path) -> None:
    """Write the timeline of a rehearsal, as ``Rehearsal.save_trace`` tells."""
    if not rehearsal.seconds.timeline.events:
        reasons = "; ".join(rehearsal.seconds.not_counted) or "nothing in it takes time"
        raise ValueError(
            f"{rehearsal.name} has no timeline to save: {reasons}; rehearse it for a kind of "
            "device whose speeds gda knows, such as with gda.rehearsal_mesh('v5e:2x2', …)"
        )
    mesh = format_mesh(rehearsal.mesh_shape)
    about = {
        "function": rehearsal.name,
        "devices": f"one of {rehearsal.num_devices:,} x {rehearsal.device_kind}, mesh {mesh}",
        "estimate": str(rehearsal.seconds),
        "temporaries": f"{format_size(rehearsal.temporary_bytes)} allocated, of which at most "
        f"{format_bytes(_most_live_bytes(rehearsal))} are live at a time",
        "not counted": [*map(printable, rehearsal.seconds.not_counted)],
        "not known": _NOT_KNOWN,
    }
    # Perfetto does not show otherData, but the arguments of a mark.
    mark = _mark("about this picture", 0.0, about)
    events = [*_events(rehearsal), mark]
    document = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}
    path.write_text(json.dumps(document, allow_nan=False), encoding="utf-8")


def _most_live_bytes(rehearsal: RehearsalFacts) -> int:
    """Return the bytes of temporaries at the peak of the timeline."""
    return max((each.live_bytes or 0 for each in rehearsal.seconds.timeline.events), default=0)


def _mark(name: str, ts: float, args: dict[str, Any]) -> dict[str, Any]:
    """Return a mark of the whole process, with what a click on it shows."""
    at = {"ph": "i", "s": "p", "pid": 1, "tid": _FIRST_TID, "ts": ts}
    return at | {"name": name, "args": args}


def _events(rehearsal: RehearsalFacts) -> Iterator[dict[str, Any]]:
    timeline = rehearsal.seconds.timeline
    found = {each.track for each in timeline.events}
    tracks = [each for each in _FIRST_TRACKS if each in found]
    tracks += sorted(found - {*tracks})
    process = f"{rehearsal.name}, one device: {rehearsal.seconds}, loops folded"
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": process}}
    for number, track in enumerate(tracks, _FIRST_TID):
        named = {"ph": "M", "pid": 1, "tid": number}
        yield named | {"name": "thread_name", "args": {"name": track}}
        yield named | {"name": "thread_sort_index", "args": {"sort_index": number}}
    # What the device holds from the first to the last event.
    held = (rehearsal.peak_bytes or 0) - (rehearsal.temporary_bytes or 0)
    most = _most_live_bytes(rehearsal)
    for each in timeline.events:
        name = f"{each.name} x {each.times or '?'}" if each.track == "loops" else each.name
        if each.track.startswith("over "):
            name = f"{each.opcode} {name}"
        # Whole nanoseconds, as Perfetto takes them: its rounding may let two events overlap.
        begin, end = (round(at * 1e9) / 1e3 for at in (each.begin, each.begin + each.seconds))
        args = {"operation": each.opcode, "turns": each.times, "bytes": each.nbytes}
        if end > begin:  # a scalar takes less: it would be a row of its own
            yield {
                "ph": "X",
                "pid": 1,
                "tid": tracks.index(each.track) + _FIRST_TID,
                "cat": each.track,
                "name": printable(name),
                "ts": begin,
                "dur": round(end - begin, 3),
                "args": args | {"flops": each.flops, "takes": format_seconds(each.takes)},
            }
        if each.live_bytes is not None:
            live = {"temporaries": each.live_bytes, "arguments, results and code": held}
            yield {"ph": "C", "pid": 1, "name": "live bytes", "ts": begin, "args": live}
        if each.live_bytes == most > 0:
            most = -1  # at the first of them
            largest = {
                f"{at}": f"{typed_shape(of.dtype, of.shape)}, {format_bytes(of.nbytes)}, "
                f"{printable(format_source(of)) or 'no line'}"
                for at, of in enumerate(timeline.largest, 1)
            }
            yield _mark("peak of temporaries", begin, largest)
