"""Times two ways of doing the same work in turns, so that the noise of a machine hits both.

Round by round each side runs once, and the side that goes first alternates: what the first leaves
in the processor's caches is then no one's luck. The figure to look at is the ratio of medians.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


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


def measure(sides: Sequence[Side], rounds: int) -> list[list[float]]:
    """Return for every side its seconds per call, one for every round.

    A round before the first compiles and fills what is meant to be warm. The garbage collector
    rests throughout: it would fall on the side that happens to make the next object.
    """
    seconds: list[list[float]] = [[] for _ in sides]
    order = list(range(len(sides)))
    gc.collect()
    gc.disable()
    try:
        for side in sides:
            _time_once(side)
        for _ in range(rounds):
            for i in order:
                seconds[i].append(_time_once(sides[i]))
            order.reverse()
    finally:
        gc.enable()
    return seconds


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
