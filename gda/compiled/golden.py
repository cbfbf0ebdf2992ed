"""The golden files of rehearsals: the memory and communication that a function should have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gda.compiled.hlo import Collective, format_axes, format_size, summed
from gda.layout.text import format_mesh
from gda.storage.golden_files import check_golden


def bytes_by_kind(collectives: Iterable[Collective]) -> dict[tuple[str, str], int | None]:
    """Return the bytes on one device in one call, for each kind of collective and axes in words."""
    totals: dict[tuple[str, str], int | None] = {}
    for each in collectives:
        key = each.kind, format_axes(each.axes)
        totals[key] = summed((totals.get(key, 0), each.nbytes_total))
    return totals


def format_change(before: float | None, after: float | None) -> str:
    """Return the change of a number in words; empty if it is equal or one is unknown."""
    if before is None or after is None or before == after:
        return ""
    return "new" if before == 0 else f"{after / before - 1:+.0%}" if after else "gone"


def check(name: str, found: dict[str, Any], path: Path, tolerance: float) -> None:
    """Compare the document of the rehearsal of a function with a golden file, or write the file.

    ``Rehearsal.check`` describes it.
    """
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance must be a part of the bytes, such as 0.05, not {tolerance!r}")
    check_golden(name, found, path, partial(_differences, tolerance=tolerance))


def _differences(
    before: Mapping[str, Any], after: Mapping[str, Any], tolerance: float
) -> Iterator[str]:
    """Yield a line for each difference between two golden documents."""
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
    if not _is_near(before["peak_bytes"], after["peak_bytes"], tolerance):
        yield f"peak: {_sentence(before['peak_bytes'], after['peak_bytes'])}"
    if before["collectives"] is None or after["collectives"] is None:
        return  # a program that does not fit has none
    sums = [
        {(each["kind"], each["axes"]): each["nbytes"] for each in document["collectives"]}
        for document in (before, after)
    ]
    for kind, axes in {**sums[0], **sums[1]}:
        old, new = (each.get((kind, axes), 0) for each in sums)
        if (kind, axes) not in sums[1]:
            yield f"{kind} over {axes} is gone: {format_size(old)}"
        elif (kind, axes) not in sums[0]:
            yield f"{kind} over {axes} is new: {format_size(new)}"
        elif not _is_near(old, new, tolerance):
            yield f"{kind} over {axes}: {_sentence(old, new)}"


def _is_near(before: int | None, after: int | None, tolerance: float) -> bool:
    if before is None or after is None:
        return before == after
    return abs(after - before) <= tolerance * before


def _sentence(before: int | None, after: int | None) -> str:
    change = f" ({words})" if (words := format_change(before, after)) else ""
    return f"{format_size(before)} before, {format_size(after)} now{change}"
