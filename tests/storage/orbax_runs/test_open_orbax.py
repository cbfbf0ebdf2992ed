"""Runs of Orbax, as the installed release writes them, opened as trees of sources."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from damaged import as_links
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, mesh_of, one_folder
from orbax.checkpoint.experimental import v1
from s3_server import ENVIRONMENT, spec_of

import gda
from gda.storage.stores.opening import open_store


class Pair(NamedTuple):
    a: Any
    b: Any


W = batch(8, 8)


def state() -> dict[str, Any]:
    mesh = mesh_of({"x": 4, "y": 2})
    return {
        "params": {"w": cut(W, mesh, P("x", "y")).array, "zeros": cut(0 * W, mesh, P("y")).array},
        "half": cut(batch(8, dtype=jnp.bfloat16), mesh, P()).array,
        "layers": [{"k": jnp.asarray(np.int8([1, 2]))}, Pair(np.ones(2, np.float32), None)],
        "a.b": {"c/d": jnp.asarray(batch(3))},
        "numpy": np.arange(3),
        "key": jax.random.key(3),
        "keys": jax.random.wrap_key_data(np.ones((4, 4), np.uint32), impl="rbg"),
        "step": 3,
        "rate": 0.5,
        "empty": [{}, [], None],
    }


TEXTS = {"name": "run 7", "nested": {"name": "\u03b1"}, "done": True}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of runs, which no test changes."""
    folder, tree = tmp_path_factory.mktemp("runs"), state()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(folder / "files", tree | TEXTS)
    save: Any = getattr(v1, "save", None) or v1.save_pytree  # its name in older releases
    save(folder / "v1", tree | TEXTS)  # Zarr 3
    save(folder / "one", W)
    with ocp.CheckpointManager(folder / "manager") as manager:
        manager.save(9, args=ocp.args.StandardSave({"w": W}))
        manager.save(10, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
    with ocp.CheckpointManager(folder / "items") as manager:
        items: Any = {"state": ocp.args.StandardSave({"w": W}), "meta": ocp.args.JsonSave({"a": 1})}
        manager.save(1, args=ocp.args.Composite(params=ocp.args.PyTreeSave({"p": W}), **items))
        manager.wait_until_finished()
    return folder


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    """Return a run without OCDBT, for a test to damage."""
    return Path(shutil.copytree(runs / "files", tmp_path / "run"))


def assert_same(found: Any, given: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(given)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(given), strict=True):
        if isinstance(theirs, jax.Array) and jnp.issubdtype(theirs.dtype, jax.dtypes.prng_key):
            assert ours.dtype == theirs.dtype
            ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
        if isinstance(theirs, str | int | float):
            assert type(ours) is type(theirs)


# Examples.


@pytest.mark.parametrize("name", ["manager/10", "files", "v1"])
def test_a_run_is_loaded_onto_another_layout_without_orbax(
    runs: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = state() | (TEXTS if name != "manager/10" else {})
    # As Orbax's metadata has it: a dict for a named tuple.
    given["layers"][1] = given["layers"][1]._asdict()
    monkeypatch.setitem(sys.modules, "orbax", None)
    tree = gda.storage.open_orbax(runs / name)
    uses_zarr3 = tree["half"].spec().to_json()["driver"] == "zarr3"
    assert uses_zarr3 == (name == "v1")
    mesh = mesh_of({"z": 2})

    def spec_of(_: str, leaf: Any) -> P:
        return P(None, "z") if leaf.ndim == 2 else P()

    found = gda.load_tree(tree, mesh, spec_of, plain=True, dtype=None)
    assert_same(found | {"numpy": np.asarray(tree["numpy"].read().result())}, given)
    assert found["params"]["w"].sharding.spec == P(None, "z")


def test_a_run_of_one_array_is_that_array(runs: Path) -> None:
    assert np.array_equal(gda.storage.open_orbax(runs / "one").read().result(), W)


def test_one_of_several_items_is_opened_by_its_folder(runs: Path) -> None:
    assert list(gda.storage.open_orbax(runs / "items" / "1" / "params")) == ["p"]
    said = "has 2 items: 'params'; 'state'; pass the path of the folder of one, such as .*/1/state$"
    with pytest.raises(ValueError, match=said):
        gda.storage.open_orbax(runs / "items" / "1")


def stored(path: Path) -> Any:
    """Open a run through TensorStore, as in an object store."""
    return gda.storage.open_orbax({"driver": "kvstack", "layers": [{"base": f"file://{path}/"}]})


def test_a_run_in_an_object_store_is_read(runs: Path, run: Path) -> None:
    assert np.array_equal(stored(runs / "items" / "1" / "params")["p"], W)
    assert np.array_equal(stored(runs / "manager" / "9")["w"], W)
    assert stored(runs / "v1")["name"] == "run 7"
    with pytest.raises(ValueError, match="has 2 items: 'params'; 'state'; pass the path"):
        stored(runs / "items" / "1")
    with pytest.raises(FileNotFoundError, match="there is nothing at"):
        stored(runs / "elsewhere")
    (run / "commit_success.txt").unlink()
    with pytest.raises(ValueError, match=r"unfinished save: it has no commit_success\.txt"):
        stored(run)


def test_the_arrays_are_opened_with_the_credentials_of_the_spec(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    spec = spec_of(1, "bucket")
    found = open_store(spec, timeout=60).spec()
    assert all(found[name] == spec[name] for name in ("aws_credentials", "s3_request_retries"))


# Folders that are something else.


def test_other_folders_are_named(runs: Path, run: Path, tmp_path: Path) -> None:
    said = "is not an Orbax run, which has _METADATA: it has "
    (run / "_METADATA").unlink()
    partial = run.rename(f"{run}.orbax-checkpoint-tmp")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for folder, kind, message in [
        (tmp_path / "nothing", FileNotFoundError, None),
        (tmp_path / "file", NotADirectoryError, "file is a file, .* a file of msgpack is read"),
        (tmp_path / "empty", ValueError, f"{said}no files. Pass the folder of one step"),
        (runs / "manager", ValueError, rf"{said}('9'; '10'|'10'; '9')\. Pass the folder of"),
        (partial, ValueError, "is an unfinished save: .orbax-checkpoint-tmp is in its name"),
        (3, TypeError, "must be the path of a checkpoint: .* not a int"),
    ]:
        with pytest.raises(kind, match=message):
            gda.storage.open_orbax(folder)  # pyright: ignore[reportArgumentType]


# Damage, and bad intent.


def change(run: Path, name: str, **to: Any) -> None:
    """Change the value metadata of a leaf."""
    content = json.loads((run / "_METADATA").read_text())
    content["tree_metadata"][str((name,))]["value_metadata"] |= to
    (run / "_METADATA").write_text(json.dumps(content))


def test_a_leaf_without_data_says_so_when_it_is_used(run: Path) -> None:
    change(run, "half", skip_deserialize=True)
    change(run, "numpy", value_type="MyType")
    tree = gda.storage.open_orbax(run)
    mesh = mesh_of({"x": 2})
    assert gda.load_tree(tree["params"], mesh, P())["w"].shape == (8, 8)
    with pytest.raises(ValueError, match="'half' of .* was not written, or in a way") as e:
        gda.load_tree(tree, mesh, P())
    assert e.value.__notes__ == ["gda: at half of the tree"]
    with pytest.raises(ValueError, match="type 'MyType', was not written, or in a way that gda"):
        np.asarray(tree["numpy"])


def test_a_missing_chunk_is_an_error_and_no_zeros(run: Path) -> None:
    (run / "params.w" / "1.1").unlink()
    tree = gda.storage.open_orbax(run)
    with pytest.raises(ValueError, match=r"chunk \{1, 1\} .* is missing") as caught:
        gda.load_tree(tree["params"], mesh_of({"x": 2}), P(None, "x"))
    assert "gda: while reading index [:, " in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("_METADATA", "{", "_METADATA is damaged: Expecting property name"),
        ("_strings.json", "[]", r"_strings.json is damaged: it is \[\]; expected is a dict"),
        ("_strings.json", "{}", "the string 'name' is not in _strings.json"),
        ("half/.zarray", None, "the array 'half' of .* cannot be opened: NOT_FOUND"),
        ("half/.zarray", "{}", "the array 'half' of .* cannot be opened: "),
        ("step/0", None, "the array 'step' of .* cannot be read: NOT_FOUND"),
    ],
)
def test_a_damaged_file_is_named(run: Path, name: str, text: str | None, says: str) -> None:
    (run / name).unlink()
    if text is not None:
        (run / name).write_text(text)
    with pytest.raises(ValueError, match=says):
        gda.storage.open_orbax(run)


def test_metadata_that_is_too_large_is_not_read(run: Path) -> None:
    os.truncate(run / "_METADATA", 2**40)
    with pytest.raises(ValueError, match="_METADATA has 1099511627776 bytes; expected are at most"):
        gda.storage.open_orbax(run)


@pytest.mark.parametrize("sizes", [{"shape": [2**40]}, {"chunks": [2**40]}])
def test_numbers_that_are_too_large_are_not_read(run: Path, sizes: dict[str, list[int]]) -> None:
    metadata = run / "step" / ".zarray"
    large = {"shape": [1], "chunks": [1], "fill_value": 0, **sizes}
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | large))
    with pytest.raises(ValueError, match=f"key 'step' has {2**43} bytes; expected are at most"):
        gda.storage.open_orbax(run)


def test_a_run_whose_files_are_links(run: Path, tmp_path: Path) -> None:
    as_links(run, tmp_path / "blobs")
    tree = gda.storage.open_orbax(run)
    assert np.array_equal(tree["params"]["w"].read().result(), W)


# Several processes.


@pytest.mark.processes(2, devices=4)
def test_a_run_that_several_processes_saved_is_loaded_by_them() -> None:
    mesh = mesh_of({"x": 4, "y": 2})
    given = {"w": cut(W, mesh, P("x", "y")).array, "all": cut(W + 1, mesh, P()).array}
    path = Path(one_folder()) / "run"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, given)
    found = gda.load_tree(gda.storage.open_orbax(path), mesh, P(None, "x"), read_once=True)
    for name, value in (("w", W), ("all", W + 1)):
        np.testing.assert_array_equal(found[name].gather(), value)
