"""The time between checkpoints that loses least to saves, failures and restarts."""

from __future__ import annotations

import math
from typing import NamedTuple

from gda.layout.boundary import set_module


@set_module("gda")
class CheckpointInterval(NamedTuple):
    """A time between checkpoints; ``gda.Rehearsal.checkpoint_interval`` returns it.

    Attributes:
      seconds: of training between the end of a save and the begin of the next.
      calls: the calls of the rehearsed step in these seconds; None if their time is unknown.
      training_share: the part of all time that is left for training: the rest goes to saves,
        restarts, and training that a failure lost.

    >>> import gda
    >>> gda.CheckpointInterval(seconds=600.0, calls=1200, training_share=0.93).calls
    1200
    """

    seconds: float
    calls: int | None
    training_share: float


def interval_of(
    seconds_between_failures: float,
    save_seconds: float,
    restart_seconds: float,
    call_seconds: float | None,
) -> CheckpointInterval:
    """Return the interval that loses least, as ``Rehearsal.checkpoint_interval`` tells."""
    mean, save = seconds_between_failures, save_seconds
    for name, given in (("seconds_between_failures", mean), ("save_seconds", save)):
        if not 0 < given < math.inf:
            raise ValueError(f"{name} must be a number of seconds above 0, not {given!r:.80}")
    if not 0 <= restart_seconds < math.inf:
        raise ValueError(
            f"restart_seconds must be a number of seconds, 0 or more, not {restart_seconds!r:.80}"
        )
    seconds, part = mean, save / (2 * mean)
    if part < 1:  # else most intervals end in a failure
        young = math.sqrt(2 * save * mean)
        seconds = young * (1 + math.sqrt(part) / 3 + part / 9) - save
    calls = None
    if call_seconds:
        calls = max(1, round(seconds / call_seconds))
        seconds = calls * call_seconds
    # Daly's total time of a job, divided by the time that it trains.
    try:
        total = mean * math.exp(restart_seconds / mean) * math.expm1((seconds + save) / mean)
    except OverflowError:
        total = math.inf
    return CheckpointInterval(seconds, calls, seconds / total)
