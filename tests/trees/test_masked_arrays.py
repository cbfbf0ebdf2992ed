"""A masked array is its data if no value is masked, and refused otherwise: one rule for all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import batch, mesh_of

import gda
from gda.checkpoint import PerProcess

MESH = mesh_of({"x": 4, "y": 2})
DATA = batch(8, 8)


def saved(tree: Any, path: Path) -> Any:
    gda.checkpoint.save(path, {"w": tree}, overwrite=True)
    return gda.checkpoint.restore(path)["w"]


def in_a_file(array: Any, path: Path) -> Any:
    gda.storage.save_safetensors(path, {"w": array})
    return gda.storage.open_safetensors(path)["w"][...]


def offered(array: Any) -> Any:
    with gda.offer({"w": array}) as offer:
        return gda.pull(offer.address)["w"]


def stored(target: Any) -> Any:
    gda.store(gda.GlobalArray.from_source(DATA, MESH, P("x")), target)
    return target


def compared(array: Any, path: Path) -> Any:
    gda.checkpoint.save(path, {"w": DATA}, overwrite=True)
    return DATA if gda.checkpoint.diff(path, {"w": array}).are_equal else None


FUNCTIONS: dict[str, Callable[[Any, Path], Any]] = {
    "save": lambda array, path: saved(array, path / "s"),
    "save of a view": lambda array, path: saved(gda.storage.lazy(array), path / "s"),
    "save of PerProcess": lambda array, path: saved(PerProcess(array), path / "s").value,
    "save_safetensors": lambda array, path: in_a_file(array, path / "w.safetensors"),
    "store": lambda array, _: stored(array.copy()),
    "offer": lambda array, _: offered(array),
    "diff": lambda array, path: compared(array, path / "s"),
    "load_tree": lambda array, _: gda.load_tree({"w": array}, MESH, P("x"))["w"],
    "from_source": lambda array, _: gda.GlobalArray.from_source(array, MESH, P("x")),
    "from_callback": lambda array, _: gda.GlobalArray.from_callback(
        (8, 8), MESH, P("x"), array.__getitem__
    ),
    "from_process_local": lambda array, _: gda.GlobalArray.from_process_local(array, MESH, P("x")),
    "PaddedArray.from_source": lambda array, _: gda.PaddedArray.from_source(array, MESH, P("x")),
    "stack": lambda array, _: gda.storage.stack([array])[0],
    "prefetch": lambda array, _: next(gda.prefetch([array], MESH, P("x"))),
    "fingerprint": lambda array, _: (
        DATA if gda.fingerprint(array) == gda.fingerprint(DATA) else None
    ),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_masked_array_is_refused_if_a_value_is_masked(
    function: Callable[[Any, Path], Any], tmp_path: Path
) -> None:
    for mask in (None, np.zeros(DATA.shape, bool)):
        assert np.array_equal(function(np.ma.array(DATA, mask=mask), tmp_path), DATA)
    with pytest.raises(TypeError, match="masked array"):
        np.asarray(function(np.ma.array(DATA, mask=np.eye(8, dtype=bool)), tmp_path))


def test_a_traced_source_is_told_as_one() -> None:
    def load(x: jax.Array) -> Any:
        return gda.load_tree({"w": x}, MESH, P("x"))["w"]

    with pytest.raises(jax.errors.UnexpectedTracerError, match="source is being traced"):
        jax.jit(load)(DATA)
