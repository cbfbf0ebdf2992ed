"""Loads of the links of a torus, beside the formulas for rings and lines."""

import itertools
import math
import random

import numpy as np
import pytest

from gda.compiled.hlo.groups import Groups, Pairs
from gda.compiled.torus import Torus


def torus(*shape: int, ring: tuple[bool, ...] | bool, per_chip: int = 1) -> Torus:
    chips = itertools.product(*map(range, shape))
    closed = (ring,) * len(shape) if isinstance(ring, bool) else ring
    return Torus(tuple(chip for chip in chips for _ in range(per_chip)), closed)


def along(axis: int, *shape: int) -> Groups:
    """Return groups along one axis of devices in row-major order."""
    positions = np.moveaxis(np.arange(math.prod(shape)).reshape(shape), axis, -1)
    return tuple(map(tuple, positions.reshape(-1, shape[axis]).tolist()))


def whole(n: int) -> Groups:
    return (tuple(range(n)),)


# A link carries (n-1)/n of the array along a line, half of it along a ring, and twice as much for
# an all-reduce; all-to-all takes a quarter of the devices along a line, an eighth along a ring.
@pytest.mark.parametrize(
    ("links", "groups", "gather", "exchange"),
    [
        (torus(4, 4, ring=False), along(1, 4, 4), 3 / 4, 4 / 4),
        (torus(4, 4, ring=False), along(0, 4, 4), 3 / 4, 4 / 4),
        (torus(2, 2, ring=False), along(0, 2, 2), 1 / 2, 1 / 2),
        (torus(16, 16, ring=True), along(0, 16, 16), 15 / 16 / 2, 16 / 8),
        (torus(8, 16, ring=(False, True)), along(0, 8, 16), 7 / 8, 8 / 4),
        (torus(8, 16, ring=(False, True)), along(1, 8, 16), 15 / 16 / 2, 16 / 8),
        # Over all dimensions at once: what a chip with the fewest links must receive.
        (torus(4, 4, ring=False), whole(16), 15 / 16 / 2, 4 / 4),
        (torus(16, 16, ring=True), whole(256), 255 / 256 / 4, 16 / 8),
        (torus(4, 4, 4, ring=True), whole(64), 63 / 64 / 6, 4 / 8),
        (torus(8, 16, ring=(False, True)), whole(128), 127 / 128 / 3, 8 / 4),
        # Two halves of each ring are lines: the groups cannot help one another.
        (torus(1, 16, ring=(False, True)), along(1, 2, 8), 7 / 8, 8 / 4),
        # Every second chip: both halves of the groups share the links.
        (torus(8, ring=False), ((0, 2, 4, 6), (1, 3, 5, 7)), 2 * 3 / 4, 2 * 4 / 4),
        # Two devices of each chip, in the same group or each in one of its own.
        (torus(2, 2, 1, ring=False, per_chip=2), whole(8), 6 / 8 / 2, 4 * 4 / 8 / 2),
        (torus(4, ring=True, per_chip=2), ((0, 2, 4, 6), (1, 3, 5, 7)), 3 / 4, 2 * 4 / 8),
        (torus(1, 1, ring=False), whole(1), 0, 0),
    ],
)
def test_the_least_load_is_that_of_the_formulas(
    links: Torus, groups: Groups, gather: float, exchange: float
) -> None:
    for kind, load in (
        ("all-gather", gather),
        ("reduce-scatter", gather),
        ("all-reduce", 2 * gather),
        ("all-to-all", exchange),
        ("ragged-all-to-all", 0),
    ):
        assert links.least_load(kind, groups, ()) == pytest.approx(load), kind


def shift(n: int, by: int) -> Pairs:
    return tuple((at, (at + by) % n) for at in range(n))


@pytest.mark.parametrize(
    ("links", "pairs", "routed", "hops"),
    [
        (torus(16, ring=True), shift(16, 1), 1, 1),
        (torus(16, ring=True), shift(16, 15), 1, 1),  # the shorter way
        (torus(16, ring=True), shift(16, 4), 4, 4),
        (torus(4, ring=False), shift(4, 1), 1, 3),  # the last one goes back over all links
        (torus(4, ring=False), ((0, 3), (1, 3), (2, 3)), 3, 3),
        (torus(4, 4, ring=False), ((0, 5),), 1, 2),
    ],
)
def test_permutations_take_the_shorter_way(
    links: Torus, pairs: Pairs, routed: int, hops: int
) -> None:
    assert links.routed_load(pairs) == routed
    assert links.hops(pairs) == hops


def test_no_way_has_less_than_the_least_load() -> None:
    rng = random.Random(0)
    for ring in (True, False):
        for shape in ((8,), (4, 8), (4, 4, 4)):
            n = math.prod(shape)
            for _ in range(10):
                targets = rng.sample(range(n), n)
                pairs = tuple(enumerate(targets))
                links = torus(*shape, ring=ring)
                assert links.least_load("collective-permute", (), pairs) <= links.routed_load(pairs)


def test_hops_of_groups() -> None:
    assert torus(4, 4, ring=False).hops(along(0, 4, 4)) == 3
    assert torus(16, 16, ring=True).hops(whole(256)) == 16
    assert torus(4, ring=True, per_chip=2).hops(((0, 1), (2, 3))) == 0
