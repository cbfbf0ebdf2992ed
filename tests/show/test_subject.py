import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from meshes import cut, holding, mesh_of

import gda
from gda.show.subject import Subject, subject_of

P = PartitionSpec
XY = {"x": 4, "y": 2}
GRID = gda.ShardGrid((8, 2), XY, ("x",))
DATA = np.zeros((8, 2), np.float32)
ARRAY = jax.device_put(DATA)


def ids_of(subject: Subject) -> tuple[str, list[int]]:
    assert subject.device_ids is not None
    return subject.device_kind, subject.device_ids.tolist()


def test_a_shape_with_mesh_and_spec() -> None:
    subject = subject_of([8, 2], XY, P("x"), dtype="bfloat16")
    assert (subject.grid, subject.kind, subject.device_ids) == (GRID, "plan", None)
    assert (subject.shape, subject.spec, str(subject.dtype)) == ((8, 2), "P('x')", "bfloat16")
    assert subject.block_bytes == 8
    assert subject_of((8, 2), XY, ("x",)).block_bytes is None
    assert subject_of((2**40, 2**40), {}, (), dtype="int64").block_bytes == 2**83


def test_a_shape_on_real_devices_has_their_names_and_processes() -> None:
    subject = subject_of((8, 2), mesh_of(XY), P("x"))
    assert ids_of(subject) == ("CPU", list(range(8)))
    assert subject.numbers(np.array([3])).tolist() == [3]
    assert np.array_equal(subject.grid.process_of, np.zeros(8))
    assert subject_of((8, 2), NamedSharding(mesh_of(XY), P("x"))).grid == subject.grid


def test_a_mesh_without_devices() -> None:
    mesh = AbstractMesh((4, 2), ("x", "y"))
    abstract = jax.ShapeDtypeStruct((8, 2), "float32", sharding=NamedSharding(mesh, P("x")))
    assert subject_of(abstract).device_ids is None
    subject = subject_of((8, 2), mesh, P("x"))
    assert (subject.grid, subject.device_kind, subject.device_ids) == (GRID, "device", None)
    assert subject.numbers(np.array([3])).tolist() == [3]


def test_arrays() -> None:
    mesh = mesh_of(XY)
    g = cut(DATA, mesh, P("x"))
    abstract = jax.ShapeDtypeStruct((8, 2), "float32", sharding=g.sharding)
    for x, kind in (
        (g, "GlobalArray"),
        (g.array, "jax.Array"),
        (abstract, "ShapeDtypeStruct"),
    ):
        subject = subject_of(x)
        assert subject.grid.global_shape == (8, 2)
        assert (subject.kind, subject.spec, subject.block_bytes) == (kind, "P('x')", 16)
        assert ids_of(subject) == ("CPU", list(range(8)))


def test_an_array_on_one_device_has_a_mesh_without_axes() -> None:
    device = jax.devices()[3]
    subject = subject_of(jax.device_put(DATA, device))
    assert (subject.grid.mesh_shape, ids_of(subject)) == ({}, ("CPU", [3]))


def test_global_array_from_eval_shape() -> None:
    mesh = mesh_of(XY, kind=AxisType.Explicit)
    g = cut(DATA, mesh, P("x"))
    abstract = jax.eval_shape(lambda tree: jax.tree.map(lambda x: x * 2, tree), g)
    subject = subject_of(abstract)
    assert (subject.kind, subject.axes_of(0)) == ("GlobalArray", [("x", 4)])
    assert abstract._repr_html_() is not None


def test_a_padded_array() -> None:
    mesh = mesh_of({"x": 4, "y": 2})
    subject = subject_of(gda.PaddedArray.from_source(np.ones((5, 3)), mesh, ("x", "y")))
    assert (subject.kind, subject.shape, subject.block_bytes) == ("PaddedArray", (5, 3), 16)
    assert subject.grid == gda.ShardGrid(
        (5, 3), mesh.shape, ("x", "y"), pad=True, process_of=[0] * 8
    )


def test_grids_and_subjects() -> None:
    subject = subject_of(GRID, dtype="int8")
    assert (subject.grid, subject.block_bytes, subject.kind) == (GRID, 4, "ShardGrid")
    assert subject_of(subject) is subject


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (((8, 2),), {}, "Mesh or the sizes of its axes by name, and its spec: gda.show((8, 2), m"),
        (((8, 2), P("x"), XY), {}, "a shape such as (8, 2) is shown with its mesh, a jax.sharding"),
        ((GRID, XY, ("x",)), {}, "go with a shape, a sequence of integers such as (8, 2); this Sh"),
        ((ARRAY,), {"dtype": "int8"}, "go with a shape, a sequence of integers such as (8, 2)"),
        ((DATA,), {}, "and a shape with its mesh and spec, not of this ndarray"),
        ((jax.ShapeDtypeStruct((8,), "int8"),), {}, "not of this ShapeDtypeStruct"),
        ((holding(None, (2,)),), {}, "not of this PaddedArray"),
        (((8, 2), XY, ("x",)), {"dtype": DATA}, "dtype=a ndarray is not a dtype"),
    ],
)
def test_other_values_cannot_be_shown(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        subject_of(*arguments, **options)


SECRET = 271828


@pytest.mark.parametrize(
    "tree",
    [{"w": np.full(2, SECRET)}, [jax.device_put(np.full(2, SECRET))], (SECRET, "w")],
    ids=["numpy", "jax", "text"],
)
def test_of_a_tree_no_value_is_told(tree: Any) -> None:
    with pytest.raises(TypeError, match=r"for a tree: jax\.tree\.map\(gda\.show, tree\)") as raised:
        subject_of(tree)
    assert str(SECRET) not in str(raised.value)


def test_a_memory_is_named_if_it_is_not_the_default() -> None:
    mesh = mesh_of({"x": 8})
    assert subject_of(jax.device_put(DATA, NamedSharding(mesh, P("x")))).memory_kind is None
    sharding = NamedSharding(mesh, P("x"), memory_kind="pinned_host")
    abstract = jax.ShapeDtypeStruct((8, 2), "float32", sharding=sharding)
    assert subject_of(abstract).memory_kind == "pinned_host"
