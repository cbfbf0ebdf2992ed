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
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from damaged import as_links
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, mesh_of, one_folder
from orbax.checkpoint.experimental import v1
from orbax.checkpoint.msgpack_utils import msgpack_serialize
from running import python
from s3_server import ENVIRONMENT, Server, open_kv, spec_of

import gda
from gda.storage.stores.object_store import KvStore
from gda.storage.stores.opening import open_store


class Pair(NamedTuple):
    a: Any
    b: Any


W = batch(8, 8)


def state() -> dict[str, Any]:
    mesh = mesh_of({"x": 4, "y": 2})
    params = {"w": cut(W, mesh, P("x", "y")).array, "zeros": cut(0 * W, mesh, P(None, "y")).array}
    return {
        "params": params,
        "adam": optax.adam(1e-3).init({"w": params["w"]}),
        "half": cut(batch(8, dtype=jnp.bfloat16), mesh, P()).array,
        "layers": [{"k": jnp.int8([1, 2])}, Pair(jnp.ones(2), None)],
        "a.b": {"c/d": jnp.arange(3)},
        "numpy": np.arange(3),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 4),
        "step": 3,
        "rate": 0.5,
        "empty": [{}, [], None],
    }


STATE_OF_V1 = {"name": "run 7", "nested": {"name": "\u03b1"}, "done": True}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of runs, which no test changes."""
    folder, tree = tmp_path_factory.mktemp("runs"), state()
    with ocp.StandardCheckpointer() as standard:
        standard.save(folder / "standard", tree)
    files = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    with ocp.Checkpointer(files) as checkpointer:
        checkpointer.save(folder / "files", tree | STATE_OF_V1)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True)) as checkpointer:
        checkpointer.save(folder / "zarr3", tree | STATE_OF_V1)
    save: Any = getattr(v1, "save", None) or v1.save_pytree  # its name in older releases
    save(folder / "v1", tree | STATE_OF_V1)
    save(folder / "one", jnp.arange(3))
    with ocp.CheckpointManager(folder / "manager") as manager:
        for step in (9, 10):
            manager.save(step, args=ocp.args.StandardSave({"w": tree["params"]["w"]}))
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


def expected(tree: Any) -> Any:
    """Return a tree as Orbax's metadata has it: lists for tuples, dicts for named tuples."""
    adam = tree["adam"]
    moments = {"count": adam[0].count, "mu": adam[0].mu, "nu": adam[0].nu}
    pair = tree["layers"][1]
    layers = [tree["layers"][0], {"a": pair.a, "b": pair.b}]
    return tree | {"adam": [moments, None], "layers": layers}


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


@pytest.mark.parametrize("name", ["standard", "files", "zarr3", "v1"])
def test_a_run_is_loaded_onto_another_layout(runs: Path, name: str) -> None:
    tree = gda.storage.open_orbax(runs / name)
    given = expected(state() | ({} if name == "standard" else STATE_OF_V1))
    assert isinstance(tree["params"]["w"], ts.TensorStore)
    mesh = mesh_of({"z": 2})

    def spec_of(_: str, leaf: Any) -> P:
        return P(None, "z") if leaf.ndim == 2 else P()

    found = gda.load_tree(tree, mesh, spec_of, plain=True, dtype=None)
    assert_same(found | {"numpy": np.asarray(tree["numpy"].read().result())}, given)
    assert found["params"]["w"].sharding.spec == P(None, "z")


def test_a_run_of_one_array_is_that_array(runs: Path) -> None:
    assert gda.storage.open_orbax(runs / "one").read().result().tolist() == [0, 1, 2]


def test_one_of_several_items_is_opened_by_its_name(runs: Path) -> None:
    assert list(gda.storage.open_orbax(runs / "items" / "1", item="params")) == ["p"]
    with pytest.raises(ValueError, match="has 2 items: 'params'; 'state'; pass one of them"):
        gda.storage.open_orbax(runs / "items" / "1")
    with pytest.raises(ValueError, match="has no item 'meta' with arrays; it has 'params'; 'st"):
        gda.storage.open_orbax(runs / "items" / "1", item="meta")
    with pytest.raises(ValueError, match="has one tree and no items; omit item='state'"):
        gda.storage.open_orbax(runs / "files", item="state")


def test_a_run_is_read_without_orbax(runs: Path) -> None:
    program = (
        "import sys, gda, numpy\n"
        f"tree = gda.storage.open_orbax({str(runs / 'manager' / '9')!r})\n"
        "assert numpy.asarray(tree['w'].read().result()).sum() == 2016\n"
        "assert 'orbax' not in sys.modules\n"
    )
    assert python("-c", program).returncode == 0


def test_a_run_in_an_object_store_is_read(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with Server() as server:
        spec = spec_of(server.port, server.bucket())
        kv = open_kv(spec)
        path = runs / "manager" / "9"
        names = [each for each in path.rglob("*") if each.is_file()]
        *others, committed = sorted(names, key=lambda each: each == path / "commit_success.txt")
        for each in others:
            kv.write(str(each.relative_to(path)), each.read_bytes()).result()
        with pytest.raises(ValueError, match=r"unfinished save: it has no commit_success\.txt"):
            gda.storage.open_orbax(spec)
        kv.write(committed.name, b"").result()
        tree = gda.storage.open_orbax(spec)
        assert np.array_equal(tree["w"].read().result(), W)
        # The arrays are opened with the credentials of the spec too.
        for name in ("aws_credentials", "s3_request_retries"):
            assert open_store(spec, timeout=60).spec()[name] == spec[name]
        with pytest.raises(FileNotFoundError, match="there is nothing at"):
            gda.storage.open_orbax(spec | {"path": "elsewhere/"})


def test_the_keys_of_a_run_are_not_listed(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[str] = []
    keys = KvStore._listed
    monkeypatch.setattr(KvStore, "directory", None)  # the driver of files as any other
    monkeypatch.setattr(KvStore, "_listed", lambda *args: listed.extend(args[1:]) or keys(*args))

    def stored(path: Path, item: str | None = None) -> Any:
        return gda.storage.open_orbax({"driver": "file", "path": f"{path}/"}, item=item)

    assert np.array_equal(stored(runs / "items" / "1", "params")["p"], W)
    assert np.array_equal(stored(runs / "manager" / "10")["w"], W)
    assert stored(runs / "v1")["name"] == "run 7"
    with pytest.raises(ValueError, match="has 2 items: 'params'; 'state'; pass one of them"):
        stored(runs / "items" / "1")
    assert listed == []
    shutil.copytree(runs / "items" / "1", tmp_path / "run")
    (tmp_path / "run" / "_CHECKPOINT_METADATA").write_text("{")  # then the names are listed
    with pytest.raises(ValueError, match="has 2 items: 'params'; 'state'"):
        stored(tmp_path / "run")
    assert listed


# Runs of old releases, whose files are made of those of new ones. Orbax reads them still.


SMALL = {
    "half": np.arange(8).astype(jnp.bfloat16),
    "numpy": np.arange(3, dtype=np.int64),
    "number": np.float32(1.5),
    "name": "run 7",
    "done": True,
    "nested": [{"a": np.zeros((1, 2))}, [1, 2.5], {}, None],
}


@pytest.fixture(scope="module")
def old_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two arrays with files of their own, and many leaves in the file ``checkpoint``."""
    path = tmp_path_factory.mktemp("old") / "run"
    arrays = {"params": [{"w": W}], "b": np.arange(4)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(path, arrays | SMALL)
    metadata = json.loads((path / "_METADATA").read_text())
    for entry in metadata["tree_metadata"].values():
        keys = [key["key"] for key in entry["key_metadata"]]
        if keys[0] not in arrays:
            entry["value_metadata"]["skip_deserialize"] = True
            shutil.rmtree(path / ".".join(keys), ignore_errors=True)
    (path / "_METADATA").write_text(json.dumps(metadata))
    (path / "_strings.json").unlink()
    named = {"params": [{"w": "PLACEHOLDER://params.0.w"}], "b": "PLACEHOLDER://b"}
    (path / "checkpoint").write_bytes(msgpack_serialize(named | SMALL))
    return path


@pytest.fixture
def old(old_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(old_run, tmp_path / "old")


@pytest.mark.parametrize("has_metadata", [True, False])
def test_values_in_one_file_are_read(old: Path, has_metadata: bool) -> None:
    if not has_metadata:
        (old / "_METADATA").unlink()
    tree = gda.storage.open_orbax(old)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        theirs = checkpointer.restore(old)
    assert {**tree, "nested": 0, "params": 0, "b": 0}.keys() == theirs.keys()
    expected = {"params": [{"w": W}], "b": np.arange(4), **SMALL}
    for found, given in zip(*map(jax.tree.leaves, (tree, expected)), strict=True):
        data = np.asarray(found.read().result() if isinstance(found, ts.TensorStore) else found)
        np.testing.assert_array_equal(data, given, strict=True)
        assert isinstance(given, np.ndarray) or type(found) is type(given)
    for name in SMALL:
        assert str(tree[name]) == str(theirs[name]) or name == "nested"
    assert tree["nested"][1:] == [[1, 2.5], {}, None]
    loaded = gda.load_tree(tree, mesh_of({"x": 2}), P())
    assert (loaded["name"], loaded["half"].dtype) == ("run 7", jnp.bfloat16)


def test_an_array_in_parts_is_joined(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orbax.checkpoint.msgpack_utils.MAX_CHUNK_SIZE", 100)
    (old / "_METADATA").unlink()
    (old / "checkpoint").write_bytes(msgpack_serialize({"w": W, "s": {"v": W[0]}, "z": (2 + 1j,)}))
    assert b"__msgpack_chunked_array__" in (old / "checkpoint").read_bytes()
    tree = gda.storage.open_orbax(old)
    np.testing.assert_array_equal(tree["w"], W, strict=True)
    assert tree["z"] == [2 + 1j]


def nested(depth: int) -> bytes:
    return b"\x81\xa1a" * depth + b"\xc0"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"model_checkpoint_path", "extra data"),
        (nested(300), "more than 200 levels deep"),
        (nested(100_000), ""),
        (b"\xd4\x07\x00", "a value of the type 7, which is unknown"),
        (msgpack_serialize({"w": "PLACEHOLDER://../x", "..": "PLACEHOLDER://.."}), "lead out"),
    ],
)
def test_a_damaged_file_of_values_is_named(old: Path, text: bytes, says: str) -> None:
    (old / "_METADATA").unlink()
    (old / "checkpoint").write_bytes(text)
    with pytest.raises(ValueError, match=rf"old/checkpoint is damaged: .*{says}.*; copy the run"):
        gda.storage.open_orbax(old)


def test_values_need_msgpack(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(ImportError, match="an old release of Orbax .* install the package msgpack"):
        gda.storage.open_orbax(old)


def test_a_run_without_structure_is_named(run: Path) -> None:
    (run / "_METADATA").unlink()
    with pytest.raises(ValueError, match="it has arrays, but no structure; save it again with"):
        gda.storage.open_orbax(run)


# Folders that are something else.


def test_a_folder_of_runs_is_refused_with_the_latest(runs: Path) -> None:
    with pytest.raises(ValueError, match=r"holds runs, '9'; '10'; open one .* such as .*/10$"):
        gda.storage.open_orbax(runs / "manager")


def test_other_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        gda.storage.open_orbax(tmp_path / "nothing")
    with pytest.raises(ValueError, match="is not an Orbax run, which has _METADATA: it has no fil"):
        gda.storage.open_orbax(tmp_path)
    for name, says in [
        ("other.txt", "it has 'other.txt'"),
        ("model.safetensors", r"open them with gda\.storage\.open_safetensors"),
        ("manifest.json", r"a checkpoint of gda with gda\.checkpoint\.restore"),
    ]:
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=says):
            gda.storage.open_orbax(tmp_path)
    with pytest.raises(NotADirectoryError):
        gda.storage.open_orbax(tmp_path / "other.txt")
    with pytest.raises(TypeError, match="must be the path of a checkpoint: .* not a int"):
        gda.storage.open_orbax(3)  # pyright: ignore[reportArgumentType]


def test_an_unfinished_save_is_refused(run: Path) -> None:
    partial = run.rename(f"{run}.orbax-checkpoint-tmp")
    with pytest.raises(ValueError, match="is an unfinished save: .orbax-checkpoint-tmp is in its"):
        gda.storage.open_orbax(partial)
    with pytest.raises(ValueError, match="it has only unfinished saves"):
        gda.storage.open_orbax(partial.parent)


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
    with pytest.raises(ValueError, match="'half' of .* was not written: .* skip_deserialize") as e:
        gda.load_tree(tree, mesh, P())
    assert e.value.__notes__ == ["gda: at half of the tree"]
    with pytest.raises(ValueError, match="type 'MyType', which gda does not read"):
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
    for read_once in (False, True):
        tree = gda.storage.open_orbax(path)
        found = gda.load_tree(tree, mesh, P(None, "x"), read_once=read_once)
        for name, value in (("w", W), ("all", W + 1)):
            np.testing.assert_array_equal(found[name].gather(), value)
