"""Checkpoints of arrays that the mesh does not divide: files have their elements only.

Any size on any mesh is in tests/test_padded_roundtrip.py.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
import zarr
from damaged import limit_sizes
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import batch, mesh_of

import gda
from gda import PaddedArray
from gda.checkpoint import inspect, restore, save

DATA = {"large": batch(37, 9), "small": batch(5, 3) + 1000, "even": batch(8, 2), "one": batch(1, 1)}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_sizes(monkeypatch, 256, 64, 256)


def padded(data: np.ndarray, mesh: Mesh, spec: P, fill: float = np.nan) -> PaddedArray:
    return PaddedArray.from_callback(
        data.shape, mesh, spec, lambda index: data[index], dtype=data.dtype, fill=fill
    )


def padded_tree(mesh: Mesh, spec: P, fill: float = np.nan) -> dict[str, PaddedArray]:
    return {name: padded(data, mesh, spec, fill) for name, data in DATA.items()}


def check_equal(tree: dict[str, Any]) -> None:
    for name, data in DATA.items():
        np.testing.assert_array_equal(np.asarray(tree[name]), data, err_msg=name)


def files_of(path: Path) -> dict[str, bytes]:
    """Return the files of the data of a checkpoint, by name; the manifest has the date."""
    (data,) = path.glob("data-*")
    return {file.name: file.read_bytes() for file in data.rglob("*") if file.is_file()}


def test_files_are_the_same_whatever_the_padding_was(auto_mesh: Mesh, tmp_path: Path) -> None:
    files = []
    for number, fill in enumerate((0, np.nan, 7e7)):
        save(tmp_path / str(number), padded_tree(auto_mesh, P("x", "y"), fill))
        files.append(files_of(tmp_path / str(number)))
    assert files[0] == files[1] == files[2]
    # Of a shape that divides they are those of a GlobalArray.
    even = {"a": padded(batch(8, 16), auto_mesh, P("x", "y"))}
    save(tmp_path / "even", even)
    save(tmp_path / "plain", {"a": gda.GlobalArray.from_array(even["a"].array)})
    assert files_of(tmp_path / "even") == files_of(tmp_path / "plain")


def test_other_tools_see_the_elements_alone(auto_mesh: Mesh, tmp_path: Path) -> None:
    save(tmp_path, padded_tree(auto_mesh, P("x", "y")))
    contents = inspect(tmp_path)
    (stored,) = [array for array in contents.arrays if array.shape == (37, 9)]
    where = f"{contents.data}/{stored.name}"
    np.testing.assert_array_equal(zarr.open_array(where, mode="r")[:], DATA["large"])
    opened = ts.open({"driver": "zarr3", "kvstore": f"file://{where}/"}).result()
    np.testing.assert_array_equal(opened.read().result(), DATA["large"])
    # By zarr's standard a chunk is stored whole; beyond the shape it has the fill value.
    last = np.fromfile(f"{where}/{stored.grid.key(stored.grid.num_chunks - 1)}", "<f4", 10)
    assert stored.grid.shape_within(stored.grid.num_chunks - 1) == (1, 4)
    np.testing.assert_array_equal(last[:4], DATA["large"][36, 5:])


def test_templates(mesh: Mesh, tmp_path: Path) -> None:
    saved = padded_tree(mesh, P("x"))
    seen: dict[int, int] = {}
    save(tmp_path, saved, progress=seen.__setitem__)
    assert max(seen) == seen[max(seen)]
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), saved
    )
    for like in (saved, abstract):
        tree = restore(tmp_path, like)
        assert {type(array) for array in tree.values()} == {PaddedArray}
        assert jax.tree.structure(tree) == jax.tree.structure(saved)
        assert tree["large"].sharding == saved["large"].sharding
        check_equal(tree)
    other = mesh_of({"x": 3})
    check_equal(restore(tmp_path, gda.abstract(saved, other, P("x"))))
    shapes = {
        name: jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=NamedSharding(mesh, P("x")))
        for name, data in DATA.items()
    }
    tree = restore(tmp_path, shapes, pad=True)
    check_equal(tree)
    assert isinstance(tree["even"], jax.Array)
    assert isinstance(tree["small"], PaddedArray)
    half = padded(DATA["small"].astype(np.float16), mesh, P("x"))
    cast = restore(tmp_path, {"small": half}, partial=True, cast=True)["small"]
    assert cast.dtype == np.float16
    np.testing.assert_array_equal(cast, DATA["small"].astype(np.float16))


def test_padded_arrays_that_do_not_fit(mesh: Mesh, tmp_path: Path) -> None:
    save(tmp_path, padded_tree(mesh, P("x")))
    with pytest.raises(ValueError, match="37 is not divisible by 4"):
        restore(tmp_path, mesh=mesh, specs=P("x"))
    like = {"small": padded(batch(6, 3), mesh, P("x"))}  # as long with its padding
    with pytest.raises(ValueError, match=r"it has shape \(5, 3\), and like has \(6, 3\)"):
        restore(tmp_path, like, partial=True)
    wrong = PaddedArray(jax.device_put(jnp.ones(16), NamedSharding(mesh, P("x"))), (5,))
    with pytest.raises(ValueError, match=r"has the padded shape \(8,\)") as caught:
        save(tmp_path, {"a": wrong}, overwrite=True)
    assert "a" in caught.value.__notes__[0]
    check_equal(restore(tmp_path))


def test_keys(mesh: Mesh, tmp_path: Path) -> None:
    keys = jax.random.split(jax.random.key(3), 5)
    save(tmp_path, PaddedArray.from_callback((5,), mesh, P("x"), lambda index: keys[index]))
    restored = restore(tmp_path, mesh=mesh, specs=P("x"), pad=True)
    assert restored.padded_shape == (8,)
    assert restored.fingerprint() == gda.fingerprint(keys)
    assert isinstance(restore(tmp_path, mesh=mesh_of({"x": 5}), specs=P("x")), gda.GlobalArray)
