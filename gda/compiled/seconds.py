"""The time that a program takes on a device: a lower bound, and an estimate of its schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gda.compiled.collective_times import Interconnect
from gda.compiled.device_clock import Clock, Rates, Timeline, timeline_of
from gda.compiled.devices.device_kinds import DeviceKind
from gda.compiled.hlo import Schedule, Step, executions, format_source
from gda.compiled.hlo.live_ranges import LiveRanges
from gda.layout.boundary import set_module

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
      timeline: the events of the estimate, for ``gda.Rehearsal.save_trace``.

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
    timeline: Timeline = field(default=Timeline(), repr=False)

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
        names = self.__dataclass_fields__.keys() - {"timeline"}
        return {
            **{name: getattr(self, name) for name in sorted(names)},
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
    ranges: LiveRanges | None = None,
) -> StepSeconds:
    """Return the time of a schedule.

    ``repetitions`` is the number of devices that do the same work, and ``of_model`` is how often
    the work of the model is done, also a second time to save memory; None if it is unknown. With
    the lives of temporaries there is a timeline.
    """
    if kind is None or kind.speeds is None or kind.memory_bandwidth is None:
        return StepSeconds(not_counted=("the speeds of these devices are unknown",))
    if schedule is None:
        return StepSeconds(not_counted=("the compiler does not write this program",))
    cache_bytes = kind.gpu.cache_bytes if kind.gpu else 0
    rates = Rates(kind.speeds, kind.memory_bandwidth, cache_bytes, links)
    compute = _least(schedule.steps, rates.least_compute)
    memory = _least(schedule.steps, rates.least_memory)
    memory = max(memory, (schedule.argument_bytes - cache_bytes) / rates.bandwidth)
    steps = [run.step for run in executions(schedule.steps)]
    axes = {each.collective.axes for each in steps if each.collective is not None}
    communication = max(
        (_least(schedule.steps, lambda step, of=of: rates.least_on(step, of)) for of in axes),
        default=0.0,
    )
    clock = Clock(rates)
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
        timeline=Timeline() if ranges is None else timeline_of(clock, ranges),
    )


def _least(steps: Iterable[Step], seconds: Callable[[Step], float]) -> float:
    """Return the sum over all steps that must run, with the cheapest of branches."""

    def cheapest(bodies: Sequence[tuple[Step, ...]]) -> Sequence[tuple[Step, ...]]:
        return [min(bodies, key=lambda body: _least(body, seconds), default=())]

    return sum(seconds(step) * (n or 0) for step, n, _ in executions(steps, cheapest, unknown=0))


def _places(steps: Iterable[Step], rates: Rates) -> tuple[PlaceSeconds, ...]:
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
