"""Pickles name public modules only, so that they load after a class has moved."""

import pickle
import pickletools
from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import gda
import gda.checkpoint

GRID = gda.ShardGrid((8, 2), {"x": 4, "y": 2}, P("x"), process_of=[0, 0, 0, 0, 1, 1, 1, 1])
COLLECTIVE = gda.Collective("all-reduce", ("x",), ((4,),), ("int32",), ((4,),), ("int32",), 16, 8)
VALUES = [
    *[GRID, GRID.view(1), next(iter(gda.ReshardPlan(GRID, GRID, itemsize=4).moves()))],
    *[gda.Collectives((COLLECTIVE,), {"x": 2}), gda.Traffic(1, 128), gda.Retry(OSError)],
    *[gda.GlobalArray, gda.checkpoint.ChunkGrid((8,), (4,))],
    gda.checkpoint.ValueLeaf(("step",), 1),
    gda.checkpoint.PerProcess((1, None)),
]
ERRORS = [
    *[gda.LayoutUnknownError, gda.DoesNotFitError, gda.DisagreementError, gda.LateProcessError],
    *[gda.checkpoint.CheckpointNotFoundError, gda.checkpoint.SaveError],
]


@pytest.mark.parametrize("protocol", [2, pickle.DEFAULT_PROTOCOL])
def test_pickles_name_public_modules_only(protocol: int) -> None:
    array = gda.GlobalArray.from_array(jnp.ones(3))
    for value in [*VALUES, *(kind("why") for kind in ERRORS), array]:
        str(value)  # what is kept for the next time is pickled too, or left out
        written = pickle.dumps(value, protocol)
        strings = [argument for _, argument, _ in pickletools.genops(written)]
        modules = {text.split()[0] for text in strings if str(text).startswith("gda.")}
        assert modules <= {"gda.checkpoint"}
        again: Any = pickle.loads(written)
        assert (type(again), repr(again)) == (type(value), repr(value))
