"""Checkpoints: what cannot be saved, and what does not fit when it is restored.

One error names everything that does not fit, before anything is read.
"""

import re
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import batch, cut

import gda
from gda.checkpoint import inspect, restore, save
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
        "the checkpoint does not match like: it has no b/e; f (missing='keep' keeps "
        "those of like); like has no b/d (partial=True omits them)"
    )
    with pytest.raises(ValueError, match=re.escape("it has no b/e")):
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
        "at a, it has shape (16, 8), and like has (8, 16)",
        " b, it has PRNG keys, and like has an array of uint32; convert with "
        "jax.random.wrap_key_data or key_data",
        " c, it has the int 3, and like has an array of shape (3,); put a value of type int there",
        " d, it has an array of shape (3,), and like has the int 4",
        " e, it has dtype float64, and like has int32; pass cast=True",
    ]
    assert not reads


def test_64_bits_are_not_narrowed(auto_mesh: Mesh, tmp_path: Path, reads: list[str]) -> None:
    with jax.enable_x64(True):
        save(tmp_path, {"a": cut(np.arange(8.0), auto_mesh, P("x"))})
    message = "at a, it has dtype float64, which JAX narrows to float32 without jax_enable_x64"
    whole = NamedSharding(auto_mesh, P())
    like = {"a": jax.ShapeDtypeStruct((8,), np.float64, sharding=whole)}
    for arguments in ({"mesh": whole}, {"like": like}):
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            restore(tmp_path, **arguments)
    assert not reads
    like = {"a": jax.ShapeDtypeStruct((8,), np.float32, sharding=whole)}
    restored = restore(tmp_path, like, cast=True)["a"]
    np.testing.assert_array_equal(restored, np.arange(8.0))


def test_like_without_a_layout(tmp_path: Path) -> None:
    save(tmp_path, dict.fromkeys("abcdefghijkl", DATA))
    message = "like has no sharding for the array; give its ShapeDtypeStruct one"
    like = dict.fromkeys("abcdefghijkl", jax.ShapeDtypeStruct(DATA.shape, DATA.dtype))
    with pytest.raises(ValueError, match=message) as caught:
        restore(tmp_path, like)
    # One reason is said once.
    assert str(caught.value).count("has no sharding for") == 1
    assert "at a; b; " in str(caught.value)
    assert "and 4 more, like has no sharding" in str(caught.value)


def test_specs_that_do_not_fit_name_their_leaves(
    auto_mesh: Mesh, tmp_path: Path, reads: list[str]
) -> None:
    tree = {"a": cut(batch(6, 8), auto_mesh, P("y")), "b": {"c": cut(DATA, auto_mesh, P())}}
    keys = jax.random.split(jax.random.key(0), 4)
    save(tmp_path, {**tree, "k": keys, "step": 3})
    specs = {"a": P("x"), "b": {"c": P("z")}, "d": P(), "k": P("x", "y")}
    with pytest.raises(ValueError, match="the checkpoint does not fit specs") as caught:
        restore(tmp_path, mesh=auto_mesh, specs=specs)
    for said in [
        "it has no d, which specs has",
        "at a, global shape (6, 8) cannot be sharded by P('x') on the mesh {'x': 4, 'y': 2}: dim",
        "at b/c",
        "at k",
        "but global shape (4,) has 1 dimension",  # of keys, and not of their numbers
    ]:
        assert said in str(caught.value)
    with pytest.raises(ValueError, match="specs has nothing for b/c; k"):
        restore(tmp_path, mesh=auto_mesh, specs={"a": P()})
    assert not reads


LAYOUT = NamedSharding(AbstractMesh((8,), ("x",)), P())
NOWHERE = jax.ShapeDtypeStruct((16, 8), np.float32, sharding=LAYOUT)


def part(like: Any) -> dict[str, Any]:
    return {"like": like, "partial": True}


def over_x(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P("x"))


ARGUMENTS: list[tuple[Any, type[Exception], str]] = [
    (lambda _: {"specs": P()}, TypeError, "was given without a mesh; pass"),
    (lambda _: {"like": LAYOUT}, TypeError, "and not a tree; pass mesh= and specs="),
    (lambda _: {"cast": True}, TypeError, "cast was given without like; pass like= too"),
    (lambda _: {"partial": True}, TypeError, "partial was given without like; pass like= too"),
    (lambda _: {"pad": True}, TypeError, "pad was given without a mesh; pass mesh= and specs="),
    (lambda _: {"like": {}, "missing": "omit"}, ValueError, "missing must be 'error' or 'keep"),
    (lambda _: {"at": "a"}, TypeError, "at must be a list of keys and indices, such as ['par"),
    (lambda _: {"at": ["c"]}, KeyError, "c is not in the tree; the tree itself has 'a'"),
    (lambda _: {"at": ["a", 0]}, KeyError, "a/0 is not in the tree; a has nothing"),
    (lambda _: part({"a": DATA.astype("f2")}), ValueError, "float32, and like has float16"),
    (lambda _: part({"k": jax.random.key(0, impl="rbg")}), ValueError, "and like has key<rbg>"),
    (lambda mesh: part(gda.abstract({"n": 0}, mesh, P())), ValueError, "is cast to int32, and"),
    (lambda mesh: part(gda.abstract({"n": 0.5}, mesh, P())), ValueError, "a value of type int"),
    (lambda _: part({"a": NOWHERE}), ValueError, "has no mesh and spec; use a NamedSharding"),
    (lambda mesh: {"mesh": over_x(mesh)}, ValueError, "at b, global shape (3, "),
    (lambda mesh: {"mesh": {"a": over_x(mesh)}}, ValueError, "mesh has nothing for b"),
    (lambda mesh: {"mesh": dict.fromkeys("abck", over_x(mesh))}, ValueError, "it has no c, which"),
    (lambda mesh: {"mesh": mesh.abstract_mesh, "specs": P()}, TypeError, "mesh must be a jax."),
]


def test_arguments_of_restore(auto_mesh: Mesh, tmp_path: Path, reads: list[str]) -> None:
    save(tmp_path, {"a": DATA, "b": DATA[:3], "k": jax.random.key(0), "n": 2**40})
    for arguments, error, message in ARGUMENTS:
        with pytest.raises(error) as caught:
            restore(tmp_path, **arguments(auto_mesh))
        assert message in str(caught.value.args[0])
    assert not reads


def test_unsavable_trees_are_refused(tmp_path: Path) -> None:
    cases: list[tuple[Any, str]] = [
        ({True: 1}, "the key True in True is a bool; use only strings and integers"),
        ({("a", 1): 1}, "the key ('a', 1) in ('a', 1) is a tuple"),
        ([object()], "a leaf of type object cannot be saved; the leaves of a tree are"),
        ([np.ma.array([1], mask=True)], "a masked array would lose its mask; pass array.filled"),
        ([np.array(["text"])], "an array of dtype <U4 cannot be saved; convert it"),
        ([np.zeros(2, ml_dtypes.complex32)], "an array of dtype complex32 cannot be"),
        ([np.zeros(2, "f4,i4")], "cannot be saved; convert it to a dtype of JAX"),
        ([np.longdouble(1)], "an array of dtype float128 cannot be saved"),
        ([jax.ShapeDtypeStruct((2,), np.float32)], "a leaf of type ShapeDtypeStruct"),
    ]
    for tree, message in cases:
        with pytest.raises(TypeError, match=re.escape(message)) as caught:
            save(tmp_path / "run", tree)
        if isinstance(tree, list):
            assert "gda: at 0 of the tree" in caught.value.__notes__
        assert not (tmp_path / "run" / "manifest.json").exists()


def test_a_tree_nested_too_deep(tmp_path: Path) -> None:
    tree: Any = 1
    for _ in range(250):
        tree = [tree]
    with pytest.raises(ValueError, match="nested deeper than 200 levels"):
        save(tmp_path, tree)


# Specs and paths.


def test_specs_by_a_function(auto_mesh: Mesh, tmp_path: Path) -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    save(tmp_path, {"layers": [DATA, keys], "b": keys[0]})
    asked = {}

    def spec_of(path: str, leaf: jax.ShapeDtypeStruct) -> P:
        asked[path] = (leaf.shape, leaf.dtype)
        return P("x") if leaf.ndim else P()

    restored = restore(tmp_path, mesh=auto_mesh, specs=spec_of)["layers"]
    expected = {"b": ((), keys.dtype), "layers/0": ((16, 8), np.float32)}
    assert asked == {**expected, "layers/1": ((8,), keys.dtype)}  # not of the numbers of the keys
    np.testing.assert_array_equal(restored[0], DATA)
    assert restored[1].sharding.spec == P("x")
    with pytest.raises(KeyError, match="b") as caught:
        restore(tmp_path, mesh=auto_mesh, specs=lambda path, leaf: {}[path])
    assert caught.value.__notes__ == ["gda: at b of the tree"]


def test_an_array_that_jax_does_not_have_stays_that_of_numpy(
    auto_mesh: Mesh, tmp_path: Path
) -> None:
    wide = np.arange(3)
    save(tmp_path, {"n": wide, "w": DATA})
    restored = restore(tmp_path, mesh=auto_mesh, specs=P())
    assert type(restored["n"]) is np.ndarray
    np.testing.assert_array_equal(restored["n"], wide, strict=True)
    assert isinstance(restored["w"], gda.GlobalArray)
    with jax.enable_x64(True):
        assert restore(tmp_path, mesh=auto_mesh, specs=P())["n"].array.dtype == np.int64


@pytest.mark.parametrize("first", [{"w": DATA}, DATA])
def test_tree_and_path_in_the_wrong_order(first: Any, tmp_path: Path) -> None:
    for call in (lambda: save(first, str(tmp_path)), lambda: inspect(first)):
        with pytest.raises(TypeError, match="the first argument must be the path of a") as caught:
            call()
        assert len(str(caught.value)) < 300


def test_files_beside_a_checkpoint_are_left_alone(tmp_path: Path) -> None:
    save(tmp_path, {"a": DATA})
    (tmp_path / "notes.txt").touch()
    save(tmp_path / "sub", {"a": 1})
    save(tmp_path, {"a": 2}, overwrite=True)
    assert restore(tmp_path) == {"a": 2}
    assert restore(tmp_path / "sub") == {"a": 1}
    assert (tmp_path / "notes.txt").exists()


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
