"""The time of a collective, from its bytes and the links between its devices."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gda.compiled.devices.device_kinds import DeviceKind, kind_of_device
from gda.compiled.devices.device_speeds import DeviceSpeeds
from gda.compiled.hlo import Collective
from gda.compiled.hlo.groups import Groups, Pairs
from gda.compiled.torus import Torus

# NCCL reaches 92 % to 97 % of the adapters of a few hosts with 512 MB, and about 87 % of those of
# 248 hosts: github.com/NVIDIA/nccl-tests, issues 252, 283 and 290.
_NETWORK_PART = 0.85


class CollectiveSeconds(NamedTuple):
    """The time of one execution of a collective that has the links for itself.

    Attributes:
      bound: the bytes that must go over the links, at the speed that their vendor publishes.
      estimate: at the measured part of that speed, with the time to begin, and that of each hop.
    """

    bound: float
    estimate: float


@dataclass(frozen=True)
class Interconnect:
    """The links between the devices of a mesh.

    Attributes:
      speeds: of each device.
      die_link: bytes per second between the devices of one chip.
      torus: the places of TPUs, of one slice; None for GPUs.
      hosts: the host of each GPU, in mesh order; empty for TPUs.
      slices: number of slices along each mesh axis that goes over several.
    """

    speeds: DeviceSpeeds
    die_link: float = math.inf
    torus: Torus | None = None
    hosts: tuple[int, ...] = ()
    slices: Mapping[str, int] = field(default_factory=dict)


def links_of(devices: Sequence[Any], slices: Mapping[str, int]) -> Interconnect | None:
    """Return the links of the devices of a mesh; None if there are no figures, as for CPUs.

    A slice is as large as these devices tell, and a twisted torus counts as a plain one.
    """
    kind = kind_of_device(devices[0].device_kind) if devices else None
    if kind is None or kind.speeds is None:
        return None
    if kind.gpu is not None:
        return Interconnect(kind.speeds, hosts=tuple(device.process_index for device in devices))
    slice_of = [getattr(device, "slice_index", 0) for device in devices]
    here = [each for each, at in zip(devices, slice_of, strict=True) if at == slice_of[0]]
    torus = _torus(kind, np.array([device.coords for device in here]))
    # Without a figure for the link within a chip: what is sent must leave the memory.
    die_link = kind.speeds.die_link or kind.memory_bandwidth or math.inf
    return Interconnect(kind.speeds, die_link, torus, slices=dict(slices))


def _torus(kind: DeviceKind, coordinates: np.ndarray) -> Torus:
    chips = (coordinates - coordinates.min(axis=0))[:, : kind.dimensions]
    closed = chips.max(axis=0) + 1 >= kind.smallest_ring
    if kind.dimensions == 3:
        closed[:] = closed.all()
    return Torus(tuple(map(tuple, chips.tolist())), tuple(closed.tolist()))


def collective_seconds(collective: Collective, links: Interconnect) -> CollectiveSeconds:
    """Return the time of one execution of a collective, in which all its groups take part.

    Each device sends the ``(n-1)/n`` of the whole array that ``n`` devices have, and twice that in
    an all-reduce, which is a reduce-scatter and then an all-gather, unless switches add.
    """
    if collective.is_between_slices:
        return _between_slices(collective, links)
    if links.torus is not None:
        return _on_torus(collective, links, links.torus)
    parts = [_between_gpus(collective, links, *each) for each in _splits(collective, links.hosts)]
    return CollectiveSeconds(*map(max, zip(*parts, strict=True)))


def _sent(collective: Collective, size: int, together: int = 1) -> float:
    """Return the least bytes that each device of a group sends to others, or receives.

    Groups of ``together`` devices share this work, and their exchange does not count.
    """
    whole = _whole(collective)
    share = max(size - together, 0) / size
    match collective.kind:
        case "all-gather" | "reduce-scatter":
            return whole * share / together
        case "all-reduce":
            return 2 * whole * share / together
        case "all-to-all":
            return whole * share
        case "ragged-all-to-all":  # its bytes depend on the values
            return 0
        case _:
            return whole / together if share else 0


def _whole(collective: Collective) -> int:
    return collective.nbytes_output if collective.kind == "all-gather" else collective.nbytes


# TPUs.


def _between_slices(collective: Collective, links: Interconnect) -> CollectiveSeconds:
    num_slices = math.prod(links.slices.get(name, 1) for name in collective.axes or ())
    num_slices = max(num_slices, 2)
    seconds = _sent(collective, num_slices) / links.speeds.slow_link
    start = (num_slices - 1) * links.speeds.slow_hop_seconds
    return CollectiveSeconds(seconds, start + seconds / _NETWORK_PART)


def _on_torus(collective: Collective, links: Interconnect, torus: Torus) -> CollectiveSeconds:
    speeds, kind = links.speeds, collective.kind
    together = collective.groups or collective.pairs
    size = max(map(len, together), default=2)
    fit = speeds.measured.fit(kind, size)
    if not together:  # they are unknown
        seconds = _sent(collective, size) / (speeds.link * speeds.links)
        return CollectiveSeconds(seconds, fit.start_seconds + seconds / fit.part)
    if all(len(set(each)) == 1 for each in together):
        return CollectiveSeconds(0, 0)
    least, routed, hops = _load(torus, kind, collective.groups, collective.pairs)
    if not hops:
        seconds = _sent(collective, size) / links.die_link
        return CollectiveSeconds(seconds, fit.start_seconds + seconds / fit.part)
    phases = 2 if kind == "all-reduce" else 1
    start = fit.start_seconds + phases * hops * speeds.hop_seconds
    bound, estimate = (_whole(collective) * each / speeds.link for each in (least, routed))
    return CollectiveSeconds(bound, start + estimate / fit.part)


@functools.lru_cache(maxsize=256)
def _load(torus: Torus, kind: str, groups: Groups, pairs: Pairs) -> tuple[float, float, int]:
    """Return the arrays on the busiest link, the least and as routed, and the most hops."""
    least = torus.least_load(kind, groups, pairs)
    return least, torus.routed_load(pairs) if pairs else least, torus.hops(groups or pairs)


# GPUs.


def _splits(collective: Collective, hosts: Sequence[int]) -> set[tuple[int, int]]:
    """Return the sizes of the groups, each with the most devices of it on one host."""
    together = [{*each} for each in collective.groups or collective.pairs]
    found = {(len(each), max(Counter(hosts[at] for at in each).values())) for each in together}
    return found or {(2, 2)}  # unknown groups have two devices or more


def _between_gpus(
    collective: Collective, links: Interconnect, size: int, here: int
) -> CollectiveSeconds:
    """Return the time for groups of ``size`` devices, with at most ``here`` on one host."""
    speeds = links.speeds
    if size == 1:
        return CollectiveSeconds(0, 0)
    fit = speeds.measured.fit(collective.kind, here)
    sent = least = _sent(collective, size)
    within = sent / (speeds.link * fit.part)
    if speeds.reduces_in_switch and collective.kind == "all-reduce":
        least = collective.nbytes
    fast = speeds.link + (speeds.peer_link or 0)
    if here == size:
        # A bridge connects two GPUs; bytes for others go over the plain links.
        over_plain = _sent(collective, size, 2) / speeds.link if speeds.peer_link else 0
        return CollectiveSeconds(max(least / fast, over_plain), fit.start_seconds + within)
    between = _sent(collective, size, here) / speeds.slow_link
    bound = max(between, least / (fast + speeds.slow_link))
    start = fit.start_seconds + (math.ceil(size / here) - 1) * speeds.slow_hop_seconds
    estimate = max(between / _NETWORK_PART, within if here > 1 else 0)
    return CollectiveSeconds(bound, start + estimate)
