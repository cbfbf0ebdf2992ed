"""The arrays of a checkpoint as sources."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore as ts
from damaged import Damaged, flip, limit_sizes, make_tree, save_tiny
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, mesh_of, one_folder
from trials import rarely

import gda
from gda.checkpoint.format.files_at import FileKind
from gda.checkpoint.tree_at import open_tree


def test_an_opened_checkpoint_has_views_values_and_keys(tmp_path: Path) -> None:
    tree = {"w": batch(4, 6), "n": np.float32(3), "key": jax.random.key(7), "name": "a", "no": None}
    gda.checkpoint.save(tmp_path, tree)
    opened = open_tree(tmp_path, 10)
    assert (opened.kind, opened.url) == (FileKind.CHECKPOINT, str(tmp_path))
    found = gda.checkpoint.open(tmp_path)
    assert str(found) == str(opened.tree)
    assert repr(found["w"]) == "LazyArray(shape=(4, 6), dtype=float32)"
    np.testing.assert_array_equal(np.asarray(found["w"].T[1:]), tree["w"].T[1:])
    assert (type(found["n"]), found["n"], found["name"], found["no"]) == (np.float32, 3, "a", None)
    assert jax.random.key_data(found["key"]).tolist() == [0, 7]


def test_a_checkpoint_that_is_replaced_meanwhile(tmp_path: Path) -> None:
    gda.checkpoint.save(tmp_path, {"w": batch(4, 6)})
    view = open_tree(tmp_path, 10).tree["w"]
    gda.checkpoint.save(tmp_path, {"w": batch(4, 6)}, overwrite=True)
    with pytest.raises(RuntimeError, match="was overwritten while it was being read"):
        np.asarray(view)


def test_leaves_are_renamed_and_loaded_onto_another_mesh(mesh: Mesh, tmp_path: Path) -> None:
    key = jax.random.key(3)
    saved = {
        "layers": [{"w": cut(batch(8, 4) + n, mesh, P("x", "y"))} for n in range(2)],
        "padded": gda.PaddedArray.from_source(batch(5, 3), mesh, P("x")),
        "key": jax.device_put(jax.random.split(key, 8), NamedSharding(mesh, P("x"))),
        "step": 7,
    }
    with pytest.MonkeyPatch.context() as patch:
        limit_sizes(patch, 64, 32, 64)
        gda.checkpoint.save(tmp_path / "run", saved)
    tree = gda.checkpoint.open(tmp_path / "run")
    first, second = [layer["w"] for layer in tree["layers"]]
    renamed = {
        "kernel": gda.storage.stack([first.T, second.T]),
        "row": first[1],
        "padded": tree["padded"],
        "rng": tree["key"],
        "step": tree["step"],
    }
    half = mesh_of({"z": 2})
    specs = {"kernel": P(None, "z"), "row": P("z"), "padded": P(), "rng": P("z"), "step": None}
    expected = {
        "kernel": np.stack([batch(8, 4).T, batch(8, 4).T + 1]),
        "row": batch(8, 4)[1],
        "padded": batch(5, 3),
    }
    loaded = gda.load_tree(renamed, half, specs, plain=True)
    gda.checkpoint.save(tmp_path / "renamed", renamed)
    restored = gda.checkpoint.restore(tmp_path / "renamed")
    for found in loaded, restored:
        assert found.pop("step") == 7
        data = jax.random.key_data(found.pop("rng"))
        np.testing.assert_array_equal(data, jax.random.key_data(jax.random.split(key, 8)))
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert loaded["kernel"].sharding.spec == P(None, "z")


@pytest.mark.processes(2, devices=4)
def test_each_process_reads_the_blocks_that_it_needs() -> None:
    mesh, data = mesh_of({"x": 4, "y": 2}), batch(512, 512)  # of several chunks
    path = one_folder() + "/run"
    saved = {"w": cut(data, mesh, P("x", "y")), "key": jax.random.key(7)}
    gda.checkpoint.save(path, saved)
    tree = gda.checkpoint.open(path)
    assert jax.random.key_data(tree["key"]).tolist() == [0, 7]
    for read_once in (False, True):
        loaded = gda.load_tree({"t": tree["w"].T}, mesh, P(None, "x"), read_once=read_once)
        np.testing.assert_array_equal(loaded["t"].gather(), data.T)


def test_a_checkpoint_is_saved_over_itself(tmp_path: Path) -> None:
    gda.checkpoint.save(tmp_path, {"w": batch(4, 6), "b": batch(3)})
    tree = gda.checkpoint.open(tmp_path)
    gda.checkpoint.save(tmp_path, {"kernel": tree["w"].T}, overwrite=True)
    np.testing.assert_array_equal(gda.checkpoint.restore(tmp_path)["kernel"], batch(4, 6).T)


def test_a_read_compares_checksums(tmp_path: Path) -> None:
    save_tiny(tmp_path / "run", make_tree())
    damaged = Damaged(tmp_path / "run")
    tree = gda.checkpoint.open(tmp_path / "run")
    chunk = next(file for file in damaged.chunks if "w" in damaged.leaves_in(file))
    chunk.write_bytes(flip(chunk.read_bytes(), 0))
    for read in (
        lambda: np.asarray(tree["w"]),
        lambda: gda.load_tree({"a": tree["w"].T}, mesh_of({"x": 2}), P("x")),
        lambda: gda.checkpoint.save(tmp_path / "other", {"a": tree["w"][:2]}),
    ):
        with pytest.raises(gda.checkpoint.CorruptionError, match=r"w, chunk .* is damaged"):
            read()
    chunk.unlink()
    with pytest.raises(gda.checkpoint.CorruptionError, match=r"w, chunk .* is missing"):
        np.asarray(tree["w"])
    with pytest.raises(gda.checkpoint.CheckpointNotFoundError, match="no such directory"):
        gda.checkpoint.open(tmp_path / "none")


@st.composite
def blocks(draw: Any) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    shape = draw(st.lists(st.integers(0, 9), max_size=3).map(tuple))
    starts = [draw(st.integers(0, n)) for n in shape]
    ends = [draw(st.integers(i, n)) for i, n in zip(starts, shape, strict=True)]
    return shape, tuple(map(slice, starts, ends))


@rarely(2)
@given(blocks(), st.sampled_from([np.int8, np.float32]), st.booleans())
def test_any_block(drawn: tuple[Any, Any], dtype: Any, is_transposed: bool) -> None:
    shape, index = drawn
    data = np.random.default_rng(0).integers(0, 99, shape).astype(dtype)
    store = ts.KvStore.open("memory://").result()
    with pytest.MonkeyPatch.context() as patch:
        limit_sizes(patch, 256, 64, 256)
        gda.checkpoint.save(store / "a/", {"w": data, "other": data})
        view = open_tree(store / "a/", 10).tree["w"][index]
        found = np.asarray(view.T if is_transposed else view)
    expected = data[index].T if is_transposed else data[index]
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == dtype
