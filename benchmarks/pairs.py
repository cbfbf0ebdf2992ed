"""Times several ways of doing the same work in turns, so that the noise of a machine hits all.

Round by round each side runs once, and the order alternates: what the first leaves in the
processor's caches is then an advantage of no side. The figure to look at is the ratio of medians.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

LEAST_ROUNDS, MOST_ROUNDS = 5, 300
SETTLED = 0.02  # of the ratio of two medians


def _forget(result: object) -> None:
    del result


@dataclass(frozen=True)
class Side:
    """One way of doing a work.

    Attributes:
      run: does it; only this is timed.
      fresh: makes the arguments of one ``run``, so that no run finds what another left in a cache.
      done: what happens to the result, such as freeing memory of devices.
      calls: how often one ``run`` does the work; the time is divided by it.
      times_itself: ``run`` returns the seconds it took, as work in another process must.
    """

    run: Callable[..., Any]
    fresh: Callable[[], tuple[Any, ...]] = tuple
    done: Callable[[Any], object] = _forget
    calls: int = 1
    times_itself: bool = False


def measure(
    sides: Sequence[Side],
    seconds: float,
    least: int = LEAST_ROUNDS,
    most: int = MOST_ROUNDS,
    until: float = math.inf,
) -> list[list[float]]:
    """Return for every side its seconds per call, one for every round.

    There are at least ``least`` rounds, and no more than needed to settle the ratio of each median
    to the first, or than ``most``, or than fit into ``seconds``. None but the first begins after
    ``until``, a time of ``time.monotonic``.

    A round before the first compiles and fills what is meant to be warm. The garbage collector
    rests throughout: it would fall on the side that happens to make the next object.
    """
    samples: list[list[float]] = [[] for _ in sides]
    order = list(range(len(sides)))
    gc.collect()
    gc.disable()
    try:
        for side in sides:
            _time_once(side)
        end = time.perf_counter() + seconds
        for rounds in range(1, most + 1):
            for i in order:
                samples[i].append(_time_once(sides[i]))
            order.reverse()
            is_over = time.perf_counter() > end or (rounds % 10 == 0 and _is_settled(samples))
            if (rounds >= least and is_over) or time.monotonic() > until:
                break
    finally:
        gc.enable()
    return samples


def _is_settled(samples: Sequence[Sequence[float]]) -> bool:
    first, *others = map(_uncertainty, samples)
    return first + max(others, default=0) <= SETTLED


def _uncertainty(samples: Sequence[float]) -> float:
    """Return half of the 95 % confidence interval of the median, as a share of the median."""
    ordered = sorted(samples)
    outside = int(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered)))
    return (ordered[-1 - outside] - ordered[outside]) / 2 / median(ordered)


def _time_once(side: Side) -> float:
    run = side.run
    arguments = side.fresh()
    start = time.perf_counter_ns()
    result = run(*arguments)
    stop = time.perf_counter_ns()
    if side.times_itself:
        return result / side.calls
    side.done(result)
    return (stop - start) / 1e9 / side.calls
