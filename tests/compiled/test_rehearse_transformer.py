"""The numbers of ``examples/rehearse_transformer.py`` on TPUs, from formulas by hand."""

import numpy as np
import pytest
from rehearsed_programs import example, replicated_elements, sent_by, sharded_elements, transformer

import gda

pytestmark = pytest.mark.topology


def tiled(*shape: int) -> int:
    """Return the elements in tiles of 8 x 128, in the better order of the last two dimensions."""
    *rest, a, b = shape
    return int(np.prod(rest)) * min(
        -(-rows // 8) * 8 * (-(-columns // 128) * 128) for rows, columns in [(a, b), (b, a)]
    )


def test_forward_pass_of_a_small_model() -> None:
    model = example("2, 1024, 8, 2816, 4096", "8, 512")
    mesh = gda.rehearsal_mesh("v5e:4x4", {"data": 4, "model": 4})
    known = transformer(mesh, model)
    found = gda.rehearse(known.forward, *known.forward_args)
    assert sent_by(found) == known.sent, found.collectives
    rows = model.SEQUENCES * model.TOKENS
    products = 2 * rows * (sharded_elements(model) - model.VOCABULARY * model.WIDTH)
    scores = 4 * rows * model.TOKENS * model.WIDTH * model.LAYERS
    assert found.flops == (products + scores) / mesh.size


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


def test_step_of_seven_billion_parameters_does_not_fit_on_16_devices() -> None:
    model = example()
    step, args = model.step(gda.rehearsal_mesh("v5e:4x4", {"data": 4, "model": 4}))
    found = gda.rehearse(step, *args)
    assert found.fits is False
    assert found.capacity_bytes is not None
    assert found.peak_bytes is not None
    assert found.peak_bytes > model.LAYERS * 64 * model.TOKENS * model.WIDTH * 2
    assert found.peak_bytes > found.capacity_bytes
