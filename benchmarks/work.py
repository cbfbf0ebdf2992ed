"""A line of the table: a work, who does it, and what gda must reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.pairs import Side


@dataclass(frozen=True)
class Faster:
    """gda must be at least so many times faster than the rival."""

    times: float

    def is_reached(self, ours: float, rival: float) -> bool:
        return rival >= ours * self.times

    def __str__(self) -> str:
        return f"{self.times:,g} times faster"


@dataclass(frozen=True)
class AtMost:
    """gda may take at most this share of the rival's time."""

    share: float

    def is_reached(self, ours: float, rival: float) -> bool:
        return ours <= rival * self.share

    def __str__(self) -> str:
        return f"{self.share:g} of its time at most"


@dataclass(frozen=True)
class Within:
    """gda may take at most so long here, whatever others take."""

    milliseconds: float

    def is_reached(self, ours: float, rival: float) -> bool:
        return ours <= self.milliseconds / 1e3

    def __str__(self) -> str:
        return f"{self.milliseconds:g} ms at most"


@dataclass(frozen=True)
class WithinMiB:
    """gda may hold at most so much memory, whatever others hold."""

    mebibytes: float

    def is_reached(self, ours: float, rival: float) -> bool:
        return ours <= self.mebibytes

    def __str__(self) -> str:
        return f"{self.mebibytes:g} MiB at most"


@dataclass(frozen=True)
class Work:
    """Something to do, by gda and by a rival.

    Attributes:
      name: what is done; together with ``rival`` unique.
      prepare: makes the sides, gda's first, and checks that they agree. Called in a process that
        has ``devices`` virtual devices. Works with one ``prepare`` are measured together.
      rival: how the second side does it; empty where there is none.
      target: what gda must reach; ``None`` for a figure that informs.
      ours: how the first side does it, where that is not simply gda.
      rounds: how often each side is timed.
      against: which of the sides the rival is.
      unit: of what is measured, "s" or "MiB".
    """

    name: str
    prepare: Callable[[], Sequence[Side]]
    rival: str = ""
    target: Faster | AtMost | Within | WithinMiB | None = None
    ours: str = "gda"
    devices: int = 8
    rounds: int = 100
    against: int = 1
    unit: str = "s"

    @property
    def key(self) -> str:
        return f"{self.name}; against {self.rival}" if self.rival else self.name
