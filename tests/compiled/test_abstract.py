"""Trees and checkpoints as shapes that are placed on a mesh."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

import gda


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request: pytest.FixtureRequest) -> Mesh:
    return mesh_of({"data": 4, "model": 2}, request.param)


def test_arrays_of_all_kinds_become_shapes_on_the_mesh(mesh: Mesh) -> None:
    tree = {
        "numpy": np.zeros((8, 4), np.float32),
        "jax": jax.device_put(np.zeros((8, 2), jnp.bfloat16)),
        "shape": jax.ShapeDtypeStruct((16,), jnp.int8),
        "keys": jax.random.wrap_key_data(np.zeros((4, 2), np.uint32)),
    }
    placed = gda.abstract(tree, mesh, P("data"))
    for name, array in tree.items():
        assert isinstance(placed[name], jax.ShapeDtypeStruct)
        assert (placed[name].shape, placed[name].dtype) == (array.shape, array.dtype)
        assert placed[name].sharding.is_equivalent_to(NamedSharding(mesh, P("data")), array.ndim)


def test_specs_are_one_or_a_tree_or_a_function(mesh: Mesh) -> None:
    tree = {"layers": [np.zeros((8, 4)), np.zeros(4)], "step": 3}

    def spec_of(path: str, leaf: jax.ShapeDtypeStruct) -> P:
        return P("data", "model") if path == "layers/0" else P()

    by_function = gda.abstract(tree, mesh, spec_of)
    by_tree = gda.abstract(tree, mesh, {"layers": [P("data", "model"), P()], "step": P()})
    assert by_function == by_tree
    assert by_function["layers"][0].sharding.spec == P("data", "model")
    assert by_function["step"].shape == ()
    assert by_function["step"].weak_type
    sharding = NamedSharding(mesh, P())
    assert gda.abstract(tree, sharding)["layers"][0].sharding == sharding


def test_an_abstract_mesh_gives_layouts_without_devices() -> None:
    mesh = AbstractMesh((64, 4), ("data", "model"))
    tree = {"w": jax.ShapeDtypeStruct((512, 8), np.float32), "step": 3}
    placed = gda.abstract(tree, mesh, lambda path, leaf: P("data", "model"))
    assert placed["w"].sharding == NamedSharding(mesh, P("data", "model"))
    assert gda.layouts(placed).nbytes_per_device == 8 * 2 * 4 + 4
    with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh"):
        gda.load_tree({"w": np.zeros((512, 8))}, mesh, P())


def test_doubles_become_floats_as_in_a_call(mesh: Mesh) -> None:
    placed = gda.abstract(np.zeros(8, np.float64), mesh, P("data"))
    assert placed.dtype == np.float32
    assert jax.eval_shape(lambda x: x, placed).dtype == placed.dtype


def test_containers_stay_and_a_padded_array_is_padded_for_the_new_mesh(mesh: Mesh) -> None:
    small = Mesh(np.array(jax.devices()[:2]), ("x",))
    tree = {
        "plain": gda.GlobalArray.from_source(np.ones((8, 2), np.float32), small, P("x")),
        "padded": gda.PaddedArray.from_source(np.ones((5, 2), np.float32), small, P("x")),
    }
    placed = gda.abstract(tree, mesh, P("data"))
    assert jax.tree.structure(placed) == jax.tree.structure(tree)
    assert placed["padded"].shape == (5, 2)
    assert placed["padded"].array.shape == (8, 2)

    def total(tree: dict) -> jax.Array:
        return tree["plain"].sum() + tree["padded"].filled(0).sum()

    here = {
        "plain": gda.GlobalArray.from_source(np.ones((8, 2), np.float32), mesh, P("data")),
        "padded": gda.PaddedArray.from_source(np.ones((5, 2), np.float32), mesh, P("data")),
    }
    assert jax.jit(total).lower(placed).as_text() == jax.jit(total).lower(here).as_text()


def test_the_tree_of_a_checkpoint_and_its_path(mesh: Mesh, tmp_path: Path) -> None:
    saved = {
        "w": np.zeros((8, 4), np.float32),
        "key": jax.random.key(0),
        "step": 7,
        "name": "a",
        "own": gda.checkpoint.PerProcess(b"\0"),
    }
    gda.checkpoint.save(tmp_path / "step-7", saved)
    expected = {name: gda.abstract(saved[name], mesh, P()) for name in ("w", "key", "step")}
    for tree in (saved, gda.checkpoint.open(tmp_path / "step-7"), tmp_path / "step-7"):
        found = gda.abstract(tree, mesh, P())
        assert {name: found[name] for name in expected} == expected
        assert (found["name"], found["own"].value) == ("a", b"\0")
    with gda.checkpoint.Run(tmp_path / "run", every=1) as run:
        run.resume({"w": saved["w"]})
        run.save(3, {"w": saved["w"]})
    assert gda.abstract(f"{tmp_path}/run@latest", mesh, P())["w"] == expected["w"]
    with pytest.raises(gda.checkpoint.CheckpointNotFoundError, match="step-8"):
        gda.abstract(str(tmp_path / "step-8"), mesh, P())


def test_the_tensors_of_files_and_their_path(mesh: Mesh, tmp_path: Path) -> None:
    tensors = {"layers.0.w": np.zeros((8, 4), np.float32), "bias": np.zeros(8, np.float16)}
    gda.storage.save_safetensors(tmp_path, tensors)

    def spec_of(path: str, leaf: jax.ShapeDtypeStruct) -> P:
        return P("data", "model") if path == "layers.0.w" else P()

    expected = gda.abstract(tensors, mesh, spec_of)
    for tree in (gda.storage.open_safetensors(tmp_path), tmp_path, str(tmp_path)):
        assert gda.abstract(tree, mesh, spec_of) == expected


@pytest.mark.parametrize(
    ("tree", "specs", "error", "says"),
    [
        ({"w": {1}}, P(), TypeError, r"\{1\} is a set and no array"),
        ({"w": np.zeros(6)}, P("data"), ValueError, "dimension 0 of size 6 is sharded 4 ways"),
        ({"w": np.zeros(8)}, {"v": P()}, ValueError, "specs must be a prefix of the tree"),
        ({"w": np.zeros(8)}, None, TypeError, "without a spec"),
    ],
)
def test_mistakes_are_named(
    mesh: Mesh, tree: object, specs: object, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as raised:
        gda.abstract(tree, mesh, specs)
    if "sharded 4 ways" in says:
        assert raised.value.__notes__ == ["gda: at w of the tree"]
