"""Eight programs whose operations, memory traffic and communication were counted by hand.

The table of ``docs/step-times.md`` has a third kind.
"""

import math

import jax
import pytest
from counted_programs import PROGRAMS, memory_of, mesh_of, sent_by

import gda

TPU = pytest.param("v5p", marks=pytest.mark.topology)
GPU = pytest.param("h100", marks=pytest.mark.topology("gpu"))
# A compiler may change the layout of an array, which is read and written once more.
FACTOR = 2.1


@pytest.mark.parametrize("kind", [TPU, GPU])
@pytest.mark.parametrize("program", PROGRAMS)
def test_rehearsal_has_the_figures_by_hand(program: str, kind: str) -> None:
    by_hand = PROGRAMS[program](mesh_of(kind))
    found = gda.rehearse(by_hand.fun, *by_hand.args)
    assert found.flops == by_hand.flops
    assert sent_by(found) == by_hand.sent
    shards = [each.sharding.shard_shape(each.shape) for each in jax.tree.leaves(by_hand.args)]
    sizes = [each.dtype.itemsize for each in jax.tree.leaves(by_hand.args)]
    held = sum(math.prod(shape) * size for shape, size in zip(shards, sizes, strict=True))
    assert found.argument_bytes == held
    assert by_hand.arrays / FACTOR <= memory_of(found) <= by_hand.arrays * FACTOR
