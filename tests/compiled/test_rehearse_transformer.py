"""The numbers of ``examples/rehearse_transformer.py``, from formulas by hand."""

from typing import Any

import numpy as np
import pytest
from jax.sharding import Mesh
from meshes import mesh_of
from rehearsed_programs import example, replicated_elements, sent_by, sharded_elements, transformer

import gda

SHAPE = {"data": 4, "model": 2}
SMALL = example("2, 256, 4, 512, 1024", "8, 128")


def tiled(*shape: int) -> int:
    """Return the elements in tiles of 8 x 128, in the better order of the last two dimensions."""
    *rest, a, b = shape
    return int(np.prod(rest)) * min(
        -(-rows // 8) * 8 * (-(-columns // 128) * 128) for rows, columns in [(a, b), (b, a)]
    )


def check_forward(model: Any, mesh: Mesh) -> gda.Rehearsal:
    """Check the communication and the operations of the forward pass."""
    known = transformer(mesh, model)
    found = gda.rehearse(known.forward, *known.forward_args)
    assert sent_by(found) == known.sent, found.collectives
    rows = model.SEQUENCES * model.TOKENS
    products = 2 * rows * (sharded_elements(model) - model.VOCABULARY * model.WIDTH)
    scores = 4 * rows * model.TOKENS * model.WIDTH * model.LAYERS
    assert found.flops == (products + scores) / mesh.size
    if mesh.devices.flat[0].platform != "tpu":  # where arrays are in tiles
        assert found.argument_bytes == known.argument_bytes
    return found


@pytest.mark.topology
def test_forward_pass_on_tpus() -> None:
    model = example("2, 1024, 8, 2816, 4096", "8, 512")
    check_forward(model, gda.rehearsal_mesh("v5e:4x4", {"data": 4, "model": 4}))


@pytest.mark.topology("gpu")
def test_forward_pass_on_gpus_of_two_hosts_and_on_cpus() -> None:
    found = check_forward(SMALL, gda.rehearsal_mesh("h100:2x4", SHAPE))
    slow = {each.axes: each.nbytes_slow for each in found.traffic}
    assert slow == {each.axes: (each.nbytes or 0) * ("data" in each.axes) for each in found.traffic}
    check_forward(SMALL, mesh_of(SHAPE))


@pytest.mark.topology
def test_step_of_seven_billion_parameters_fits_on_256_devices() -> None:
    model = example()
    mesh = gda.rehearsal_mesh("v5e:16x16", {"data": 64, "model": 4})
    step, args = model.step(mesh)
    found = gda.rehearse(step, *args)
    assert found.fits, found
    assert sharded_elements(model) + replicated_elements(model) == 6_738_415_616

    width, by_model = model.WIDTH // 64, model.WIDTH // 4
    matrices = model.LAYERS * (4 * tiled(width, by_model) + 3 * tiled(width, model.MLP // 4))
    words = 2 * tiled(width, model.VOCABULARY // 4)
    norms = replicated_elements(model)
    step_number, tokens = 512, 2 * 4 * model.TOKENS * 4
    state_bytes = 3 * 4 * (matrices + words + norms) + step_number
    assert found.argument_bytes == state_bytes + tokens
    assert found.aliased_bytes == state_bytes, "the whole state is donated"
    assert found.undonated_bytes == 0

    # The backward pass begins from the input of each layer.
    saved = model.LAYERS * 4 * model.TOKENS * model.WIDTH * 2
    assert found.temporary_bytes is not None
    assert found.peak_bytes is not None
    assert saved < found.temporary_bytes
    assert saved + state_bytes < found.peak_bytes

    # Each gradient of a matrix is summed over 'data', and each device keeps its shard.
    assert found.collectives is not None
    scattered = [each for each in found.collectives if each.kind == "reduce-scatter"]
    assert {each.axes for each in scattered} == {("data",)}
    elements = sum(each.nbytes * (each.count or 0) // 2 for each in scattered)
    assert elements >= (sharded_elements(model) - model.VOCABULARY * model.WIDTH) // 4
    assert {each.axes for each in found.traffic} == {("data",), ("model",)}


@pytest.mark.topology("gpu")
def test_step_on_gpus_updates_its_state_in_place() -> None:
    model, small = SMALL, transformer(gda.rehearsal_mesh("gb200:2x4", SHAPE), SMALL)
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
