"""Two rehearsals side by side: ``gda.compare_rehearsals``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gda.compiled.golden import bytes_by_kind, format_change
from gda.compiled.hlo import format_size
from gda.compiled.rehearsal import Rehearsal
from gda.layout.boundary import public, set_module
from gda.layout.tables import table

_BYTES = {
    "peak_bytes": "peak",
    "argument_bytes": "arguments",
    "output_bytes": "outputs",
    "temporary_bytes": "temporaries",
    "aliased_bytes": "outputs in donated arguments",
    "undonated_bytes": "arguments not donated",
}


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
        found = [each.collectives for each in (self.before, self.after)]
        kinds = [bytes_by_kind(each or ()) for each in found]
        # The communication of a program that does not fit is unknown.
        absent = [None if each is None else 0 for each in found]
        for kind, axes in {**kinds[0], **kinds[1]}:
            before, after = (
                each.get((kind, axes), zero) for each, zero in zip(kinds, absent, strict=True)
            )
            yield f"{kind} over {axes}", (before, after)

    def __repr__(self) -> str:
        rows = [["per device", "before", "after", "change"]]
        for name, (before, after) in self._rows():
            label = _BYTES.get(name, name)
            rows.append(
                [label, format_size(before), format_size(after), format_change(before, after)]
            )
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
