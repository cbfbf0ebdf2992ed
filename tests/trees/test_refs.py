"""A ``jax.Ref`` changes in place: functions take its value at the call, or refuse it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import batch, mesh_of

import gda

MESH = mesh_of({"x": 4, "y": 2})
SHARDING = NamedSharding(MESH, P("x"))
DATA = batch(8, 8)


def of(value: float) -> jax.Array:
    return jax.device_put(np.full((1024, 1024), value, np.float32), SHARDING)


def test_a_background_save_has_the_value_at_the_call(tmp_path: Path) -> None:
    ref = jax.new_ref(of(1))
    pending = gda.checkpoint.save_async(tmp_path / "saved", {"r": ref})
    ref[...] = of(2)
    pending.result()
    assert np.unique(gda.checkpoint.restore(tmp_path / "saved")["r"]).tolist() == [1]


def test_a_run_saves_the_value_of_the_step(tmp_path: Path) -> None:
    ref = jax.new_ref(of(1))
    run = gda.checkpoint.Run(tmp_path / "run", every=1)
    run.save(1, {"r": ref})
    for value in range(2, 5):
        ref[...] = of(value)
    run.close(1, {"r": ref})
    assert np.unique(gda.checkpoint.restore(f"{tmp_path / 'run'}@1")["r"]).tolist() == [1]


def test_a_view_has_the_value_of_its_making() -> None:
    ref = jax.new_ref(jax.device_put(DATA, SHARDING))
    view, pair = gda.storage.lazy(ref), gda.storage.stack([ref, ref])
    ref[...] = jax.device_put(-DATA, SHARDING)
    assert np.array_equal(view, DATA)
    assert np.array_equal(pair[1], DATA)


def offered(ref: Any) -> Any:
    with gda.offer({"r": ref}) as offer:
        ref[...] = jax.device_put(-DATA, SHARDING)
        return gda.pull(offer.address)["r"]


def stored(ref: Any) -> Any:
    target = np.zeros_like(DATA)
    gda.store({"r": ref}, {"r": target})
    return target


def in_a_file(ref: Any, path: Path) -> Any:
    gda.storage.save_safetensors(path, {"r": ref})
    return gda.storage.open_safetensors(path)["r"][...]


TAKING: dict[str, Callable[[Any, Path], Any]] = {
    "load_tree": lambda ref, _: gda.load_tree({"r": ref}, MESH, P("y"))["r"],
    "from_source": lambda ref, _: gda.GlobalArray.from_source(ref, MESH, P("y")),
    "from_callback": lambda ref, _: gda.GlobalArray.from_callback((8, 8), MESH, P(), lambda _: ref),
    "padded": lambda ref, _: gda.PaddedArray.from_source(ref, MESH, P("x")),
    "to_numpy": lambda ref, _: gda.to_numpy({"r": ref})["r"],
    "offer": lambda ref, _: offered(ref),
    "store": lambda ref, _: stored(ref),
    "save_safetensors": lambda ref, path: in_a_file(ref, path / "r.safetensors"),
}


@pytest.mark.parametrize("function", TAKING.values(), ids=TAKING)
def test_the_value_of_now_is_taken(function: Callable[..., Any], tmp_path: Path) -> None:
    ref = jax.new_ref(jax.device_put(DATA, SHARDING))
    assert np.array_equal(function(ref, tmp_path), DATA)


def test_a_layout_of_a_ref_is_that_of_its_array() -> None:
    ref = jax.new_ref(jax.device_put(DATA, SHARDING))
    assert "P('x')" in str(gda.layouts({"r": ref}))


@pytest.mark.parametrize(
    "function",
    [
        lambda ref: gda.reshard_tree({"r": ref}, MESH, P("y")),
        lambda ref: gda.fingerprint({"r": ref}),
        lambda ref: gda.check_replicas_agree({"r": ref}),
        lambda ref: gda.GlobalArray.from_process_local(ref, MESH, P("x")),
        lambda ref: next(gda.prefetch([{"r": ref}], MESH, P("x"))),
    ],
)
def test_other_functions_ask_for_the_array(function: Callable[[Any], object]) -> None:
    ref = jax.new_ref(jax.device_put(DATA, SHARDING))
    with pytest.raises(TypeError, match=r"pass the array of now, ref\[\.\.\.\]"):
        function(ref)
