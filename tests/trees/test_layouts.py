"""The layouts of the arrays of a tree, against JAX's shardings, and mistakes that they show."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import batch, mesh_of
from trials import rarely

import gda
from gda.testing.strategies import global_arrays

XY = {"x": 4, "y": 2}


def shape(mesh: Any, spec: Any, *sizes: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))


def rows_of(tree: Any) -> dict[str, gda.ArrayLayout]:
    return {row.path: row for row in gda.layouts(tree).arrays}


# The listed arrays.


def test_every_array_of_a_tree_has_a_row_and_other_leaves_have_none(mesh: Mesh) -> None:
    w = jax.device_put(batch(8, 6), NamedSharding(mesh, P("x", None)))
    rows = rows_of(
        {
            "layers": [{"w": w}, {"w": gda.GlobalArray.from_array(w)}],
            "padded": gda.PaddedArray.from_source(batch(5, 3), mesh, P("x")),
            "one": jnp.zeros(3, "int4"),
            "keys": jax.random.split(jax.random.key(0), 8),
            "later": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16),
            "host": np.zeros((), np.int8),
            "other": [3, np.float32(0.1), "adam", None],
        }
    )
    of_w = ((8, 6), "float32", XY, ("x",), (2, 6), 8, 2, 192, 48, None)
    assert {path: row[1:] for path, row in rows.items()} == {
        "layers/0/w": of_w,
        "layers/1/w": of_w,
        "padded": ((5, 3), "float32", XY, ("x",), (2, 3), 8, 2, 60, 24, None),
        "keys": ((8,), "key<fry>", None, None, (8,), 1, 1, 64, 64, None),
        "later": ((2, 3), "bfloat16", None, None, (2, 3), 0, 0, 12, 12, None),
        "one": ((3,), "int4", None, None, (3,), 1, 1, 2, 2, None),
        "host": ((), "int8", None, None, (), 0, 0, 1, 1, None),
    }
    assert [row.nbytes_per_device for row in rows.values()] == [64, 48, 48, 24, 12, 2, 1]
    layouts = {path: (row.layout, row.is_whole) for path, row in rows.items()}
    assert layouts["layers/0/w"] == ("P('x') on x=4,y=2", False)
    assert layouts["keys"] == ("1 device", True)
    assert layouts["later"] == ("no sharding", True)


def test_shapes_stand_for_arrays_on_devices_that_are_not_here() -> None:
    mesh: Any = AbstractMesh((64, 16), ("data", "model"))
    row = rows_of([shape(mesh, P(("model", "data")), 65536, 8192)])["0"]
    assert (row.block_shape, row.num_devices, row.num_replicas) == ((64, 8192), 1024, 1)
    padded = gda.PaddedArray.from_source(batch(5), mesh_of(XY), P("x"))
    assert rows_of([gda.abstract(padded, mesh_of(XY), P("x"))])["0"].block_shape == (2,)


def test_layouts_in_a_trace_are_known_over_explicit_axes_only(explicit_mesh: Mesh) -> None:
    found = []

    @jax.jit
    def step(tree: Any) -> Any:
        found.append(rows_of(tree)["w"].layout)
        gda.assert_sharded(tree)
        return tree

    step.eval_shape({"w": shape(explicit_mesh, P("y"), 8)})
    assert found == ["P('y') on x=4,y=2"]
    with pytest.raises(gda.LayoutUnknownError, match="over Auto axes") as caught:
        step.eval_shape({"w": shape(mesh_of(XY), P("y"), 8)})
    assert caught.value.__notes__[0] == "gda: at w of the tree"


@rarely(2)
@given(global_arrays())
def test_rows_agree_with_the_shards_of_jax(g: gda.GlobalArray) -> None:
    array = g.array
    (row,) = gda.layouts(array).arrays
    shards = array.addressable_shards
    assert (row.shape, row.dtype, row.nbytes) == (array.shape, str(array.dtype), array.nbytes)
    assert {shard.data.shape for shard in shards} == {row.block_shape}
    assert {shard.data.nbytes for shard in shards} == {row.nbytes_per_device}
    assert row.num_devices == len(array.sharding.device_set)
    replicas = Counter(shard.replica_id for shard in shards)
    assert row.num_replicas == len(replicas)
    assert row.is_whole == array.is_fully_replicated or not array.size
    assert gda.layouts(g).arrays == (row,)


# Tables.


def model(mesh: Any) -> dict[str, Any]:
    layers = [
        {"w": shape(mesh, P("x"), 4096, 1024, dtype=jnp.bfloat16), "norm": shape(mesh, P(), 4096)}
        for _ in range(32)
    ]
    return {"embed": shape(mesh, P(), 50257, 1024), "layers": layers}


def test_the_table_has_a_row_for_arrays_that_differ_in_numbers_only(mesh: Mesh) -> None:
    assert str(gda.layouts(model(mesh))).splitlines() == [
        "452.8 MiB in 65 arrays, 260.8 MiB on each device; mesh x=4,y=2",
        "",
        "array                                        spec    replicas  per device",
        "embed                   float32[50257,1024]  P()            8   196.3 MiB",
        "layers/0-31/w (x32)     bfloat16[4096,1024]  P('x')         2    64.0 MiB",
        "layers/0-31/norm (x32)  float32[4096]        P()            8   512.0 KiB",
    ]
    # Meshes are named in each row if they differ.
    tree = [shape(mesh_of({"x": 8}), P("x"), 8), shape(mesh_of(XY), P("x"), 8), jnp.zeros(1)]
    lines = str(gda.layouts(tree)).splitlines()
    assert lines[0] == "68 B in 3 arrays, 16 B on each device"
    assert [re.sub("  +", "|", line) for line in lines[2:]] == [
        "array|layout|replicas|per device",
        "1|float32[8]|P('x') on x=4,y=2|2|8 B",
        "0|float32[8]|P('x') on x=8|1|4 B",
        "2|float32[1]|1 device|1|4 B",
    ]
    assert str(gda.layouts([3, None])) == "0 B in 0 arrays, 0 B on each device"
    names = [f"{'long_name_of_a_block_' * 3}{chr(97 + i)}" for i in range(26)]
    lines = str(gda.layouts({name: shape(mesh, P("x"), 1024) for name in names})).splitlines()
    assert lines[-1] == "… 6 more, 6.0 KiB"
    assert max(map(len, lines)) <= 100


def test_the_page_has_the_table_and_the_dict_is_json(mesh: Mesh) -> None:
    page = gda.layouts({**model(mesh), "<b>": shape(mesh, P(), 0)})._repr_html_()
    assert re.findall(r"<td[^>]*>([\d.]+ [KMG]iB)</td>", page) == [
        "196.3 MiB",
        "64.0 MiB",
        "512.0 KiB",
    ]
    assert "<p>452.8 MiB in 66 arrays" in page
    assert "<b>" not in page
    assert "<table" not in gda.layouts([])._repr_html_()
    found = gda.layouts([shape(mesh, P(("x", "y")), 8), jnp.zeros(2)])
    document = json.loads(json.dumps(found.to_dict()))
    assert (document["nbytes"], document["nbytes_per_device"]) == (40, 12)
    fields = {"path": "0", "shape": [8], "mesh": XY, "spec": [["x", "y"]], "block_shape": [1]}
    assert document["arrays"][1] | fields == document["arrays"][1]
    assert document["arrays"][1].keys() == {*gda.ArrayLayout._fields}


# Other memory.


def test_the_memory_of_the_host_is_not_that_of_a_device(auto_mesh: Mesh) -> None:
    pinned = NamedSharding(auto_mesh, P("x"), memory_kind="pinned_host")
    moment = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=pinned)
    found = gda.layouts({"moment": moment, "w": shape(auto_mesh, P("x"), 8)})
    assert (found.nbytes_on_host, found.nbytes_per_device) == (32, 8)
    assert "8 B on each device, 32 B on its host; mesh " in str(found)
    assert found.arrays[0].layout == "P('x') on x=4,y=2, pinned_host"


# Golden files.


def test_a_golden_file_has_a_line_for_each_array_and_differences_are_in_words(
    tmp_path: Path, auto_mesh: Mesh, explicit_mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "layout.json"
    monkeypatch.setenv("GDA_UPDATE_GOLDEN", "1")
    gda.layouts(model(auto_mesh)).check(path)
    monkeypatch.delenv("GDA_UPDATE_GOLDEN")
    document = json.loads(path.read_text())
    assert document["arrays"]["layers/3/w"] == "bfloat16[4096,1024] P('x') on x=4,y=2"
    assert len(document["arrays"]) == 65
    gda.layouts(model(explicit_mesh)).check(str(path))
    tree = model(auto_mesh)
    for layer in tree["layers"][:16]:
        layer["w"] = shape(auto_mesh, P("y"), 4096, 1024, dtype=jnp.bfloat16)
    tree["head"] = tree.pop("embed")
    with pytest.raises(AssertionError) as caught:
        gda.layouts(tree).check(path)
    assert [line.strip() for line in str(caught.value).splitlines()] == [
        f"the layout differs from {path}:",
        "embed is gone: float32[50257,1024] P() on x=4,y=2",
        "layers/0-15/w: bfloat16[4096,1024] P('y') on x=4,y=2, not bfloat16[4096,1024] P('x') on "
        "x=4,y=2",
        "head is new: float32[50257,1024] P() on x=4,y=2",
        "if this is intended, write the file again with pytest --gda-update-golden",
    ]
    path.write_text('{"version": 1, "arrays": 3}')
    with pytest.raises(ValueError, match="is not a golden file"):
        gda.layouts(jnp.zeros(3)).check(path)
    with pytest.raises(ValueError, match="two arrays of the tree have the path 'a/b'"):
        gda.layouts({"a/b": jnp.zeros(1), "a": {"b": jnp.zeros(2)}}).check(path)


# The assertion.


def refused(tree: Any, **options: Any) -> list[str]:
    with pytest.raises(AssertionError) as caught:
        gda.assert_sharded(tree, **options)
    return str(caught.value).splitlines()


def test_arrays_that_are_whole_are_named_with_a_spec_that_shards_them(mesh: Mesh) -> None:
    tree = model(mesh)
    last = "shard them, or pass max_replicated_bytes= if they are to be whole on every device"
    assert refused(tree) == [
        "1 array of more than 1.0 MiB is not sharded over the 8 devices:",
        "  embed: float32[50257,1024], 196.3 MiB, P() on x=4,y=2; P(None, ('x', 'y')) would leave "
        "24.5 MiB",
        last,
    ]
    gda.assert_sharded(tree, max_replicated_bytes=2**28)
    del tree["embed"]
    gda.assert_sharded(tree)
    assert refused(tree, max_replicated_bytes=0) == [
        "32 arrays of more than 0 B are not sharded over the 8 devices:",
        "  layers/0-31/norm (x32): float32[4096], 16.0 KiB, P() on x=4,y=2; P(('x', 'y')) would "
        "leave 2.0 KiB",
        last,
    ]
    (_, line, _) = refused(shape(mesh, P(), 1023, 1025))
    assert line.startswith("  the array: float32[1023,1025]")
    assert line.endswith("no axis divides its sizes, but gda.PaddedArray pads them")
    many = {chr(97 + i): shape(mesh, P(), 2**20 + i) for i in range(26)}
    assert refused(many)[-2] == "  … 6 more"
    as_many_as_are_shown = dict([*many.items()][:20])
    assert len(refused(as_many_as_are_shown)) == 22


def test_an_array_on_one_device_is_whole_beside_others_on_a_mesh(mesh: Mesh) -> None:
    rest = {"w": shape(mesh, P("x"), 8)}
    forgotten = (jax.ShapeDtypeStruct((512, 1024), np.float32), jnp.zeros((512, 1024)))
    for leaf, layout in zip(forgotten, ("no sharding", "1 device"), strict=True):
        says = f"  m: float32[512,1024], 2.0 MiB, {layout}"
        assert refused({**rest, "m": leaf})[1] == f"{says}; P('y', 'x') would leave 256.0 KiB"
        assert refused({"m": leaf})[1] == says
    one = mesh_of({"x": 1})
    gda.assert_sharded([shape(one, P(), 1024, 1024), jnp.zeros((1024, 1024))])
    gda.assert_sharded([])


def test_an_error_has_the_path_and_a_function_is_no_tree(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match="10 is not divisible by 4") as caught:
        gda.assert_sharded({"a": [shape(mesh, P("y"), 8), shape(mesh, P("x"), 10)]})
    assert caught.value.__notes__ == ["gda: at a/1 of the tree"]
    with pytest.raises(TypeError, match=r"model.*; pass the shapes of its result, jax\.eval_shape"):
        gda.layouts(model)
