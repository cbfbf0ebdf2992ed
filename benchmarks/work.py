"""A line of the table: a work, the ways of doing it, and what gda must reach."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

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
class OfSpeed:
    """gda must reach this share of the speed of the other way."""

    share: float

    def is_reached(self, ours: float, rival: float) -> bool:
        return rival >= ours * self.share

    def __str__(self) -> str:
        return f"{self.share:g} of its speed"


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
class Growth:
    """gda may take at most so many times the time that it takes for less of the same."""

    times: float

    def is_reached(self, ours: float, rival: float) -> bool:
        return ours <= rival * self.times

    def __str__(self) -> str:
        return f"{self.times:g} times its time at most"


Target = Faster | AtMost | OfSpeed | Growth


@dataclass(frozen=True)
class Floor:
    """The quickest of the rivals and of some plain ways, measured in the same rounds.

    A target that the floor itself misses is replaced by a share of the floor's speed.

    Attributes:
      reason: a sentence that says what takes the time.
      ways: the sides that do less than the work, as plainly as a program can.
      share: of the speed of the floor, which gda must reach.
    """

    reason: str
    ways: tuple[str, ...] = ()
    share: float = 0.8


@dataclass(frozen=True, eq=False)
class Work:
    """Something to do, by gda and by rivals.

    Attributes:
      name: of the work; unique.
      prepare: makes the sides, gda's first and then one for each rival, and checks that they agree.
        Called in a process that has ``devices`` virtual devices, to which it is sent: a function
        of a module, or a ``partial`` of one.
      rivals: the name of each other side, and what gda must reach in comparison; ``None`` for a
        figure that informs.
      limit: what gda must keep to, whatever the rivals take.
      ours: how the first side does it, where that is not simply gda.
      floor: what may replace targets.
      raw: the side that reads or writes the same bytes and does nothing else. The times of all
        sides depend on the disk, so a table shows gda's as a share of its speed.
      seconds: how long to measure at most, after the least number of rounds.
      unit: of what is measured, "s" or "MiB".
      needs: a package without which it is not measured.
      nbytes: the bytes that it moves or reads, for a speed beside its time; 0 if there is none.
    """

    name: str
    prepare: Callable[[], Sequence[Side]]
    rivals: Mapping[str, Target | None] = field(default_factory=dict)
    limit: Within | WithinMiB | None = None
    ours: str = "gda"
    devices: int = 8
    floor: Floor | None = None
    raw: str = ""
    seconds: float = 1
    unit: str = "s"
    needs: str = ""
    nbytes: int = 0

    @property
    def can_be_measured(self) -> bool:
        return not self.needs or find_spec(self.needs) is not None

    @property
    def ways(self) -> list[str]:
        return [self.ours, *self.rivals]
