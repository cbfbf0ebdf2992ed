"""Two rehearsals side by side: ``gda.compare_rehearsals``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gda.compiled.changes import bytes_by_kind, format_change
from gda.compiled.hlo import format_axes, format_size, summed
from gda.compiled.rehearsal import Rehearsal
from gda.compiled.report.rehearsal_text import format_seconds, headline_of
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
_SECONDS = {"estimate": "takes about", "bound": "takes at least"}
_IN_ALL, _SLOW = "in all over", "over slow links"


@set_module("gda")
@dataclass(frozen=True, repr=False)
class RehearsalComparison:
    """Two rehearsals side by side; ``gda.compare_rehearsals`` makes it, ``print`` shows a table.

    Attributes:
      before, after: the rehearsals.
      changes: for each number that differs, its name with both values: bytes, floating-point
        operations, seconds, and bytes of communication by kind and axes, by axes, and over slow
        links. A value is None if it is unknown.

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
        pair = self.before, self.after
        numbers = [_numbers(each) for each in pair]
        # A program that the compiler does not write has unknown communication.
        absent = [None if each.collectives is None else 0 for each in pair]
        names = numbers[0] | numbers[1]
        for name in sorted(names, key=lambda name: (name == _SLOW, _IN_ALL in name)):
            yield name, (numbers[0].get(name, absent[0]), numbers[1].get(name, absent[1]))

    def __repr__(self) -> str:
        rows = [["per device", "before", "after", "change"]]
        for name, pair in self._rows():
            words = [_words(name, number) for number in pair]
            rows.append([(_BYTES | _SECONDS).get(name, name), *words, format_change(*pair)])
        lines = table(rows, right={"before", "after", "change"})
        first = f"before: {headline_of(self.before)}", f"after:  {headline_of(self.after)}"
        return "\n".join([*first, "", *lines])


def _numbers(rehearsal: Rehearsal) -> dict[str, float | None]:
    """Return the numbers to compare by name; those of the communication only if it is known."""
    numbers = {name: getattr(rehearsal, name) for name in (*_BYTES, "flops")}
    if rehearsal.seconds.estimate is not None:
        numbers |= {name: getattr(rehearsal.seconds, name) for name in _SECONDS}
    if rehearsal.collectives is None:
        return numbers
    by_kind = bytes_by_kind(rehearsal.collectives)
    numbers |= {f"{kind} over {axes}": nbytes for (kind, axes), nbytes in by_kind.items()}
    traffic = rehearsal.traffic
    numbers |= {f"{_IN_ALL} {format_axes(each.axes)}": each.nbytes for each in traffic}
    if any(each.nbytes_slow is not None for each in traffic):
        numbers[_SLOW] = summed(each.nbytes_slow for each in traffic)
    return numbers


def _words(name: str, number: float | None) -> str:
    if name == "flops" and number is not None:
        return f"{number:.3g}"
    if name in _SECONDS:
        return format_seconds(number)
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
