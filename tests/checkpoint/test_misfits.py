"""Checkpoints: what cannot be saved, and what does not fit when it is restored.

One error names everything that does not fit, before anything is read.
"""

import re
import time
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, mesh_of

import gda
from gda.checkpoint import exists, inspect, restore, save
from gda.storage.stores.directory import FileStore

DATA = batch(16, 8)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The chunks that restores read."""
    reads: list[str] = []
    read_into = FileStore.read_into

    def noted(store: FileStore, name: str, *buffers: Any) -> tuple[int, int]:
        reads.append(name)
        return read_into(store, name, *buffers)

    monkeypatch.setattr(FileStore, "read_into", noted)
    return reads


def test_leaves_that_are_missing_and_surplus_are_named_together(
    tmp_path: Path, reads: list[str]
) -> None:
    save(tmp_path, {"a": np.ones(2), "b": {"c": np.ones(2), "d": 3}})
    with pytest.raises(ValueError, match="does not match like") as caught:
        restore(tmp_path, {"a": np.ones(2), "b": {"c": np.ones(2), "e": 4}, "f": 5})
    assert str(caught.value) == (
        "the checkpoint does not match like: it has no ['b']['e']; ['f'] (missing='keep' keeps "
        "those of like); like has no ['b']['d'] (partial=True omits them)"
    )
    save(
        tmp_path / "run", {"run": {"mu": {"w": 1, "b": [2]}, "params": {"w": 3, "b": [4], "c": 5}}}
    )
    with pytest.raises(
        ValueError,
        match=re.escape(
            "; it has all leaves of like with at= one of ['run', 'mu']; ['run', 'params']"
        ),
    ):
        restore(tmp_path / "run", {"w": 0, "b": [0]})
    with pytest.raises(ValueError, match=re.escape("it has no ['b']['e']")):
        restore(tmp_path, {"b": {"e": 4}}, partial=True)
    assert not reads


def test_shapes_and_kinds_that_differ_are_named_together(
    auto_mesh: Mesh, tmp_path: Path, reads: list[str]
) -> None:
    tree = {"a": cut(DATA, auto_mesh, P("x")), "b": jax.random.key(0), "c": 3}
    save(tmp_path, tree | {"d": np.ones(3), "e": np.ones(3)})
    like = {
        "a": cut(batch(8, 16), auto_mesh, P("x")),
        "b": np.zeros(2, np.uint32),
        "c": np.ones(3),
        "d": 4,
        "e": np.ones(3, np.int32),
    }
    with pytest.raises(ValueError, match="does not match like") as caught:
        restore(tmp_path, like)
    assert str(caught.value).removeprefix("the checkpoint does not match like: ").split("; at") == [
        "at ['a'], it has shape (16, 8), and like has (8, 16)",
        " ['b'], it has PRNG keys, and like has an array of uint32; convert with "
        "jax.random.wrap_key_data or key_data",
        " ['c'], it has the int 3, and like has an array of shape (3,); put a value of type int "
        "there",
        " ['d'], it has an array of shape (3,), and like has the int 4",
        " ['e'], it has dtype float64, and like has int32; pass cast=True",
    ]
    assert not reads


def test_dtypes_that_differ(auto_mesh: Mesh, tmp_path: Path, reads: list[str]) -> None:
    save(tmp_path, {"a": cut(DATA, auto_mesh, P("x")), "k": jax.random.key(0)})
    half = DATA.astype(np.float16)
    like = {"a": cut(half, auto_mesh, P("x")), "k": jax.random.key(0)}
    with pytest.raises(
        TypeError, match=re.escape("at ['a'], it has dtype float32, and like has flo")
    ):
        restore(tmp_path, like)
    like = {"a": DATA, "k": jax.random.key(0, impl="rbg")}
    with pytest.raises(
        ValueError, match="at .'k'., it has keys of 'threefry2x32', and like has key<rbg>"
    ):
        restore(tmp_path, like)
    assert not reads


def test_64_bits_are_not_narrowed(auto_mesh: Mesh, tmp_path: Path, reads: list[str]) -> None:
    with jax.enable_x64(True):
        save(tmp_path, {"a": cut(np.arange(8.0), auto_mesh, P("x"))})
        restored = restore(tmp_path, mesh=auto_mesh, specs=P("y"))["a"]
    assert restored.dtype == np.float64
    reads.clear()
    message = "at ['a'], it has dtype float64, which JAX narrows to float32 without jax_enable_x64"
    for arguments in ({}, {"like": {"a": jax.ShapeDtypeStruct((8,), np.float64)}}):
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            restore(tmp_path, mesh=auto_mesh, specs=P(), **arguments)
    assert not reads
    like = {"a": jax.ShapeDtypeStruct((8,), np.float32)}
    restored = restore(tmp_path, like, mesh=auto_mesh, specs=P("x"), cast=True)["a"]
    np.testing.assert_array_equal(restored, np.arange(8.0))


def test_like_without_a_layout(explicit_mesh: Mesh, tmp_path: Path) -> None:
    save(tmp_path, dict.fromkeys("abcdefghijkl", DATA))
    message = "like has no sharding for the array; give its ShapeDtypeStruct one"
    like = dict.fromkeys("abcdefghijkl", jax.ShapeDtypeStruct(DATA.shape, DATA.dtype))
    with pytest.raises(ValueError, match=message) as caught:
        restore(tmp_path, like)
    # One reason is said once.
    assert str(caught.value).count("has no sharding for") == 1
    assert "at ['a']; ['b']; " in str(caught.value)
    assert "and 4 more, like has no sharding" in str(caught.value)
    abstract = NamedSharding(explicit_mesh.abstract_mesh, P("x"))
    struct = jax.ShapeDtypeStruct(DATA.shape, DATA.dtype, sharding=abstract)
    with pytest.raises(ValueError, match="which has no mesh and spec; use a NamedSharding"):
        restore(tmp_path, {"a": struct}, partial=True)


def test_specs_that_do_not_fit_name_their_leaves(
    auto_mesh: Mesh, tmp_path: Path, reads: list[str]
) -> None:
    tree = {"a": cut(batch(6, 8), auto_mesh, P("y")), "b": {"c": cut(DATA, auto_mesh, P())}}
    save(tmp_path, {**tree, "k": jax.random.split(jax.random.key(0), 4)})
    specs = {"a": P("x"), "b": {"c": P("z")}, "d": P(), "k": P("x", "y")}
    with pytest.raises(ValueError, match="specs does not fit the checkpoint") as caught:
        restore(tmp_path, mesh=auto_mesh, specs=specs)
    for said in [
        "the checkpoint has no ['d'], which specs has",
        "at ['a'], global shape (6, 8) cannot be sharded by P('x') on the mesh {'x': 4, 'y': 2}: "
        "dim",
        "at ['b']['c']",
        "at ['k']",
    ]:
        assert said in str(caught.value)
    with pytest.raises(ValueError, match=re.escape("specs has nothing for ['b']['c']; ['k']")):
        restore(tmp_path, mesh=auto_mesh, specs={"a": P()})
    with pytest.raises(ValueError, match=re.escape("at ['a'], global shape (6, 8) cannot")):
        restore(tmp_path, tree, partial=True, mesh=auto_mesh, specs={"a": P("x")})
    assert not reads


LAYOUT = NamedSharding(AbstractMesh((8,), ("x",)), P())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"specs": P()}, TypeError, "was given without a mesh; pass"),
        ({"like": LAYOUT}, TypeError, "and not a tree; pass mesh= and specs="),
        ({"cast": True}, TypeError, "cast was given without like; pass like= too"),
        ({"partial": True}, TypeError, "partial was given without like; pass like= too"),
        ({"max_workers": 0}, ValueError, "max_workers must be a whole number, at least 1, not 0"),
        ({"at": "a"}, TypeError, "at must be a list of keys and indices, such as ['params', 0], "),
        ({"at": ["b"]}, KeyError, "['b'] is not in the tree; the tree itself has 'a'"),
        ({"at": ["a", 0]}, KeyError, "['a'][0] is not in the tree; ['a'] has nothing"),
    ],
)
def test_arguments_of_restore(
    tmp_path: Path, reads: list[str], arguments: Any, error: type[Exception], message: str
) -> None:
    save(tmp_path, {"a": DATA})
    with pytest.raises(error) as caught:
        restore(tmp_path, **arguments)
    assert message in str(caught.value.args[0])
    assert not reads


def test_a_compression_that_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compression must be None or \"zstd\", not 'gzip'"):
        save(tmp_path / "run", {"a": DATA}, compression="gzip")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({True: 1}, "the key True in [True] is a bool; use only strings and integers"),
        ({("a", 1): 1}, "the key ('a', 1) in [('a', 1)] is a tuple"),
        ({1: 1, "a": 2}, "they must be all strings or all integers"),
        ([object()], "a leaf of type object cannot be saved; the leaves of a tree are"),
        ([np.ma.asarray([1])], "a masked array would lose its mask; save its data and"),
        ([np.array(["text"])], "an array of dtype <U4 cannot be saved; convert it"),
        ([np.zeros(2, ml_dtypes.complex32)], "an array of dtype complex32 cannot be"),
        ([np.zeros(2, "M8[s]")], "an array of dtype datetime64[s] cannot be saved"),
        ([np.zeros(2, "f4,i4")], "cannot be saved; convert it to a dtype of JAX"),
        ([np.longdouble(1)], "an array of dtype float128 cannot be saved"),
        ([jax.ShapeDtypeStruct((2,), np.float32)], "a leaf of type ShapeDtypeStruct"),
    ],
)
def test_unsavable_trees_are_refused(tmp_path: Path, tree: Any, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)) as caught:
        save(tmp_path / "run", tree)
    if isinstance(tree, list):
        assert "gda: at [0] of the tree" in caught.value.__notes__
    assert not (tmp_path / "run" / "manifest.json").exists()


def test_two_leaves_with_one_path_and_a_tree_nested_too_deep(tmp_path: Path) -> None:
    class Twins:
        pass

    key = jax.tree_util.GetAttrKey("a")
    jax.tree_util.register_pytree_with_keys(
        Twins, lambda _: ([(key, 1), (key, 2)], None), lambda _, children: Twins()
    )
    with pytest.raises(ValueError, match=re.escape("two leaves have the path ['a']; rename")):
        save(tmp_path, Twins())
    tree: Any = 1
    for _ in range(250):
        tree = [tree]
    with pytest.raises(ValueError, match="nested deeper than 200 levels"):
        save(tmp_path, tree)


def test_fields_that_are_strings_and_integers(auto_mesh: Mesh, tmp_path: Path) -> None:
    class Both:
        pass

    keys = [jax.tree_util.GetAttrKey("a"), jax.tree_util.SequenceKey(0)]
    jax.tree_util.register_pytree_with_keys(
        Both, lambda _: (list(zip(keys, [DATA, DATA], strict=True)), None), lambda *_: Both()
    )
    save(tmp_path, {"both": Both()})
    restored = restore(tmp_path, mesh=auto_mesh, specs=P("x"))
    assert [g.spec for g in restored["both"].values()] == [P("x")] * 2
    assert list(restored["both"]) == list(restore(tmp_path)["both"]) == ["a", 0]
    paths: list[str] = []
    restore(tmp_path, mesh=auto_mesh, specs=lambda path, _: paths.append(path) or P())
    assert paths == ["both/a", "both/0"]


# Paths.


def test_a_directory_where_the_manifest_goes_is_found_before_anything_is_written(
    tmp_path: Path,
) -> None:
    save(tmp_path, {"a": DATA})
    manifest = tmp_path / "manifest.json"
    manifest.unlink()
    manifest.mkdir()
    before = sorted(tmp_path.rglob("*"))
    message = f"{manifest} is not a regular file; remove it"
    with pytest.raises(FileExistsError, match=re.escape(message)) as caught:
        save(tmp_path, {"a": DATA}, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before
    assert "nothing was committed" not in str(getattr(caught.value, "__notes__", ""))
    manifest.rmdir()
    save(tmp_path, {"a": DATA})


# Processes.


@pytest.mark.processes(2, devices=4)
def test_a_save_in_process_0_alone_names_the_others_as_soon_as_a_check_does(
    shared_tmp_path: Path,
) -> None:
    path, told = shared_tmp_path / "run", shared_tmp_path / "told"
    if jax.process_index() == 0:
        with (
            gda.check_processes_agree(timeout=2),
            pytest.raises(
                gda.LateProcessError, match="process 1 did not come within 2 s"
            ) as caught,
        ):
            save(path, {"a": DATA})
        assert caught.value.__notes__ == [
            "gda: every process of the program must call save, not process 0 alone"
        ]
        assert not path.exists()
        told.touch()
    else:
        while not told.exists():
            time.sleep(0.01)
        with pytest.raises(gda.LateProcessError):  # the next check tells who was late
            gda.check_processes_agree(0, name="later", timeout=1)


def test_specs_by_a_function(auto_mesh: Mesh, tmp_path: Path) -> None:
    save(tmp_path, {"layers": [DATA], "b": DATA})
    asked = []
    spec_of = lambda path, _: asked.append(path) or P("y")  # noqa: E731
    restored = restore(tmp_path, {"b": DATA}, mesh=auto_mesh, specs=spec_of, partial=True)
    assert asked == ["b", "layers/0"]
    np.testing.assert_array_equal(restored["b"], DATA)
    with pytest.raises(KeyError, match="b") as caught:
        restore(tmp_path, mesh=auto_mesh, specs=lambda path, leaf: {}[path])
    assert caught.value.__notes__ == ["gda: at ['b'] of the tree"]


def test_a_function_for_specs_sees_keys_and_not_their_numbers(
    auto_mesh: Mesh, tmp_path: Path
) -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    save(tmp_path, {"one": keys[0], "many": keys})
    seen = {}

    def spec_of(path: str, leaf: jax.ShapeDtypeStruct) -> P:
        seen[path] = (leaf.shape, leaf.dtype)
        return P("x") if leaf.ndim else P()

    restored = restore(tmp_path, mesh=auto_mesh, specs=spec_of)
    assert seen == {"one": ((), keys.dtype), "many": ((8,), keys.dtype)}
    assert restored["many"].sharding.spec == P("x")
    with pytest.raises(ValueError, match=r"but global shape \(8,\) has 1 dimension"):
        restore(tmp_path, mesh=auto_mesh, specs={"one": P(), "many": P(None, "y")})
    with pytest.raises(ValueError, match=r"global shape \(8,\) cannot be sharded"):
        restore(tmp_path, mesh=mesh_of({"z": 3}), specs={"one": P(), "many": P("z")})


def test_specs_are_checked_also_where_they_shard_nothing(auto_mesh: Mesh, tmp_path: Path) -> None:
    save(tmp_path, {"n": DATA, "step": 3})
    message = "at ['n'], spec P('nope') shards dimension 0 by mesh axis 'nope', but the mesh has"
    surplus = "the checkpoint has no ['w'], which specs has"
    for arguments in ({}, {"like": {"n": DATA, "step": 0}}):
        with pytest.raises(ValueError, match=re.escape(message)):
            restore(tmp_path, mesh=auto_mesh, specs={"n": P("nope"), "step": P()}, **arguments)
        with pytest.raises(ValueError, match=re.escape("at ['step'], spec P('nope') shards")):
            restore(tmp_path, mesh=auto_mesh, specs={"n": P(), "step": P("nope")}, **arguments)
        with pytest.raises(ValueError, match=re.escape(surplus)):
            restore(tmp_path, mesh=auto_mesh, specs={"n": P(), "w": P()}, **arguments)


def test_an_array_that_jax_does_not_have_stays_that_of_numpy(
    auto_mesh: Mesh, tmp_path: Path
) -> None:
    wide, path = np.arange(3), tmp_path / "of numpy"
    save(path, {"n": wide, "w": DATA})
    for like in (None, {"n": wide, "w": DATA}):
        restored = restore(path, like, mesh=auto_mesh, specs=P())
        assert type(restored["n"]) is np.ndarray
        np.testing.assert_array_equal(restored["n"], wide, strict=True)
    assert isinstance(restore(path, mesh=auto_mesh, specs=P())["w"], gda.GlobalArray)
    with jax.enable_x64(True):
        assert restore(path, mesh=auto_mesh, specs=P())["n"].array.dtype == np.int64
        save(tmp_path / "of jax", {"n": jax.numpy.arange(3)})
    with pytest.raises(ValueError, match="it has dtype int64, which JAX narrows to int32 without"):
        restore(tmp_path / "of jax", mesh=auto_mesh, specs=P())


def test_shardings_that_do_not_fit(auto_mesh: Mesh, explicit_mesh: Mesh, tmp_path: Path) -> None:
    save(tmp_path, {"a": DATA, "b": DATA[:3]})
    sharding = NamedSharding(auto_mesh, P("x"))
    with pytest.raises(ValueError, match=r"mesh does not fit .* at \['b'\], global shape \(3, "):
        restore(tmp_path, mesh=sharding)
    with pytest.raises(ValueError, match=re.escape("mesh has nothing for ['b']")):
        restore(tmp_path, mesh={"a": sharding})
    with pytest.raises(ValueError, match=re.escape("the checkpoint has no ['c'], which mesh has")):
        restore(tmp_path, mesh={"a": sharding, "b": sharding, "c": sharding})
    with pytest.raises(TypeError, match=r"mesh must be a jax.sharding.Mesh"):
        restore(tmp_path, mesh=explicit_mesh.abstract_mesh, specs=P())


@pytest.mark.parametrize("first", [{"w": DATA}, DATA])
def test_tree_and_path_in_the_wrong_order(first: Any, tmp_path: Path) -> None:
    for call in (save, restore):
        with pytest.raises(
            TypeError, match="the first argument must be the path of a checkpoint"
        ) as e:
            call(first, str(tmp_path))
        assert len(str(e.value)) < 300
    with pytest.raises(TypeError, match="the first argument must be"):
        inspect(first)


def test_files_beside_a_checkpoint_are_left_alone(tmp_path: Path) -> None:
    save(tmp_path, {"a": DATA})
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "data-0123456789abcdef").mkdir()
    (tmp_path / "data-0123456789abcdef" / "of_others").touch()
    save(tmp_path / "sub", {"a": 1})
    save(tmp_path, {"a": 2}, overwrite=True)
    assert restore(tmp_path) == {"a": 2}
    assert restore(tmp_path / "sub") == {"a": 1}
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "data-0123456789abcdef" / "of_others").exists()


def test_a_checkpoint_exists_if_its_manifest_is_undamaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not exists(tmp_path)
    assert not exists(tmp_path / "missing")
    (tmp_path / "data-0123456789abcdef").mkdir()
    assert not exists(tmp_path)
    save(tmp_path, {"a": 1})
    with monkeypatch.context() as patch:
        patch.setattr("gda.checkpoint.format.manifest_json.parse_json", None)  # not parsed
        assert exists(tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    assert not exists(tmp_path)
    manifest.write_text("damaged")
    assert not exists(tmp_path)


def test_the_manifest_of_another_program_is_not_replaced(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    for text in ('{"name": "a web application"}', ""):
        manifest.write_text(text)
        for overwrite in (False, True):
            message = f"{manifest} is of another program"
            with pytest.raises(FileExistsError, match=re.escape(message)):
                save(tmp_path, {"a": DATA}, overwrite=overwrite)
        assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
        assert manifest.read_text() == text


def test_urls_and_paths_in_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for url, message in [
        ("s3:/bucket/run", "looks like a URL with one slash; write s3://"),
        ("file://host/run", "is a file of the host 'host'; write file:///path"),
        ("NO-SUCH-SCHEME://bucket/run", "no-such-scheme"),
    ]:
        with pytest.raises(ValueError, match=message):
            save(url, {"a": 1})
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("HOME", str(tmp_path))
    save("~/run", {"a": 1})
    assert (tmp_path / "run" / "manifest.json").exists()
    assert restore("~/run") == {"a": 1}
    save(f"FILE://localhost{tmp_path}/a%20b", {"a": 1})
    assert restore(f"file:{tmp_path}/a%20b") == restore(tmp_path / "a b") == {"a": 1}


def test_a_tree_without_leaves_fits_any_spec(auto_mesh: Mesh, tmp_path: Path) -> None:
    save(tmp_path, {"a": {}, "b": [None]})
    assert restore(tmp_path, mesh=auto_mesh, specs=P()) == {"a": {}, "b": [None]}
    assert restore(tmp_path, mesh=auto_mesh, specs=P(), at=["a"]) == {}
