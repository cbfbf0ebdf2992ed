"""The clock of one device: when each step of a schedule begins and ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from gda.compiled.collective_times import Interconnect, collective_seconds
from gda.compiled.devices.device_speeds import DeviceSpeeds
from gda.compiled.hlo import Step, executions, format_axes, format_source
from gda.compiled.hlo.allocations import Temporary
from gda.compiled.hlo.live_ranges import LiveRanges
from gda.layout.boundary import set_module

_SMALL = 4096  # bytes: a TPU has scalars and the like in registers


@dataclass(frozen=True)
class Rates:
    """The time of each step by itself; ``links`` are None for a program of one device."""

    speeds: DeviceSpeeds
    bandwidth: float
    cache_bytes: int
    links: Interconnect | None

    def least_compute(self, step: Step) -> float:
        return sum(
            (each.flops or 0) / self.speeds.flops_of(each.dtype, each.precision)
            for each in step.products
        )

    def least_memory(self, step: Step) -> float:
        """Return the time for bytes that surely come from memory, and not from a cache."""
        if any(each.kernel for each in step.products):
            return 0.0
        return sum(max(0, each - self.cache_bytes) for each in step.arrays) / self.bandwidth

    def least_on(self, step: Step, axes: tuple[str, ...] | None) -> float:
        """Return the least time of a collective over these axes; 0 for other steps."""
        found = step.collective
        if self.links is None or found is None or found.axes != axes:
            return 0.0
        return collective_seconds(found, self.links).bound

    def alone(self, step: Step) -> float:
        """Return the estimate of a step: of a kernel, the longer of its products and its bytes."""
        if step.collective is not None:
            return 0.0 if self.links is None else collective_seconds(step.collective, self.links)[1]
        if not step.arrays and not step.products:
            return 0.0
        is_launched = self.speeds.clock_hz is None or sum(step.arrays) > _SMALL
        computes = self.computes(step), self.moves(step)
        return max(computes) + (self.speeds.kernel_seconds if is_launched else 0)

    def computes(self, step: Step) -> float:
        """Return the estimate for the products of a step."""
        if step.cycles is not None and self.speeds.clock_hz:
            return max(self.least_compute(step), step.cycles / self.speeds.clock_hz)
        parts, is_one = self.speeds.measured, self.links is None or len(self.links.hosts) < 2
        of_kernels = step._replace(
            products=tuple(each for each in step.products if each.is_attention or each.kernel)
        )
        least, kernels = self.least_compute(step), self.least_compute(of_kernels)
        seconds = (least - kernels) / parts.products + kernels / parts.kernels
        return seconds / (1.0 if is_one else parts.on_several)

    def moves(self, step: Step) -> float:
        """Return the estimate for the bytes that a step reads and writes."""
        return sum(step.arrays) / self.bandwidth / self.speeds.measured.memory

    def resource(self, step: Step) -> object:
        """Return the name of the links that an asynchronous step takes for itself."""
        if step.collective is None:
            return "copies"
        # Each axis of a torus has links of its own.
        is_torus = self.links is not None and self.links.torus is not None
        return step.collective.axes if is_torus else "links"


@set_module("gda")
class TimelineEvent(NamedTuple):
    """A part of the estimated time of a call; ``gda.Timeline`` has them.

    Attributes:
      track: ``"compute"``, ``"memory"``, ``"copies"``, ``"waits"``, ``"loops"`` or the mesh axes
        of a collective.
      name: the line of the user's code, or the place in the trace.
      begin, seconds: in the call, with one turn of each loop.
      takes: the seconds with all turns.
      opcode: XLA's operation.
      times: the turns of a loop; None if they are unknown.
      nbytes: bytes of arrays that it accesses or sends.
      flops: operations of its products.
      live_bytes: of the temporaries that the device holds; None where they do not change.

    >>> import gda
    >>> gda.TimelineEvent('loops', 'model.py:7', 0.0, seconds=1e-3, takes=32e-3, times=32).times
    32
    """

    track: str
    name: str
    begin: float
    seconds: float
    takes: float
    opcode: str = ""
    times: int | None = 1
    nbytes: int = 0
    flops: float = 0.0
    live_bytes: int | None = None


@set_module("gda")
class Timeline(NamedTuple):
    """The events of a call in their order, and the largest temporaries at the peak.

    ``gda.Rehearsal.save_trace`` draws it.

    >>> import gda
    >>> gda.Timeline().events
    ()
    """

    events: tuple[TimelineEvent, ...] = ()
    largest: tuple[Temporary, ...] = ()


class TimedStep(NamedTuple):
    """A step that runs, inside of the loops of these names; of a loop all turns."""

    step: Step
    begin: float
    end: float
    inside: tuple[str, ...]


class Clock:
    """The time at which a device reaches a place of its schedule.

    ``runs`` has the steps so far, of each loop those of the first turn, and ``folds`` the times of
    the other turns.
    """

    def __init__(self, rates: Rates) -> None:
        self.rates, self.now = rates, 0.0
        self.free: dict[object, float] = defaultdict(float)
        self.ends: dict[object, float] = {}
        self.begun: dict[str, Step] = {}
        self.runs: list[TimedStep] = []
        self.folds: list[tuple[float, float]] = []
        self.inside: tuple[str, ...] = ()

    def run(self, steps: Iterable[Step]) -> None:
        for step in steps:
            begin = self.now
            if step.ends:
                self.now = max(self.now, self.ends.get(step.ends, 0.0))
                if (of := self.begun.get(step.ends)) is not None:
                    step = of._replace(name=step.name, ends=step.ends)
            elif step.begins:
                self._begin(step)
                continue
            elif step.is_branch:
                self._run_longest(step)
            elif step.bodies:
                self._repeat(step)
                continue
            elif step.collective is not None:
                of, waits = self.rates.resource(step), step._replace(ends=step.name)
                begin = max(self.now, self.free[of])  # when others have left its links
                self.runs.append(TimedStep(waits, self.now, begin, self.inside))
                self.now = self.free[of] = begin + self.rates.alone(step)
            else:
                self.now += self.rates.alone(step)
            self.runs.append(TimedStep(step, begin, self.now, self.inside))

    def _begin(self, step: Step) -> None:
        seconds = self.rates.alone(step)
        inner = [run.step for body in step.bodies for run in executions(body)]
        collectives = [each for each in inner if each.collective is not None]
        of = self.rates.resource(collectives[0] if collectives else step)
        seconds += sum(map(self.rates.alone, inner))
        begin = max(self.now, self.free[of])
        self.ends[step.begins] = self.free[of] = begin + seconds
        one = next(iter(collectives), step)._replace(begins=step.begins)
        self.begun[step.begins] = one
        self.runs.append(TimedStep(one, begin, begin + seconds, self.inside))

    def _repeat(self, step: Step) -> None:
        """Run a body once, and add the time of a second run for each of the others."""
        (body, *_) = step.bodies
        times = 1 if step.times is None else step.times
        begin, inside = self.now, self.inside
        if times > 0:
            self.inside = (*inside, step.name)
            self.run(body)
            self.inside = inside
        if times > 1:
            begun, seen = self.now, (len(self.runs), len(self.folds))
            ends, free = dict(self.ends), dict(self.free)
            self.run(body)
            del self.runs[seen[0] :], self.folds[seen[1] :]
            rest = (times - 2) * (self.now - begun)
            self.now += rest
            # Those that began before the loop end when they would without it.
            for before, after in ((ends, self.ends), (free, self.free)):
                for name in [name for name, end in after.items() if end != before.get(name)]:
                    after[name] += rest
            self.folds.append((begun, self.now))
        self.runs.append(TimedStep(step, begin, self.now, inside))

    def _run_longest(self, step: Step) -> None:
        clocks = []
        for body in step.bodies:
            clock = Clock(self.rates)
            clock.now, clock.ends, clock.inside = self.now, dict(self.ends), self.inside
            clock.free.update(self.free)
            clock.begun = self.begun
            clock.run(body)
            clocks.append(clock)
        longest = max(clocks, key=lambda clock: clock.now)
        self.now, self.free, self.ends = longest.now, longest.free, longest.ends
        self.runs += longest.runs
        self.folds += longest.folds


def timeline_of(clock: Clock, ranges: LiveRanges) -> Timeline:
    """Return the events of a clock that has run, each loop folded to one turn."""
    events: list[TimelineEvent] = []
    most, peak, before = 0, TimedStep(Step(), 0, 0, ()), None

    def folded(time: float) -> float:
        return time - sum(max(0.0, min(time, end) - begin) for begin, end in clock.folds)

    for run in sorted(clock.runs, key=lambda run: (run.begin, -run.end)):
        names = *run.inside, run.step.name
        live = ranges.nbytes_at(names)
        if live > most:
            most, peak = live, run
        name, begin = format_source(run.step) or run.step.name, folded(run.begin)
        opcode = run.step.collective.kind if run.step.collective else run.step.opcode
        for track, alone, work in _tracks(run, clock.rates):
            takes, seconds = run.end - run.begin, folded(run.end) - begin
            takes, seconds = (takes, seconds) if alone is None else (alone, alone)
            event = TimelineEvent(track, name, begin, seconds, takes, opcode, **work)
            events.append(event._replace(live_bytes=live if live != before else None))
            before = live
    return Timeline(tuple(events), tuple(ranges.largest_at((*peak.inside, peak.step.name))))


def _tracks(run: TimedStep, rates: Rates) -> Iterator[tuple[str, float | None, dict[str, Any]]]:
    """Yield the tracks that a step is on, with its work, and its seconds if it may have less."""
    step, nbytes = run.step, sum(run.step.arrays)
    if step.ends:
        yield from [("waits", None, {})] if run.end > run.begin else []
    elif step.collective is not None:
        axes = format_axes(step.collective.axes)
        yield f"over {axes}", None, {"nbytes": step.collective.nbytes}
    elif step.begins:
        yield "copies", None, {"nbytes": nbytes}
    elif step.bodies:
        yield from [] if step.is_branch else [("loops", None, {"times": step.times})]
    else:
        if computes := rates.computes(step):
            yield "compute", computes, {"flops": sum(each.flops or 0 for each in step.products)}
        if moves := rates.moves(step):
            yield "memory", moves, {"nbytes": nbytes}
