"""The comparison of arrays that have arrived with their recorded fingerprints, on devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from gda.arrays.fingerprints.fingerprint import begin
from gda.arrays.fingerprints.formula import digest_of, sums_of_numpy
from gda.arrays.fingerprints.on_devices import PendingSums
from gda.layout.text import join_some
from gda.mesh import processes_of, sharding_of
from gda.multihost.steps import all_do
from gda.storage.stores.errors import CorruptionError
from gda.trees.leaves import grid_of_leaf, held_by
from gda.trees.records.arrivals import Arrival
from gda.trees.records.recorded_tree import ArrayLeaf, format_path, saved_type


def check_provable(url: str, arrivals: Sequence[Arrival]) -> None:
    """Raise unless the fingerprints of arrays can be compared, before these are read."""
    cast = [each.record.path for each in arrivals if each.dtype != each.record.dtype]
    if cast:
        paths = join_some([format_path(path) for path in cast])
        raise ValueError(
            f"a cast changes the fingerprint of {paths}; restore without check_fingerprint, or "
            "without cast"
        )
    check_recorded(url, [each.record for each in arrivals])


def check_recorded(url: str, leaves: Sequence[ArrayLeaf]) -> None:
    lacking = [format_path(leaf.path) for leaf in leaves if leaf.fingerprint is None]
    if lacking:
        raise CorruptionError(
            f"{url} was saved without the fingerprints of {join_some(lacking)}; save it with "
            "fingerprint=True to compare them"
        )


def check_fingerprints(
    source: str, arrivals: Sequence[Arrival], was: str = "saved", timeout: float = 600
) -> None:
    """Raise unless every array has the recorded fingerprint. All processes must call it.

    In messages, the arrays are from ``source``, where they were ``"saved"`` or ``"offered"``.
    """
    begun = [_begin_share(each) for each in arrivals]

    def decide(parts: dict[int, list[Any]]) -> list[int]:
        return [
            number
            for number, (each, *of_all) in enumerate(zip(arrivals, *parts.values(), strict=True))
            if _digests(each.record, of_all) != {each.record.fingerprint}
        ]

    done = all_do(
        lambda: [(holders, sums.result().tolist()) for holders, sums in begun],
        decide=decide,
        what=f"comparing fingerprints with {source}",
        timeout=timeout,
    )
    if wrong := done.decision:
        problems = [line_of(arrivals[number].record, was) for number in wrong]
        raise CorruptionError(f"{source}: {join_some(problems)}", problems)


def line_of(record: ArrayLeaf, was: str = "saved") -> str:
    """Return the line about an array of another fingerprint, for messages."""
    return f"array {format_path(record.path)} is not what was {was}: its fingerprint differs"


def _begin_share(arrival: Arrival) -> tuple[tuple[int, ...], PendingSums]:
    """Return the processes that hold an array, and the sums over the share of this one."""
    array = held_by(arrival.value)
    if not isinstance(array, jax.Array):
        return (jax.process_index(),), PendingSums(sums_of_numpy(np.asarray(array, arrival.dtype)))
    sums = begin(array, grid_of_leaf(arrival.value))
    if array.is_fully_addressable:
        return (jax.process_index(),), sums
    mesh: Any = sharding_of(array).mesh
    return processes_of(mesh).numbers, sums


def _digests(record: ArrayLeaf, parts: Sequence[list[Any]]) -> set[str]:
    """Return the set of fingerprints from the parts of all processes: one if all are equal."""
    by_holders: dict[tuple[int, ...], list[list[int]]] = {}
    for holders, sums in parts:
        by_holders.setdefault(tuple(holders), []).append(sums)
    return {digest_of(*saved_type(record), shares) for shares in by_holders.values()}
