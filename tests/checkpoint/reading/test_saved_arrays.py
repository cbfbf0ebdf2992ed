"""The arrays of a checkpoint as sources."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore as ts
from damaged import limit_sizes
from hypothesis import given
from hypothesis import strategies as st
from meshes import batch
from trials import rarely

import gda
from gda.checkpoint.tree_at import Kind, open_tree


def test_an_opened_checkpoint_has_views_values_and_keys(tmp_path: Path) -> None:
    tree = {"w": batch(4, 6), "n": np.float32(3), "key": jax.random.key(7), "name": "a", "no": None}
    gda.checkpoint.save(tmp_path, tree)
    opened = open_tree(tmp_path, 10)
    assert (opened.kind, opened.url) == (Kind.CHECKPOINT, str(tmp_path))
    found = opened.tree
    assert repr(found["w"]) == (
        "LazyArray(shape=(4, 6), dtype=float32, made_of=float32[4,6] at ['w'])"
    )
    np.testing.assert_array_equal(np.asarray(found["w"].T[1:]), tree["w"].T[1:])
    assert (type(found["n"]), found["n"], found["name"], found["no"]) == (np.float32, 3, "a", None)
    assert jax.random.key_data(found["key"]).tolist() == [0, 7]


def test_a_checkpoint_that_is_replaced_meanwhile(tmp_path: Path) -> None:
    gda.checkpoint.save(tmp_path, {"w": batch(4, 6)})
    view = open_tree(tmp_path, 10).tree["w"]
    gda.checkpoint.save(tmp_path, {"w": batch(4, 6)}, overwrite=True)
    with pytest.raises(RuntimeError, match="was overwritten while it was being read"):
        np.asarray(view)


@st.composite
def blocks(draw: Any) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    shape = draw(st.lists(st.integers(0, 9), max_size=3).map(tuple))
    starts = [draw(st.integers(0, n)) for n in shape]
    ends = [draw(st.integers(i, n)) for i, n in zip(starts, shape, strict=True)]
    return shape, tuple(map(slice, starts, ends))


@rarely(2)
@given(blocks(), st.sampled_from([np.int8, np.float32]), st.booleans(), st.booleans())
def test_any_block(
    drawn: tuple[Any, Any], dtype: Any, is_compressed: bool, is_transposed: bool
) -> None:
    shape, index = drawn
    data = np.random.default_rng(0).integers(0, 99, shape).astype(dtype)
    store = ts.KvStore.open("memory://").result()
    with pytest.MonkeyPatch.context() as patch:
        limit_sizes(patch, 256, 64, 256)
        save_as = {"compression": "zstd"} if is_compressed else {}
        gda.checkpoint.save(store / "a/", {"w": data, "other": data}, **save_as)
        view = open_tree(store / "a/", 10).tree["w"][index]
        found = np.asarray(view.T if is_transposed else view)
    expected = data[index].T if is_transposed else data[index]
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == dtype
