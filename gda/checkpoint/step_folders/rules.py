"""The rules by which a run saves and keeps steps: functions on integers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gda.storage.options import check_count

Keep = int | Callable[[list[int]], Iterable[int]] | None


class Rules(NamedTuple):
    """The rules of one run for the steps to keep; ``Run`` has their meaning."""

    keep: Keep = None
    every: int | None = None
    num_best: int = 0
    best: tuple[str, bool] | None = None  # the metric, and True if the highest is best

    @classmethod
    def of(cls, keep: Keep, keep_every: int | None, keep_best: Any) -> Rules:
        """Return the rules as their user gives them; ``ValueError`` if they are wrong."""
        if keep is not None and not callable(keep):
            check_count(keep, "keep")
        if keep_every is not None:
            check_count(keep_every, "keep_every")
        if keep_best is None:
            return cls(keep, keep_every)
        parts = [*keep_best] if isinstance(keep_best, tuple | list) else []
        count, metric, best = [*parts, "min"][:3] if 2 <= len(parts) <= 3 else (0, None, None)
        if not isinstance(metric, str) or best not in ("min", "max"):
            raise ValueError(
                "keep_best must be a number of steps and a metric, such as (2, 'loss'), or "
                f"(2, 'accuracy', 'max') if the highest is best, not {keep_best!r}"
            )
        check_count(count, "the number of keep_best")
        return cls(keep, keep_every, operator.index(count), (metric, best == "max"))

    def is_milestone(self, step: int, before: int | None) -> bool:
        """Return True if ``keep_every`` keeps a step after the one before."""
        return self.every is not None and is_due(step, before or 0, self.every)

    @property
    def ranks(self) -> bool:
        """True if the best steps are kept beside others, so that their metrics are needed."""
        return self.best is not None and self.keep is not None and not callable(self.keep)

    def kept(self, steps: Collection[int], ranked: Sequence[int] = ()) -> set[int]:
        """Return the steps to keep, always with the newest; ``ranked`` begins with the best."""
        ascending = sorted(steps)
        if callable(self.keep):
            chosen = {*self.keep(ascending)}.intersection(ascending)
        elif self.keep is None:
            chosen = {*ascending}
        else:
            chosen = {*ascending[-self.keep :], *ranked[: self.num_best]}
            if self.every is not None:
                chosen |= milestones(ascending, self.every)
        return {*chosen, *ascending[-1:]}


def is_due(step: int, previous: int, every: int) -> bool:
    """Return True if a multiple of ``every`` lies after the previous step, up to this one.

    So a loop whose steps jump saves too, and a restart does not shift the steps that are saved.
    """
    return step // every > previous // every


def milestones(steps: Collection[int], every: int) -> set[int]:
    """Return the first step at or after each multiple of ``every``; 0 is no such multiple."""
    found, previous = set(), 0
    for step in sorted(steps):
        if is_due(step, previous, every):
            found.add(step)
        previous = step
    return found


def best_first(values: Mapping[int, float], *, is_highest: bool) -> list[int]:
    """Return the steps from the best to the worst: the newer of equal ones, and NaN never best."""
    sign = -1 if is_highest else 1
    ranked = [(sign * value, -step) for step, value in values.items() if not math.isnan(value)]
    return [-step for _, step in sorted(ranked)]
