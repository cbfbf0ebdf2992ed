"""The changes of a rehearsal against a golden file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gda.compiled.hlo import Collective, format_axes, format_size, summed
from gda.layout.text import format_mesh
from gda.storage.golden_files import check_golden

if TYPE_CHECKING:
    from gda.compiled.rehearsal import Rehearsal


def _bytes_by_kind(collectives: Iterable[Collective]) -> dict[tuple[str, str], int | None]:
    """Return the bytes on one device in one call, for each kind of collective and axes in words."""
    totals: dict[tuple[str, str], int | None] = {}
    for each in collectives:
        key = each.kind, format_axes(each.axes)
        totals[key] = summed((totals.get(key, 0), each.nbytes_total))
    return totals


def _format_change(before: float | None, after: float | None) -> str:
    """Return the change of a number in words; empty if it is equal or one is unknown."""
    if before is None or after is None or before == after:
        return ""
    return "new" if before == 0 else f"{after / before - 1:+.0%}" if after else "gone"


def check(rehearsal: Rehearsal, path: Path, tolerance: float) -> None:
    """Compare a rehearsal with a golden file, or write the file, as ``Rehearsal.check`` tells."""
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance must be a part of the bytes, such as 0.05, not {tolerance!r}")
    sums = None if rehearsal.collectives is None else _bytes_by_kind(rehearsal.collectives)
    document = {
        "device_kind": rehearsal.device_kind,
        "mesh": dict(rehearsal.mesh_shape),
        "fits": rehearsal.fits,
        "peak_bytes": rehearsal.peak_bytes,
        "collectives": None
        if sums is None
        else [
            {"kind": kind, "axes": axes, "nbytes": nbytes}
            for (kind, axes), nbytes in sorted(sums.items())
        ],
    }
    check_golden(rehearsal.name, document, path, partial(_differences, tolerance=tolerance))


def _differences(
    before: Mapping[str, Any], after: Mapping[str, Any], tolerance: float
) -> Iterator[str]:
    if before["device_kind"] != after["device_kind"]:
        yield f"the devices are {after['device_kind']}, not {before['device_kind']}"
    if before["mesh"] != after["mesh"]:
        yield f"the mesh is {format_mesh(after['mesh'])}, not {format_mesh(before['mesh'])}"
    if before["fits"] != after["fits"]:
        yield {
            True: "it fits now",
            False: "it does not fit any more",
            None: "the capacity of the devices is unknown now",
        }[after["fits"]]
    pairs = {"peak": (before["peak_bytes"], after["peak_bytes"])}
    if before["collectives"] is not None and after["collectives"] is not None:
        old, new = (
            {f"{each['kind']} over {each['axes']}": each["nbytes"] for each in some["collectives"]}
            for some in (before, after)
        )
        pairs |= {name: (old.get(name, 0), new.get(name, 0)) for name in {**old, **new}}
    for name, pair in pairs.items():
        if not _is_near(*pair, tolerance):
            change = f" ({words})" if (words := _format_change(*pair)) else ""
            yield f"{name}: {format_size(pair[0])} before, {format_size(pair[1])} now{change}"


def _is_near(before: int | None, after: int | None, tolerance: float) -> bool:
    if before and after:
        return abs(after - before) <= tolerance * before
    return before == after  # none, new, gone or unknown
