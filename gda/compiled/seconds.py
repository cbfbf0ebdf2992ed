"""The time that a program takes on a device: a lower bound, and an estimate of its schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gda.compiled.collective_times import Interconnect, collective_seconds
from gda.compiled.devices.device_kinds import DeviceKind
from gda.compiled.devices.device_speeds import DeviceSpeeds
from gda.compiled.hlo import Schedule, Step, executions, format_source
from gda.layout.boundary import set_module

_SMALL = 4096  # bytes: a TPU has scalars and the like in registers
_MOST_PLACES = 100


@set_module("gda")
class PlaceSeconds(NamedTuple):
    """The work of one device for one line of the program; ``StepSeconds.places`` has them.

    Attributes:
      place: file and line of the user, or the name of the scope if XLA does not tell the line.
      seconds: the estimate of its kernels and collectives, one after another.
      nbytes: bytes that they read and write in the memory of the device.
      flops: floating-point operations of its products.
      communication: the part of ``seconds`` in collectives.
      is_bound: ``seconds`` and ``flops`` are lower bounds, as a kernel of the line is unknown.

    >>> import gda
    >>> gda.PlaceSeconds('model.py:7', seconds=2e-3, nbytes=1024, flops=2e9).communication
    0.0
    """

    place: str
    seconds: float
    nbytes: int
    flops: float
    communication: float = 0.0
    is_bound: bool = False


@set_module("gda")
@dataclass(frozen=True)
class StepSeconds:
    """The time that one call of a program takes; ``gda.Rehearsal.seconds`` has it.

    It is computed from the partitioned program, and no device was measured for it. Each figure is
    None if the kind of the devices has no speeds here, such as a CPU.

    Attributes:
      compute: the products at the peak that the vendor publishes for their types.
      memory: the bytes that kernels read and write, at the vendor's bandwidth; on a GPU without
        what its level-2 cache may hold.
      communication: the collectives over the busiest axes of the mesh, at the vendor's figures.
      bound: the longest of these three; no schedule takes less. Of branches the cheapest counts,
        and a loop of unknown length does not.
      estimate: the kernels and collectives in the order of the schedule, at the measured parts of
        these speeds. A kernel takes the longer of its products and its bytes, and the time to start
        it; a collective that is asynchronous runs beside the kernels until its end. Of branches the
        most expensive counts.
      hfu: the part of the peak that the estimate has: ``compute / estimate``, with work that
        devices repeat counted once. Work that the program does again to save memory counts. None if
        the estimate is a bound.
      mfu: the same without the products that ``jax.checkpoint`` computes again; None also for a
        function that came lowered or compiled.
      not_counted: the reasons for which a figure is None or too low.
      places: the lines with the most estimated seconds, the longest first.

    >>> import gda
    >>> seconds = gda.StepSeconds(compute=0.03, memory=0.01, communication=0.04, estimate=0.06)
    >>> seconds.bound, seconds.bounded_by
    (0.04, 'communication')
    """

    compute: float | None = None
    memory: float | None = None
    communication: float | None = None
    estimate: float | None = None
    hfu: float | None = None
    mfu: float | None = None
    not_counted: tuple[str, ...] = ()
    places: tuple[PlaceSeconds, ...] = field(default=(), repr=False)

    @property
    def bound(self) -> float | None:
        parts = [self.compute, self.memory, self.communication]
        return max((each for each in parts if each is not None), default=None)

    @property
    def is_bound(self) -> bool:
        """The estimate is a lower bound, since some work is not counted."""
        return self.estimate is not None and bool(self.not_counted)

    @property
    def bounded_by(self) -> str | None:
        """``'compute'``, ``'memory'`` or ``'communication'``: the part that ``bound`` is.

        None if ``bound`` is 0, as for arrays that a cache holds.
        """
        parts = ("compute", "memory", "communication")
        return next(
            (each for each in parts if self.bound and getattr(self, each) == self.bound), None
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists, strings and numbers, for JSON."""
        return {
            **{name: getattr(self, name) for name in self.__dataclass_fields__},
            "bound": self.bound,
            "bounded_by": self.bounded_by,
            "is_bound": self.is_bound,
            "text": str(self),
            "not_counted": [*self.not_counted],
            "places": [each._asdict() for each in self.places],
        }

    def __str__(self) -> str:
        return format_seconds(self.estimate, self.is_bound)


def format_seconds(seconds: float | None, is_bound: bool = False) -> str:
    """Return a time in words, such as ``1.5 s``, or ``≥ 1.5 s``; ``?`` for an unknown one."""
    if seconds is None:
        return "?"
    unit, size = ("s", 1) if seconds >= 1 else ("ms", 1e-3) if seconds >= 1e-3 else ("µs", 1e-6)
    return f"{'≥ ' * is_bound}{seconds / size:,.1f} {unit}"


def seconds_of(
    schedule: Schedule | None,
    kind: DeviceKind | None,
    links: Interconnect | None,
    repetitions: float,
    of_model: float | None = None,
) -> StepSeconds:
    """Return the time of a schedule.

    ``repetitions`` is the number of devices that do the same work, and ``of_model`` is how often
    the work of the model is done, also a second time to save memory; None if it is unknown.
    """
    if kind is None or kind.speeds is None or kind.memory_bandwidth is None:
        return StepSeconds(not_counted=("the speeds of these devices are unknown",))
    if schedule is None:
        return StepSeconds(not_counted=("the compiler does not write this program",))
    cache_bytes = kind.gpu.cache_bytes if kind.gpu else 0
    rates = _Rates(kind.speeds, kind.memory_bandwidth, cache_bytes, links)
    compute = _least(schedule.steps, rates.least_compute)
    memory = _least(schedule.steps, rates.least_memory)
    memory = max(memory, (schedule.argument_bytes - cache_bytes) / rates.bandwidth)
    steps = [run.step for run in executions(schedule.steps)]
    axes = {each.collective.axes for each in steps if each.collective is not None}
    communication = max(
        (_least(schedule.steps, lambda step, of=of: rates.least_on(step, of)) for of in axes),
        default=0.0,
    )
    clock = _Clock(rates)
    clock.run(schedule.steps)
    estimate = max(clock.now, compute, memory, communication)
    reasons = [f"the products of the kernel {name}" for name in schedule.unknown()]
    if any(each.times is None for each in steps):
        reasons.append("all but one trip of a loop of unknown length")
    used = compute / estimate if compute and not reasons else None
    return StepSeconds(
        compute=compute,
        memory=memory,
        communication=communication,
        estimate=estimate,
        hfu=used and used / repetitions,
        mfu=used / of_model if used and of_model else None,
        not_counted=tuple(reasons),
        places=_places(schedule.steps, rates),
    )


@dataclass(frozen=True)
class _Rates:
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
        speeds, measured = self.speeds, self.speeds.measured
        computes = self.least_compute(step) / measured.products
        if step.cycles is not None and speeds.clock_hz:
            computes = max(self.least_compute(step), step.cycles / speeds.clock_hz)
        moves = sum(step.arrays) / self.bandwidth / measured.memory
        is_launched = speeds.clock_hz is None or sum(step.arrays) > _SMALL
        return max(computes, moves) + (speeds.kernel_seconds if is_launched else 0)

    def resource(self, step: Step) -> object:
        """Return the name of the links that an asynchronous step takes for itself."""
        if step.collective is None:
            return "copies"
        # Each axis of a torus has links of its own.
        is_torus = self.links is not None and self.links.torus is not None
        return step.collective.axes if is_torus else "links"


class _Clock:
    """The time at which a device reaches a place of its schedule."""

    def __init__(self, rates: _Rates) -> None:
        self.rates, self.now = rates, 0.0
        self.free: dict[object, float] = defaultdict(float)
        self.ends: dict[str, float] = {}

    def run(self, steps: Iterable[Step]) -> None:
        for step in steps:
            if step.ends:
                self.now = max(self.now, self.ends.get(step.ends, 0.0))
            elif step.begins:
                self._begin(step)
            elif step.is_branch:
                self._run_longest(step)
            elif step.bodies:
                self._repeat(step)
            elif step.collective is not None:
                of = self.rates.resource(step)
                self.now = self.free[of] = max(self.now, self.free[of]) + self.rates.alone(step)
            else:
                self.now += self.rates.alone(step)

    def _begin(self, step: Step) -> None:
        seconds = self.rates.alone(step)
        inner = [run.step for body in step.bodies for run in executions(body)]
        collectives = [each for each in inner if each.collective is not None]
        of = self.rates.resource(collectives[0] if collectives else step)
        seconds += sum(map(self.rates.alone, inner))
        self.ends[step.begins] = self.free[of] = max(self.now, self.free[of]) + seconds

    def _repeat(self, step: Step) -> None:
        """Run a body once, and add the time of a second run for each of the others."""
        (body, *_) = step.bodies
        times = 1 if step.times is None else step.times
        if times > 0:
            self.run(body)
        if times > 1:
            begun = self.now
            self.run(body)
            rest = (times - 2) * (self.now - begun)
            self.now += rest
            self.ends = {name: end + rest for name, end in self.ends.items()}
            self.free.update({of: end + rest for of, end in self.free.items()})

    def _run_longest(self, step: Step) -> None:
        clocks = []
        for body in step.bodies:
            clock = _Clock(self.rates)
            clock.now, clock.ends = self.now, dict(self.ends)
            clock.free.update(self.free)
            clock.run(body)
            clocks.append(clock)
        longest = max(clocks, key=lambda clock: clock.now)
        self.now, self.free, self.ends = longest.now, longest.free, longest.ends


def _least(steps: Iterable[Step], seconds: Callable[[Step], float]) -> float:
    """Return the sum over all steps that must run, with the cheapest of branches."""

    def cheapest(bodies: Sequence[tuple[Step, ...]]) -> Sequence[tuple[Step, ...]]:
        return [min(bodies, key=lambda body: _least(body, seconds), default=())]

    return sum(seconds(step) * (n or 0) for step, n, _ in executions(steps, cheapest, unknown=0))


def _places(steps: Iterable[Step], rates: _Rates) -> tuple[PlaceSeconds, ...]:
    totals: dict[str, PlaceSeconds] = {}
    for step, executed, _ in executions(steps, unknown=1):
        times = executed or 0
        if not (seconds := times * rates.alone(step)):
            continue
        place = format_source(step)
        so_far = totals.get(place, PlaceSeconds(place, 0.0, 0, 0.0))
        totals[place] = PlaceSeconds(
            place,
            so_far.seconds + seconds,
            so_far.nbytes + times * sum(step.arrays),
            so_far.flops + times * sum(each.flops or 0 for each in step.products),
            so_far.communication + (seconds if step.collective is not None else 0.0),
            so_far.is_bound or any(each.flops is None for each in step.products),
        )
    return tuple(sorted(totals.values(), key=lambda each: -each.seconds)[:_MOST_PLACES])
