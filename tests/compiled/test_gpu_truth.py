"""Five programs for GPUs that are not here, against their formulas and against CPUs that are.

Every kind of the page and every program is compiled; all programs for one kind only, because each
takes a second or two.
"""

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from rehearsed_programs import (
    Rehearsed,
    convolutions,
    example,
    experts,
    replicated_elements,
    ring,
    sampler,
    sent_by,
    sharded_elements,
    transformer,
)

import gda

pytestmark = pytest.mark.topology("gpu")

SHAPE = {"data": 4, "model": 2}
MODEL = example("2, 256, 4, 512, 1024", "8, 128")
SMALL: dict[str, Callable[[Mesh], Rehearsed]] = {
    "transformer": partial(transformer, model=MODEL),
    "sampler": partial(
        sampler, layers=2, width=512, heads=8, mlp=1024, vocabulary=2048, sequences=16, tokens=256
    ),
    "experts": partial(experts, layers=2, width=256, mlp=512, rows=1024),
    "convolutions": partial(
        convolutions, channels=(32, 64), blocks=1, images=64, pixels=32, classes=16
    ),
    "ring": partial(ring, layers=2, width=256, heads=8, mlp=512, tokens=512),
}


def gpus(kind: str) -> Mesh:
    """A mesh of two hosts, which the axis ``data`` goes over."""
    return gda.rehearsal_mesh(f"{kind}:2x4", SHAPE)


def check_forward(small: Rehearsed) -> gda.Rehearsal:
    found = gda.rehearse(small.forward, *small.forward_args)
    assert sent_by(found) == small.sent, found.collectives
    assert found.argument_bytes == small.argument_bytes
    return found


@pytest.mark.parametrize("program", SMALL)
def test_forward_pass_on_gpus_and_on_cpus(program: str) -> None:
    found = check_forward(SMALL[program](gpus("h100")))
    slow = {each.axes: each.nbytes_slow for each in found.traffic}
    assert slow == {each.axes: (each.nbytes or 0) * ("data" in each.axes) for each in found.traffic}

    devices = np.array(jax.devices()[:8]).reshape(*SHAPE.values())
    on_cpus = check_forward(SMALL[program](Mesh(devices, tuple(SHAPE))))
    assert on_cpus.flops == found.flops


def test_step_of_a_transformer_updates_its_state_in_place() -> None:
    model, small = MODEL, SMALL["transformer"](gpus("gb200"))
    found = gda.rehearse(small.step, *small.args)
    state = 3 * 4 * (sharded_elements(model) // 8 + replicated_elements(model)) + 4
    tokens = 2 * model.SEQUENCES // 4 * model.TOKENS * 4
    assert found.argument_bytes == state + tokens
    assert found.aliased_bytes == state
    assert found.undonated_bytes == 0
    # Each gradient of a matrix is summed over 'data', and each device keeps its shard.
    assert found.collectives is not None
    scattered = [each for each in found.collectives if each.kind == "reduce-scatter"]
    assert {each.axes for each in scattered} == {("data",)}
    nbytes = sum(each.nbytes_total or 0 for each in scattered)
    assert nbytes == 2 * sharded_elements(model) // 2
