"""The steps that were measured on each kind of devices, beside their estimates."""

from __future__ import annotations

from typing import NamedTuple

from gda.compiled.devices.device_kinds import kind_of_device
from gda.layout.boundary import set_module


@set_module("gda")
class MeasuredRange(NamedTuple):
    """The measured times of steps on one kind of devices, in units of their estimates.

    ``gda.Rehearsal.measured_range`` has it. ``docs/step-times.md`` lists the steps.

    Attributes:
      low, high: the least and the most; a step with an estimate of 2 s and ``high`` 1.5 took 3 s.
      num_steps: the number of steps.
      kind: of the devices, as in names of topologies.
      is_over_slow_links: these steps communicate between hosts or slices.

    >>> import gda
    >>> gda.MeasuredRange(0.9, 1.25, num_steps=4, kind='v5e', is_over_slow_links=False).high
    1.25
    """

    low: float
    high: float
    num_steps: int
    kind: str
    is_over_slow_links: bool


# Measured seconds over estimated seconds, by kind; then of steps that communicate over slow links,
# which are those between hosts of GPUs, and between slices of TPUs. A test compares them with
# benchmarks/compiled/step_times.json, which has the rows of docs/step-times.md.
WITHIN: dict[str, tuple[float, ...]] = {
    "v4": (1.15,),
    "v5e": (1.09, 0.98, 1.04),
    "v5p": (0.98, 0.90),
    "v6e": (1.25, 1.19, 1.17, 1.16),
    "tpu7x": (0.76,),
    "a100-40": (1.03,),
    "a100": (0.94, 0.96),
    "h100": (1.02, 1.11, 0.89, 0.95, 1.07, 1.30, 1.42, 0.98, 1.00, 0.97, 0.91, 0.88, 1.07, 1.05),
    "h100-96": (0.99,),
}
OVER_SLOW_LINKS: dict[str, tuple[float, ...]] = {
    "v4": (1.18,),
    "v5e": (1.04,),
    "a100-40": (1.05, 1.00, 1.38, 1.06),
    "a100": (1.04, 1.00),
    "h100": (1.00, 0.95, 0.95, 1.03, 1.01),
    "h100-96": (0.98, 1.03),
}


def measured_range_of(device_kind: str, is_over_slow_links: bool) -> MeasuredRange | None:
    """Return the range of ``jax.Device.device_kind``; None if no step was measured on it."""
    kind = kind_of_device(device_kind)
    ratios = (OVER_SLOW_LINKS if is_over_slow_links else WITHIN).get(kind.name if kind else "")
    if kind is None or not ratios:
        return None
    return MeasuredRange(min(ratios), max(ratios), len(ratios), kind.name, is_over_slow_links)
