"""Two rehearsals side by side, and one against a golden file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gda.compiled.rehearsal import Rehearsal, by_kind
from gda.layout.boundary import public, set_module
from gda.layout.tables import table
from gda.layout.text import format_bytes, format_mesh

_BYTES = (
    "peak_bytes",
    "argument_bytes",
    "output_bytes",
    "temporary_bytes",
    "aliased_bytes",
    "undonated_bytes",
)
_VERSION = 1


@set_module("gda")
@dataclass(frozen=True, repr=False)
class RehearsalComparison:
    """Two rehearsals side by side; ``gda.compare_rehearsals`` makes it, ``print`` shows a table.

    Attributes:
      before, after: the rehearsals.
      changes: for each number of bytes that differs, its name with both values; of the
        communication, by kind and axes. A value is None if it is unknown.

    >>> import gda, jax, numpy as np
    >>> before = gda.rehearse(lambda x: x + 1, jax.ShapeDtypeStruct((8,), np.float32))
    >>> after = gda.rehearse(lambda x: x + 1, jax.ShapeDtypeStruct((16,), np.float32))
    >>> gda.compare_rehearsals(before, after).changes['argument_bytes']
    (32, 64)
    """

    before: Rehearsal
    after: Rehearsal

    @property
    def changes(self) -> dict[str, tuple[int | None, int | None]]:
        return {name: pair for name, pair in self._rows() if pair[0] != pair[1]}

    def _rows(self) -> Iterator[tuple[str, tuple[int | None, int | None]]]:
        for name in _BYTES:
            yield name, (getattr(self.before, name), getattr(self.after, name))
        kinds = [by_kind(each.to_dict()) for each in (self.before, self.after)]
        for kind, axes in {**kinds[0], **kinds[1]}:
            before, after = (each.get((kind, axes), 0) for each in kinds)
            yield f"{kind} over {axes}", (before, after)

    def __repr__(self) -> str:
        rows = [["per device", "before", "after", "change"]]
        for name, (before, after) in self._rows():
            label = name.removesuffix("_bytes")
            rows.append([label, _size(before), _size(after), _change(before, after)])
        answers = {True: "fits", False: "does not fit", None: "unknown"}
        rows.append(["fits", answers[self.before.fits], answers[self.after.fits], ""])
        return "\n".join(table(rows, right={"before", "after", "change"}))


@set_module("gda")
@public
def compare_rehearsals(before: Rehearsal, after: Rehearsal) -> RehearsalComparison:
    """Return two rehearsals side by side, such as those before and after a change of specs.

    Raises:
      TypeError: an argument is no ``Rehearsal``.

    >>> import gda, jax, numpy as np
    >>> before = gda.rehearse(lambda x: x + 1, jax.ShapeDtypeStruct((8,), np.float32))
    >>> len(gda.compare_rehearsals(before, before).changes)
    0
    """
    for name, given in (("before", before), ("after", after)):
        if not isinstance(given, Rehearsal):
            raise TypeError(f"{name} must be the result of gda.rehearse, not {given!r:.80}")
    return RehearsalComparison(before, after)


def _change(before: int | None, after: int | None) -> str:
    if before is None or after is None or before == after:
        return ""
    return "new" if before == 0 else f"{after / before - 1:+.0%}" if after else "gone"


def _size(nbytes: int | None) -> str:
    return "?" if nbytes is None else format_bytes(nbytes)


# Golden files.


def check(rehearsal: Rehearsal, path: Path, tolerance: float) -> None:
    """Compare a rehearsal with a golden file, or write it; see ``Rehearsal.check``."""
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance must be a part of the bytes, such as 0.05, not {tolerance!r}")
    if os.environ.get("GDA_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_golden(rehearsal), indent=1) + "\n")
        return
    try:
        golden = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise FileNotFoundError(
            error.errno, "there is no golden file; write it with pytest --update-golden", str(path)
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is no golden file: {error}") from None
    if not isinstance(golden, dict) or golden.get("version") != _VERSION:
        raise ValueError(f'{path} is no golden file: it has no "version": {_VERSION}')
    try:
        differences = [*_differences(golden, _golden(rehearsal), tolerance)]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no golden file: it is damaged ({error!r})") from None
    if differences:
        raise AssertionError(
            "\n".join(
                [
                    f"{rehearsal.name} differs from {path}:",
                    *(f"  {line}" for line in differences),
                    "if this is intended, write the file again with pytest --update-golden",
                ]
            )
        )


def _golden(rehearsal: Rehearsal) -> dict[str, Any]:
    bytes_of = by_kind(rehearsal.to_dict())
    return {
        "version": _VERSION,
        "device_kind": rehearsal.device_kind,
        "mesh": rehearsal.mesh_shape,
        "fits": rehearsal.fits,
        "peak_bytes": rehearsal.peak_bytes,
        "collectives": [
            {"kind": kind, "axes": axes, "nbytes": nbytes}
            for (kind, axes), nbytes in sorted(bytes_of.items())
        ],
    }


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
    sums = [
        {(each["kind"], each["axes"]): each["nbytes"] for each in document["collectives"]}
        for document in (before, after)
    ]
    for kind, axes in {**sums[0], **sums[1]}:
        old, new = (each.get((kind, axes), 0) for each in sums)
        if (kind, axes) not in sums[1]:
            yield f"{kind} over {axes} is gone: {_size(old)}"
        elif (kind, axes) not in sums[0]:
            yield f"{kind} over {axes} is new: {_size(new)}"
        elif not _is_near(old, new, tolerance):
            yield f"{kind} over {axes}: {_sentence(old, new)}"


def _is_near(before: int | None, after: int | None, tolerance: float) -> bool:
    if before is None or after is None:
        return before == after
    return abs(after - before) <= tolerance * before


def _sentence(before: int | None, after: int | None) -> str:
    change = _change(before, after)
    return f"{_size(before)} before, {_size(after)} now" + (f" ({change})" if change else "")
