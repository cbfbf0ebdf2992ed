"""Tensors of files that are read by rows, against the arrays that were written."""

import os
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from leaks import no_file_is_left_open  # noqa: F401, of every test
from meshes import batch, mesh_of
from safetensors.numpy import save_file

import gda
from gda.arrays.construction import reading_by_rows
from gda.storage import safetensors as storage
from gda.storage.safetensors import open_safetensors

MESH = mesh_of({"x": 4, "y": 2})


def requests(monkeypatch: pytest.MonkeyPatch, most: int | None = None) -> list[str]:
    """Return the list to which every read of a file adds its thread; reads give few bytes."""
    threads: list[str] = []
    read = os.preadv

    def counted(file: int, buffers: Any, offset: int) -> int:
        threads.append(threading.current_thread().name)
        return read(file, buffers if most is None else [buffers[0][:most]], offset)

    monkeypatch.setattr(os, "preadv", counted)
    return threads


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("x", "y"), P()])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_tensors_side_by_side_take_one_read(
    spec: P, dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {name: batch(8, 8).astype(dtype) + n for n, name in enumerate("abc")}
    save_file(values, tmp_path / "model.safetensors")
    threads = requests(monkeypatch)
    tensors = open_safetensors(tmp_path)
    loaded = gda.load_tree(tensors, MESH, spec)
    assert all(np.array_equal(loaded[name], value) for name, value in values.items())
    assert all(each.sharding == NamedSharding(MESH, spec) for each in loaded.values())
    # They are left to the thread of the caller.
    assert threads == [threading.current_thread().name]
    del threads[:]
    some = gda.load_tree([tensors["c"], tensors["a"]], MESH, spec)
    assert np.array_equal(some[0], values["c"])
    assert np.array_equal(some[1], values["a"])
    assert len(threads) == 2
    del threads[:]
    gda.load_tree(tensors, MESH, spec, max_bytes=values["a"].nbytes)
    assert len(threads) == 3


@pytest.mark.parametrize(
    ("spec", "columns", "options", "reads"),
    [
        (P("x"), 2**14, {}, 1),
        (P(("x", "y")), 2**14, {}, 1),
        (P(), 2**14, {}, 1),
        (P("x"), 2**14, {"max_bytes": 2**21}, 4),
        (P("x"), 2**14, {"max_workers": 1}, 4),
        (P("x"), 2**14, {"dtype": jnp.bfloat16}, 4),
        (P("x"), 2**14 + 1, {}, 4),  # its blocks are not aligned
    ],
)
def test_rows_of_a_large_tensor_take_one_read(
    spec: P,
    columns: int,
    options: dict[str, Any],
    reads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    value = np.arange(16 * columns, dtype=np.float32).reshape(16, columns) % 256
    save_file({"a": value}, tmp_path / "model.safetensors")
    threads = requests(monkeypatch)
    loaded = gda.load_tree(open_safetensors(tmp_path), MESH, spec, **options)["a"]
    assert np.array_equal(loaded, value)
    assert loaded.sharding == NamedSharding(MESH, spec)
    assert len(threads) == reads


@pytest.mark.parametrize("options", [{}, {"max_bytes": 100}, {"max_workers": 3}])
def test_trees_of_all_kinds(options: dict[str, int], tmp_path: Path) -> None:
    values = {
        "scalar": np.array(3, np.int32),
        "empty": np.zeros((0, 4), np.float32),
        "odd": np.arange(3, dtype=np.uint8),
        "rank3": batch(8, 6).reshape(4, 4, 3),
        "large": np.arange(2**19, dtype=np.float32),
        "wide": np.arange(4 * 2**14, dtype=np.float32).reshape(4, -1),
    }
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    save_file(dict(list(values.items())[::2]), files[0])
    save_file(dict(list(values.items())[1::2]), files[1])
    done: list[tuple[int, int]] = []
    given = {"read": open_safetensors(files), "number": 3}

    def spec_of(path: str, leaf: jax.ShapeDtypeStruct) -> P:
        return P("x") if leaf.shape[:1] in ((4,), (2**19,)) else P()

    found = gda.load_tree(given, MESH, spec_of, progress=lambda *each: done.append(each), **options)
    assert found["number"] == 3
    for name, value in values.items():
        assert np.array_equal(found["read"][name], value)
        assert found["read"][name].dtype == value.dtype
    assert done[-1][0] == done[-1][1] == sum(value.nbytes for value in values.values())


def test_a_cast_of_what_does_not_fit_names_the_tensor(tmp_path: Path) -> None:
    values = {"a": batch(8, 6), "b": np.full((8, 6), 1e30, np.float32), "c": np.arange(8)}
    save_file(values, tmp_path / "model.safetensors")
    tensors = open_safetensors(tmp_path)
    cast = gda.load_tree({"a": tensors["a"], "c": tensors["c"]}, MESH, P("x"), dtype=jnp.bfloat16)
    assert np.array_equal(cast["a"], values["a"].astype(jnp.bfloat16))
    assert cast["c"].dtype == np.int32
    with pytest.raises(gda.DoesNotFitError, match=r"value 1.0.*e\+30 at \(0, 0\)") as caught:
        gda.load_tree(tensors, MESH, P("x"), dtype=np.float16)
    assert "gda: at b of the tree" in caught.value.__notes__


def test_reads_that_give_less_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {name: batch(8, 6) + n for n, name in enumerate("ab")}
    save_file(values, tmp_path / "model.safetensors")
    requests(monkeypatch, most=50)
    found = gda.load_tree(open_safetensors(tmp_path), MESH, P("x"))
    assert all(np.array_equal(found[name], value) for name, value in values.items())


def test_an_error_names_the_tensor_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({name: batch(8, 6) for name in "abc"}, tmp_path / "model.safetensors")
    read = storage.SafetensorsTensor._read

    def broken(tensor: Any, file: int, out: Any, start: int) -> None:
        if tensor.name == "b":
            raise OSError("broken disk")
        read(tensor, file, out, start)

    monkeypatch.setattr(storage.SafetensorsTensor, "_read", broken)
    # All three are read together, which does not tell whose bytes are missing.
    monkeypatch.setattr(reading_by_rows, "read_together", lambda parts: 1 / 0)
    with pytest.raises(OSError, match="broken disk") as caught:
        gda.load_tree(open_safetensors(tmp_path), MESH, P("x"))
    assert "gda: at b of the tree" in caught.value.__notes__
    assert any("reading index [0:8, 0:6]" in note for note in caught.value.__notes__)


@pytest.mark.processes(2, devices=4)
def test_processes_read_rows_that_they_hold(shared_tmp_path: Path) -> None:
    values = {name: batch(8, 8) + n for n, name in enumerate("abc")}
    values |= {
        name: np.arange(2**20, dtype=np.float32).reshape(8, -1) + n for n, name in enumerate("de")
    }
    path = shared_tmp_path / "model.safetensors"
    if jax.process_index() == 0:
        save_file(values, path)
    gda.check_processes_agree({}, name="saved")
    specs = {"a": P("x"), "b": P(None, "x"), "c": P(), "d": P("x"), "e": P("y")}
    found = gda.load_tree(open_safetensors(path), mesh_of({"x": 4, "y": 2}), specs)
    for name, value in values.items():
        assert found[name].sharding.spec == specs[name]
        assert np.array_equal(found[name].gather(), value)
