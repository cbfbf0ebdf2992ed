"""The changes of a rehearsal against a golden file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gda.compiled.hlo import format_axes, format_size, summed
from gda.compiled.rehearsal_facts import RehearsalFacts
from gda.storage.golden_files import check_golden

_ACCEPTED = 0.05  # of the bytes in the file: versions of XLA differ in temporaries


def check(rehearsal: RehearsalFacts, path: Path) -> None:
    """Compare a rehearsal with a golden file, or write the file, as ``Rehearsal.check`` tells."""
    sent: dict[str, int | None] = {}
    for each in rehearsal.collectives or ():
        name = f"{each.kind} over {format_axes(each.axes)}"
        sent[name] = summed((sent.get(name, 0), each.nbytes_total))
    document = {
        "device_kind": rehearsal.device_kind,
        "mesh": dict(rehearsal.mesh_shape),
        "fits": rehearsal.fits,
        "peak_bytes": rehearsal.peak_bytes,
        "collectives": None if rehearsal.collectives is None else dict(sorted(sent.items())),
    }
    check_golden(rehearsal.name, document, path, _differences)


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for key in ("device_kind", "mesh", "fits"):
        if before[key] != after[key]:
            yield f"{key}: {before[key]} before, {after[key]} now"
    pairs = {"peak": (before["peak_bytes"], after["peak_bytes"])}
    old, new = before["collectives"], after["collectives"]
    if old is not None and new is not None:
        pairs |= {name: (old.get(name, 0), new.get(name, 0)) for name in {**old, **new}}
    for name, pair in pairs.items():
        if not _is_near(*pair):
            yield f"{name}: {format_size(pair[0])} before, {format_size(pair[1])} now"


def _is_near(before: int | None, after: int | None) -> bool:
    if before and after:
        return abs(after - before) <= _ACCEPTED * before
    return before == after  # zero or unknown
