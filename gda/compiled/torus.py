"""Devices on a torus, and the loads of its links in a collective. Integers only; no JAX."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gda.compiled.hlo.groups import Groups, Pairs

Chip = tuple[int, ...]


@dataclass(frozen=True)
class Torus:
    """The chips that devices are on, and the dimensions that close to rings.

    A dimension that does not close is a line. Each chip has a link to each neighbour, which sends
    and receives at once.

    Attributes:
      chips: the coordinates of the chip of each device, from 0.
      closed: for each dimension, it is a ring.
    """

    chips: tuple[Chip, ...]
    closed: tuple[bool, ...]

    @cached_property
    def _extents(self) -> list[int]:
        return (np.max(self.chips, axis=0) + 1).tolist()

    @cached_property
    def _cuts(self) -> list[tuple[npt.NDArray[np.bool_], int]]:
        """Sets of devices, each with the number of links from it to the others.

        They are the planes of each dimension: those before a place of a line, and those between two
        places of a ring. The last set is a chip with the fewest links.
        """
        chips, cuts = np.array(self.chips), []
        for axis, (extent, ring) in enumerate(self._dimensions):
            area = math.prod(self._extents) // extent
            for start in range(extent if ring else 1):
                for end in range(start + 1, extent):
                    inside = (start <= chips[:, axis]) & (chips[:, axis] < end)
                    cuts.append((inside, area * (2 if ring else 1)))
        corner = sum(2 if ring else extent > 1 for extent, ring in self._dimensions)
        return [*cuts, ((chips == 0).all(axis=1), corner)] if corner else []

    @cached_property
    def _dimensions(self) -> list[tuple[int, bool]]:
        return [*zip(self._extents, self.closed, strict=True)]

    def least_load(self, kind: str, groups: Groups, pairs: Pairs) -> float:
        """Return the least load of the busiest link in one direction, for all groups at once.

        The unit is the whole array of a group: the operand of a device, or the result of an
        all-gather. On any routes, the arrays that a set of devices must send to the others, or
        receive, go over the links between them; the set with the highest load per link counts.
        An all-reduce is a reduce-scatter and an all-gather, one after the other.
        """
        if kind == "ragged-all-to-all":  # its bytes depend on the values
            return 0.0
        if pairs:
            ends = np.array(pairs)
            loads = (_of_pairs(ends, inside) / links for inside, links in self._cuts)
        else:
            sizes = np.array([len(group) for group in groups])
            members = np.fromiter(itertools.chain.from_iterable(groups), int)
            loads = (
                _of_groups(kind, sizes, members, inside) / links for inside, links in self._cuts
            )
        return max(loads, default=0.0)

    def routed_load(self, pairs: Pairs) -> float:
        """Return the load of the busiest link on shortest routes, dimension by dimension."""
        loads = Counter(
            link
            for source, target in pairs
            for link in self._way(self.chips[source], self.chips[target])
        )
        return max(loads.values(), default=0)

    def hops(self, groups: Sequence[Sequence[int]]) -> int:
        """Return the most links between the first device of a group and another."""
        most = 0
        for group in groups:
            chips = np.array([self.chips[at] for at in group])
            ways = np.abs(chips - chips[0])
            shorter = np.minimum(ways, self._extents - ways)
            most = max(most, np.where(self.closed, shorter, ways).sum(axis=1).max())
        return int(most)

    def _way(self, source: Chip, target: Chip) -> Iterator[tuple[Chip, int, int]]:
        """Yield the links from one chip to another: their chip, dimension and direction."""
        at = list(source)
        for axis, (extent, ring) in enumerate(self._dimensions):
            steps = target[axis] - source[axis]
            if ring and abs(steps) > extent // 2:
                steps -= extent if steps > 0 else -extent
            direction = 1 if steps > 0 else -1
            for _ in range(abs(steps)):
                yield tuple(at), axis, direction
                at[axis] = (at[axis] + direction) % extent if ring else at[axis] + direction


def _of_pairs(ends: npt.NDArray[np.int64], inside: npt.NDArray[np.bool_]) -> float:
    """Return the arrays that must go into a set of devices or out of it: the larger number."""
    sources, targets = inside[ends].T
    return float(max((~sources & targets).sum(), (sources & ~targets).sum()))


def _of_groups(
    kind: str,
    sizes: npt.NDArray[np.int64],
    members: npt.NDArray[np.int64],
    inside: npt.NDArray[np.bool_],
) -> float:
    """Return the arrays as ``_of_pairs`` for groups, whose members come group after group."""
    within = np.add.reduceat(inside[members].astype(int), np.cumsum(sizes) - sizes)
    outside = sizes - within
    if kind == "all-to-all":
        return float((within * outside / sizes).sum())
    into = (outside / sizes)[within > 0].sum()
    out = (within / sizes)[outside > 0].sum()
    return (2 if kind == "all-reduce" else 1) * float(max(into, out))
