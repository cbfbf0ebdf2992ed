"""One rule of casts in all functions: a value that does not fit is named with path and index."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import batch

import gda
from gda.checkpoint.converting import convert

WIDE = np.full((8, 2), 3.0, np.float32)
WIDE[5, 1] = 70000  # float16 ends at 65504
LONG = np.full((8, 2), 3)
LONG[5, 1] = 300


def loaded(data: Any, dtype: Any, mesh: Mesh, path: Path) -> None:
    gda.load_tree({"a": {"w": data}}, mesh, P("x"), dtype={"a": {"w": dtype}})


def loaded_padded(data: Any, dtype: Any, mesh: Mesh, path: Path) -> None:
    gda.load_tree({"a": {"w": data[:7]}}, mesh, P("x"), dtype={"a": {"w": dtype}}, pad=True)


def loaded_views(data: Any, dtype: Any, mesh: Mesh, path: Path) -> None:
    view = gda.storage.lazy(np.ascontiguousarray(data.T)).T.astype(dtype)
    gda.load_tree({"a": {"w": view}}, mesh, P("x"))


def restored(data: Any, dtype: Any, mesh: Mesh, path: Path) -> None:
    gda.checkpoint.save(path / "c", {"a": {"w": data}})
    like = jax.ShapeDtypeStruct((8, 2), dtype, sharding=NamedSharding(mesh, P("x")))
    gda.checkpoint.restore(path / "c", {"a": {"w": like}}, cast=True)


def restored_as_numpy(data: Any, dtype: Any, mesh: Mesh, path: Path) -> None:
    gda.checkpoint.save(path / "c", {"a": {"w": data}})
    gda.checkpoint.restore(path / "c", {"a": {"w": np.zeros((8, 2), dtype)}}, cast=True)


TREES = [
    loaded,
    loaded_padded,
    loaded_views,
    restored,
    restored_as_numpy,
]


@pytest.mark.parametrize("function", TREES, ids=lambda function: function.__name__)
def test_the_value_is_named_with_path_and_index(
    function: Callable[..., None], mesh: Mesh, tmp_path: Path
) -> None:
    for data, dtype in [(WIDE, np.float16), (LONG, np.int8)]:
        with pytest.raises(gda.DoesNotFitError) as caught:
            function(data, dtype, mesh, tmp_path / str(data.dtype))
        # A view names the element of its source, which is transposed.
        place = "(1, 5)" if function is loaded_views else "(5, 1)"
        assert f"the value {data[5, 1]} at {place} " in str(caught.value)
        assert "at a/w of the tree" in " ".join(caught.value.__notes__)


def test_a_pull_names_the_value_that_the_offer_cannot_send(mesh: Mesh) -> None:
    with (
        gda.offer({"a": {"w": WIDE}, "c": batch(2).astype(np.complex64)}) as offer,
        pytest.raises(gda.DoesNotFitError, match=r"its array at a/w .* at \(5, 1\) of"),
    ):
        gda.pull(offer.address, mesh, P(), dtype="float16")


def test_a_conversion_names_the_value(tmp_path: Path) -> None:
    gda.checkpoint.save(tmp_path / "a", {"a": {"w": WIDE}})
    with pytest.raises(gda.DoesNotFitError, match=r"value 70000.0 at \(5, 1\)") as caught:
        convert(str(tmp_path / "a"), str(tmp_path / "b"), dtype="float16")
    assert "a/w" in " ".join(caught.value.__notes__)
    assert not (tmp_path / "b/manifest.json").exists()


MIXED = {
    "w": batch(8, 2),
    "half": batch(8).astype(np.float16),
    "ids": np.arange(512, dtype=np.int32),
    "mask": np.tri(4, dtype=bool),
    "rope": np.exp(1j * np.arange(3)).astype(np.complex64),
    "step": 3,
}


def test_a_dtype_for_a_tree_is_for_its_floats(mesh: Mesh, tmp_path: Path) -> None:
    gda.checkpoint.save(tmp_path / "a", MIXED)
    convert(str(tmp_path / "a"), str(tmp_path / "b"), dtype="bf16")
    with gda.offer(MIXED) as offer:
        trees = [
            gda.load_tree(MIXED, mesh, P(), dtype="bf16"),
            gda.load_tree({"m": MIXED}, mesh, P(), dtype={"m": jnp.bfloat16})["m"],
            gda.pull(offer.address, mesh, P(), dtype="bf16"),
            gda.checkpoint.restore(tmp_path / "b"),
        ]
    kept = {"ids": np.int32, "mask": np.bool_, "rope": np.complex64}
    for tree in trees:
        assert {name: tree[name].dtype for name in kept} == kept
        assert tree["w"].dtype == tree["half"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(tree["ids"], MIXED["ids"])
        np.testing.assert_array_equal(tree["rope"], MIXED["rope"])
        assert tree["step"] == 3


def test_complex_numbers_get_the_precision_of_the_floats(auto_mesh: Mesh, tmp_path: Path) -> None:
    tree = {"w": np.ones(2), "rope": np.full(2, 1 + 2j)}
    gda.checkpoint.save(tmp_path / "a", tree)
    convert(str(tmp_path / "a"), str(tmp_path / "b"), dtype="float32")
    with jax.enable_x64(True), gda.offer(tree) as offer:
        trees = [
            gda.load_tree(tree, auto_mesh, P(), dtype="float32"),
            gda.pull(offer.address, auto_mesh, P(), dtype="float32"),
            gda.checkpoint.restore(tmp_path / "b"),
        ]
        for found in trees:
            assert (found["w"].dtype, found["rope"].dtype) == (np.float32, np.complex64)
            assert found["rope"].tolist() == [1 + 2j] * 2


def test_a_tree_of_dtypes_casts_what_it_names(auto_mesh: Mesh) -> None:
    dtypes = {"w": "int8", "half": None, "ids": "float32", "mask": "uint8", "rope": None}
    tree = {**MIXED, "w": np.full(3, 2.75, np.float32)}
    loaded = gda.load_tree(tree, auto_mesh, P(), dtype={**dtypes, "step": None})
    assert loaded["w"].tolist() == [2, 2, 2]
    assert (loaded["ids"].dtype, loaded["mask"].dtype) == (np.float32, np.uint8)
    assert loaded["half"].dtype == np.float16
    assert gda.load_tree(np.arange(3), auto_mesh, P(), dtype="int8").dtype == np.int8
