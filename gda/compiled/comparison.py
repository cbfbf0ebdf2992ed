"""Two rehearsals side by side: ``gda.compare_rehearsals``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from gda.compiled.changes import bytes_by_kind, format_change
from gda.compiled.hlo import format_axes, format_size, summed
from gda.compiled.rehearsal import Rehearsal
from gda.compiled.report.rehearsal_text import headline_of
from gda.layout.boundary import public, set_module
from gda.layout.tables import table

_BYTES = {
    "peak_bytes": "peak",
    "argument_bytes": "arguments",
    "output_bytes": "outputs",
    "temporary_bytes": "temporaries",
    "aliased_bytes": "outputs in donated arguments",
    "undonated_bytes": "arguments that could be donated",
}


@set_module("gda")
@dataclass(frozen=True, repr=False)
class RehearsalComparison:
    """Two rehearsals side by side; ``gda.compare_rehearsals`` makes it, ``print`` shows a table.

    Attributes:
      before, after: the rehearsals.
      changes: for each number that differs, its name with both values: bytes, floating-point
        operations, and bytes of communication by kind and axes, by axes, and over slow links. A
        value is None if it is unknown.

    >>> import gda, jax, numpy as np
    >>> before = gda.rehearse(lambda x: x + 1, jax.ShapeDtypeStruct((8,), np.float32))
    >>> after = gda.rehearse(lambda x: x + 1, jax.ShapeDtypeStruct((16,), np.float32))
    >>> gda.compare_rehearsals(before, after).changes['argument_bytes']
    (32, 64)
    """

    before: Rehearsal
    after: Rehearsal

    @property
    def changes(self) -> dict[str, tuple[float | None, float | None]]:
        return {name: pair for name, pair in self._rows() if pair[0] != pair[1]}

    def _rows(self) -> Iterator[tuple[str, tuple[float | None, float | None]]]:
        both = self.before, self.after
        for name in (*_BYTES, "flops"):
            yield name, (getattr(self.before, name), getattr(self.after, name))
        yield from _pairs(map(_by_kind, both))
        yield from _pairs(map(_by_axes, both))
        yield from _pairs(map(_over_slow_links, both))

    def __repr__(self) -> str:
        rows = [["per device", "before", "after", "change"]]
        for name, (before, after) in self._rows():
            numbers = (_words(name, number) for number in (before, after))
            rows.append([_BYTES.get(name, name), *numbers, format_change(before, after)])
        lines = table(rows, right={"before", "after", "change"})
        first = f"before: {headline_of(self.before)}", f"after:  {headline_of(self.after)}"
        return "\n".join([*first, "", *lines])


def _pairs(
    totals: Iterable[Mapping[str, int | None] | None],
) -> Iterator[tuple[str, tuple[int | None, int | None]]]:
    """Yield the two totals of each name; an absent one is 0, and None if all are unknown."""
    before, after = totals
    for name in {**(before or {}), **(after or {})}:
        first, second = (None if each is None else each.get(name, 0) for each in (before, after))
        yield name, (first, second)


def _by_kind(rehearsal: Rehearsal) -> dict[str, int | None] | None:
    if rehearsal.collectives is None:
        return None
    sums = bytes_by_kind(rehearsal.collectives)
    return {f"{kind} over {axes}": nbytes for (kind, axes), nbytes in sums.items()}


def _by_axes(rehearsal: Rehearsal) -> dict[str, int | None] | None:
    if rehearsal.collectives is None:
        return None
    return {f"in all over {format_axes(each.axes)}": each.nbytes for each in rehearsal.traffic}


def _over_slow_links(rehearsal: Rehearsal) -> dict[str, int | None] | None:
    if rehearsal.collectives is None:
        return None
    has_slow = any(each.nbytes_slow is not None for each in rehearsal.traffic)
    nbytes = summed(each.nbytes_slow for each in rehearsal.traffic)
    return {"over slow links": nbytes} if has_slow else {}


def _words(name: str, number: float | None) -> str:
    if name == "flops" and number is not None:
        return f"{number:.3g}"
    return format_size(None if number is None else int(number))


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
