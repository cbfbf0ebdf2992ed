"""The steps that are due, that are kept, and that are best: functions on integers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping


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
    """Return the steps from the best to the worst; of equal ones the newer is better.

    NaN is never best.
    """
    sign = -1 if is_highest else 1
    ranked = [(sign * value, -step) for step, value in values.items() if not math.isnan(value)]
    return [-step for _, step in sorted(ranked)]


def kept(
    steps: Collection[int], keep: int | None, keep_every: int | None, best: Collection[int]
) -> set[int]:
    """Return the steps to keep: the newest, the milestones and the best; all without ``keep``."""
    if keep is None:
        return {*steps}
    return {*sorted(steps)[-keep:], *best} | (
        milestones(steps, keep_every) if keep_every else set()
    )
