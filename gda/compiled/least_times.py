"""The least time of a collective, from its bytes and the speeds of the links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gda.compiled.hlo import Collective
from gda.planning.device_speeds import DeviceSpeeds


def least_seconds(
    collective: Collective, host_of: Sequence[int], speeds: DeviceSpeeds
) -> float | None:
    """Return a time below which no algorithm does all executions; None for an unknown number.

    ``host_of`` has the host of each position in device order if links between hosts are the slow
    ones; it is empty for TPUs. A reduction in the switches of a network counts as possible.
    """
    if collective.count is None:
        return None
    within = _bytes_sent(collective)
    if collective.is_between_slices:
        return collective.count * within / speeds.slow_link
    between = _bytes_between_hosts(collective, host_of) if host_of else 0
    return collective.count * max(within / speeds.link, between / speeds.slow_link)


def _bytes_sent(collective: Collective) -> float:
    """Return the bytes that a device sends or receives at least, in one execution."""
    nbytes = collective.nbytes
    # Groups that are not known have two devices or more.
    size = max(map(len, collective.groups), default=2)
    match collective.kind:
        case "all-gather":
            return max(collective.nbytes_output - nbytes, 0)
        case "reduce-scatter" | "all-to-all":
            return nbytes * (size - 1) / size
        case "ragged-all-to-all":  # its bytes depend on the values
            return 0
        case _:
            return nbytes if size > 1 else 0


def _bytes_between_hosts(collective: Collective, host_of: Sequence[int]) -> float:
    """Return the bytes that a device sends to or receives from other hosts at least.

    The devices of a group on one host share this work.
    """
    nbytes = collective.nbytes
    if collective.pairs:
        crosses = any(host_of[source] != host_of[target] for source, target in collective.pairs)
        return nbytes if crosses else 0
    least = 0.0
    for group in collective.groups:
        size, here = len(group), max(Counter(host_of[at] for at in group).values())
        if here == size:
            continue
        shares = {
            "all-gather": (size - here) / here,
            "reduce-scatter": (size - here) / size / here,
            "all-to-all": (size - here) / size,
            "ragged-all-to-all": 0,
        }
        least = max(least, nbytes * shares.get(collective.kind, 1 / here))
    return least
