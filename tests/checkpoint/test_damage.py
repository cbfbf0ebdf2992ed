"""Checkpoints that are damaged, or that somebody hostile made: an error, never wrong data."""

import contextlib
import copy
import functools
import json
import operator
import os
import pickle
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from damaged import (
    Damaged,
    Edit,
    array_named,
    as_links,
    flip,
    leaf_at,
    make_tree,
    on_array,
    on_leaf,
    on_piece,
    put,
    save_tiny,
    sealed,
)
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from leaks import little_memory
from meshes import mesh_of
from trials import Trials, rarely, tried

import gda
from gda.checkpoint import CheckpointNotFoundError, CorruptionError
from gda.checkpoint.format import manifest_json
from gda.checkpoint.format.manifest import Manifest
from gda.checkpoint.reading import checked_files
from gda.storage.stores.directory import FileStore
from gda.storage.stores.opening import Store
from gda.trees.records.recorded_tree import ArrayLeaf, path_of_keys


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints that tests copy."""
    path = tmp_path_factory.mktemp("saved")
    save_tiny(path / "plain", make_tree())
    return path


def copy_of(source: Path, path: Path) -> Damaged:
    return Damaged(shutil.copytree(source, path))


@pytest.fixture
def plain(saved: Path, tmp_path: Path) -> Damaged:
    return copy_of(saved / "plain", tmp_path / "run")


@pytest.fixture(scope="module")
def shared(saved: Path) -> Damaged:
    """A checkpoint whose manifest is replaced by every test that uses it."""
    return copy_of(saved / "plain", saved / "shared")


def restore(path: Any, **options: Any) -> Any:
    return gda.checkpoint.restore(path, max_workers=1, **options)


def verify(path: Any) -> Any:
    return gda.checkpoint.verify(path, max_workers=1)


def said_by(function: Callable[[Path], Any], path: Path) -> str:
    """Return the text of the error that must come."""
    with pytest.raises((CorruptionError, gda.checkpoint.NewerFormatError)) as caught:
        function(path)
    if isinstance(caught.value, gda.checkpoint.NewerFormatError):  # of a digit of the version
        assert "has version 1;" not in str(caught.value)
        assert "unless its first line is damaged" in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def check_found(damaged: Damaged, file: Path, *functions: Callable[[Path], Any]) -> None:
    """That the damage of a file is found, and named."""
    for function in functions:
        said = said_by(function, damaged.path)
        assert str(file) in said
        if file.parent.parent == damaged.data:
            assert any(leaf in said for leaf in damaged.leaves_in(file))
            assert ("its metadata" if file.name == "zarr.json" else f"chunk {file.name}") in said


def numbers_of(leaf: Any) -> Any:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def check_equal(tree: Any, expected: Any) -> None:
    tree, expected = (jax.tree.map(numbers_of, each) for each in (tree, expected))
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, tree, expected)


def plain_arrays(tree: Any) -> Any:
    is_array = lambda leaf: isinstance(leaf, gda.GlobalArray)  # noqa: E731
    return jax.tree.map(lambda leaf: getattr(leaf, "array", leaf), tree, is_leaf=is_array)


# Damage.


def test_whole_checkpoints_pass(plain: Damaged, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("load", "loads", "Unpickler"):  # no code comes from a file
        monkeypatch.delattr(pickle, name)
    assert verify(plain.path) == gda.checkpoint.inspect(plain.path)
    check_equal(restore(plain.path), plain_arrays(make_tree()))
    restore(plain.path, like=make_tree())
    assert {file.parent.name.partition(".")[0] for file in plain.chunks} >= {"packed", "00000"}
    assert len(plain.chunks) >= 11


@tried("a bit of a manifest, a chunk or the metadata of an array is flipped", sample=4)
@pytest.mark.parametrize("files", ["manifest.json", "c.*", "[0-9p]*/zarr.json"])
def test_every_flipped_byte_is_found(plain: Damaged, files: str, trials: Trials) -> None:
    there = [file for file in plain.whole if file.match(files)]
    bytes_of = [(file, at) for file in there for at in range(len(plain.whole[file]))]
    for file, at in trials.of(bytes_of):
        with plain.changed(file, flip(plain.whole[file], at)):
            check_found(plain, file, restore, verify)
        trials.count("found")


@tried("a file is too short, too long, empty or missing", sample=8)
def test_altered_files_are_found(plain: Damaged, trials: Trials) -> None:
    cases: list[tuple[Path, bytes | None]] = []
    for file in [*plain.data.glob("*/*"), plain.manifest]:
        whole = plain.whole[file]
        cases += [(file, whole[:length]) for length in range(len(whole))]
        cases += [(file, data) for data in (whole + b"\0", whole + whole, b"\0" + whole, None)] * 9
    for file, data in trials.of(cases):
        with plain.changed(file, data):
            if file == plain.manifest and data is None:
                with pytest.raises(CheckpointNotFoundError):
                    restore(plain.path)
            else:
                check_found(plain, file, restore, verify)
        trials.count("found")


def test_a_chunk_of_another_size_is_found_before_any_is_read(
    plain: Damaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    read_into = FileStore.read_into

    def noted(self: FileStore, name: str, *memory: Any) -> Any:
        read.append(plain.path / name)
        return read_into(self, name, *memory)

    monkeypatch.setattr(FileStore, "read_into", noted)
    restore(plain.path)
    assert {*plain.chunks} < {*read}
    for file in plain.chunks:
        for data in (plain.whole[file][:-1], plain.whole[file] + b"\0"):
            read.clear()
            with plain.changed(file, data):
                check_found(plain, file, restore)
            assert not {*plain.chunks}.intersection(read)


def test_fingerprints_of_every_kind_of_array_are_computed_from_the_files(plain: Damaged) -> None:
    leaves = [leaf for leaf in plain.body["leaves"] if "fingerprint" in leaf]
    assert len(leaves) == 8
    for leaf in leaves:
        plain.seal(on_leaf(*leaf["path"], fingerprint="0" * 16))
        differences = gda.checkpoint.diff(plain.path, gda.checkpoint.open(plain.path))
        assert [each.path for each in differences.of_other_content] == [tuple(leaf["path"])]


def test_chunks_of_an_older_save_say_so(plain: Damaged, tmp_path: Path) -> None:
    save_tiny(tmp_path / "old", make_tree(1))
    old = Damaged(tmp_path / "old")
    others = {file: old.whole[old.data / file.relative_to(plain.data)] for file in plain.chunks}
    # Of the same data, no save can tell them apart.
    mixed = [file for file, other in others.items() if other != plain.whole[file]]
    assert len(mixed) > 8
    for file in mixed[::3]:
        with plain.changed(file, others[file]):
            check_found(plain, file, restore, verify)
            assert "is intact, but from another save" in said_by(verify, plain.path)
    shutil.rmtree(plain.data)
    shutil.copytree(old.data, plain.data)
    with pytest.raises(CorruptionError) as caught:
        verify(plain.path)
    assert len(caught.value.problems) >= len(mixed)
    check_found(plain, plain.data, restore)


def test_verify_lists_all_that_is_wrong(plain: Damaged) -> None:
    wrong = [*plain.chunks[::2], *plain.data.glob("*/zarr.json")]
    for i, file in enumerate(wrong):
        data = plain.whole[file]
        if i % 3 == 0:
            file.unlink()
        else:
            file.write_bytes(data[:-1] if i % 3 == 1 else flip(data, 0))
    for workers in (1, 4):
        with pytest.raises(CorruptionError) as caught:
            gda.checkpoint.verify(plain.path, max_workers=workers)
        problems = caught.value.problems
        assert len(problems) == len(wrong)
        assert list(problems) == sorted(problems)
        for file in wrong:
            assert sum(f" {file} " in problem for problem in problems) == 1
        assert "more" in str(caught.value)


def test_a_manifest_that_is_none(shared: Damaged) -> None:
    for file, message in [
        (b"", "does not begin like a manifest of gda"),
        (b"\0" * 5000, "does not begin like a manifest of gda"),
        (b'{"gda-checkpoint": ' + b"9" * 5000, "does not begin like a manifest of gda"),
        (b'{"zarr_format": 3}\n', "does not begin like a manifest of gda"),
        (sealed(b"{}", 0), "has version 0; this gda reads version 1"),
        (sealed(b"{}", "x" * 500), "has version 'xxxxxxxxx"),
        (sealed(b"{}", 1.0), "is damaged: its 2 bytes do not match the checksum in its first line"),
        (sealed(b"{}") + b"\n", "is damaged: its 3 bytes"),
        (sealed(b"{}"), "the manifest has no 'leaves'"),
        (sealed(b""), "is not a manifest"),
        (sealed(b"{}{}"), "is not a manifest"),
        (sealed(b"[" * 10**6), "is not a manifest"),
        (sealed(b'{"a":' * 10**6), "is not a manifest"),
        (sealed(b"[1" + b"0" * 10**5 + b"]"), "is not a manifest"),
        (sealed(b"null"), "the manifest is not an object"),
        (sealed(b'{"data": 1, "data": 2}'), "one object has these names twice: 'data'"),
        (sealed(b'{"data": NaN}'), "NaN is not a number of JSON"),
    ]:
        shared.manifest.write_bytes(file)  # which all functions read in one way
        assert message in said_by(gda.checkpoint.inspect, shared.path), file[:40]


def test_a_newer_checkpoint_is_not_damaged(plain: Damaged) -> None:
    newer = [sealed(json.dumps(plain.body).encode(), 2)]
    for dtype in ("float3", "float8_e9m9fnuz", "uint512"):
        plain.seal(lambda body, dtype=dtype: array_named(body).update(dtype=dtype))
        newer.append(plain.manifest.read_bytes())
    for file, message in zip(newer, ["version 2", "float3", "e9m9", "uint512"], strict=True):
        plain.manifest.write_bytes(file)
        for read in (restore, verify, gda.checkpoint.inspect, gda.checkpoint.open):
            with pytest.raises(gda.checkpoint.NewerFormatError, match=f"{message}.* update"):
                read(plain.path)


def test_damage_matters_where_it_is_read(plain: Damaged) -> None:
    array = plain.data / array_named(plain.body)["name"]
    file, mesh = array / "c.3.0", mesh_of({"x": 4, "y": 2})
    with plain.changed(file, bytes(len(plain.whole[file]))):
        options = {"at": ["w"], "mesh": mesh, "specs": P(None, "y")}
        check_found(plain, file, lambda path: restore(path, **options))
        check_found(plain, file, lambda path: restore(path, like=make_tree()))
    for file in array.iterdir():
        file.unlink()
    tree = restore(plain.path, at=["half"])
    np.testing.assert_array_equal(tree, np.asarray(make_tree()["half"]))
    check_found(plain, array / "c.0.0", restore)


# Overwritten while it is read.


@pytest.mark.parametrize("read", [restore, verify])
def test_overwritten_meanwhile(plain: Damaged, monkeypatch: pytest.MonkeyPatch, read: Any) -> None:
    load = checked_files.load_manifest

    def load_and_overwrite(store: Store) -> Manifest:
        monkeypatch.undo()
        manifest = load(store)
        save_tiny(plain.path, make_tree(1), overwrite=True)
        return manifest

    monkeypatch.setattr(checked_files, "load_manifest", load_and_overwrite)
    with pytest.raises(RuntimeError, match="was overwritten while it was being read; read it aga"):
        read(plain.path)
    check_equal(restore(plain.path), plain_arrays(make_tree(1)))


# Not there.


def test_no_checkpoint(tmp_path: Path) -> None:
    assert issubclass(CheckpointNotFoundError, FileNotFoundError)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("empty", "many", "begun/data-0123456789abcdef"):
        (tmp_path / name).mkdir(parents=True)
    for i in range(10):
        (tmp_path / "many" / f"{i}\x1b[2J").write_text("")
    for name, said in [
        ("missing", "no such directory"),
        ("link", "no such directory"),
        ("empty", "it is empty"),
        ("file/below", "it is a file, or below one"),
        ("many", r"it has 0\x1b[2J; 1\x1b[2J; "),
        ("begun", "a save was begun there (data-0123456789abcdef) and never committed"),
    ]:
        for function in (restore, verify, gda.checkpoint.inspect):
            with pytest.raises(CheckpointNotFoundError) as caught:
                function(tmp_path / name)
            assert str(tmp_path / name) in str(caught.value)
            assert said in str(caught.value)


# Files that are something else.


def some_files(damaged: Damaged) -> list[Path]:
    array = damaged.chunks[0].parent
    return [damaged.chunks[0], damaged.chunks[-1], array / "zarr.json", damaged.manifest]


def test_files_and_directories_may_be_links(plain: Damaged, tmp_path: Path) -> None:
    array = plain.chunks[0].parent
    for place in [*some_files(plain), array, plain.data]:
        elsewhere = tmp_path / "elsewhere"
        place.rename(elsewhere)
        place.symlink_to(elsewhere)
        verify(plain.path)
        check_equal(restore(plain.path), plain_arrays(make_tree()))
        for target in ("/dev/zero", "/nowhere"):
            place.unlink()
            place.symlink_to(target)
            said = said_by(verify, plain.path)
            assert str(place) in said
            if target == "/nowhere" and place not in (array, plain.data):
                assert f"{place} is a link to /nowhere, which is missing; fetch it" in said
        place.unlink()
        elsewhere.rename(place)
    (tmp_path / "link").symlink_to(plain.path)
    verify(tmp_path / "link")


def test_a_save_over_links_leaves_the_files_behind_them(plain: Damaged, tmp_path: Path) -> None:
    (plain.path / ".lock").touch()
    as_links(plain.path, tmp_path / "blobs")
    elsewhere = tmp_path / "elsewhere"  # a directory that is a link too
    plain.chunks[0].parent.rename(elsewhere)
    plain.chunks[0].parent.symlink_to(elsewhere)

    def files() -> dict[Path, bytes | str]:
        behind = [*elsewhere.rglob("*"), *(tmp_path / "blobs").iterdir()]
        return {path: path.read_bytes() for path in behind if path.is_file()}

    before = files()
    verify(plain.path)
    for value in 1, 2:
        gda.checkpoint.save(plain.path, {"w": np.full(3, value)}, overwrite=True)
        assert restore(plain.path)["w"].tolist() == [value] * 3
        assert files() == before
    assert [path for path in plain.path.rglob("*") if path.is_symlink()] == []


def test_pipes_sockets_and_directories_are_refused(
    plain: Damaged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in some_files(plain):
        place.unlink()
        with contextlib.ExitStack() as stack:
            monkeypatch.chdir(place.parent)  # names of sockets are short
            for make in (os.mkfifo, os.mkdir, stack.enter_context(socket.socket(1)).bind):
                make(place.name)
                assert f"{place} is not a regular file" in said_by(verify, plain.path)
                place.rmdir() if place.is_dir() else place.unlink()
        plain.mend()
    verify(plain.path)


# Manifests that somebody hostile made: whole by their seal.


def without(*keys: Any) -> Edit:
    return lambda body: functools.reduce(operator.getitem, keys[:-1], body).pop(keys[-1])


def nested(depth: int, wrap: Callable[[Any], Any] = lambda value: [value]) -> Any:
    value: Any = []
    for _ in range(depth):
        value = wrap(value)
    return value


def as_list(value: Any) -> Any:
    return {"list": [value]}


def huge(body: dict[str, Any]) -> None:
    """An array of 16 TiB in chunks of 256 GiB."""
    array, leaf = array_named(body), leaf_at(body, "w")
    array |= {"shape": [2**42], "chunk_shape": [2**36], "crc32c": "0" * 8 * 2**6}
    leaf["shape"] = [2**42]


def each(edit: Callable[..., Edit], *path: str, **values: Sequence[Any]) -> list[Edit]:
    """Return the edits that give each field each of its values."""
    return [edit(*path, **{field: value}) for field in values for value in values[field]]


LISTED = ["x", 1, None, [-1], [2.0], [True], [2**70]]
NO_NAMES = ["..", "../x", "/etc", "a/b", "a\0b", "", "x\n", "x" * 200, "é", 3, None, []]
NO_DTYPES = [
    *(
        "object",
        "O",
        "V8",
        "datetime64[s]",
        "str",
        "U10",
        "<f4",
        "f4",
        "i4,i4",
        "void",
        "longdouble",
    ),
    *("finfo", "__name__", "\ud800", "", "float32\0", "int", "bool_", "generic", 3, None, ["int8"]),
]
OF_PIECES = [
    [-1, 99, True, "0", None, 2**70, 0],  # the array
    [-1, 3, 10**9, True, "0", 2.0, [0]],  # the offset
    [*LISTED, [1], [0, 0], []],  # the start
    [*LISTED, [1], [3], [0], [2, 1], []],  # the shape
]
STRUCTURES = [
    *(0, 99, -1, "x", 1.5, True, None, [], {}, {"dict": 3}, {"dict": [[1]]}, {"set": []}),
    *({"dict": [["w", 0], ["w", 1]]}, {"dict": [[None, 0]]}, {"list": [{"list": []}] * 10**4}),
    *(nested(250, as_list), nested(400, as_list)),
]
# A field has one meaning in all records.
HOSTILE = [
    *each(put, data=[*NO_NAMES, "data-ABC", "data-"], structure=STRUCTURES),
    *each(put, about=[3, [], None, {"a": []}, {"a": None}, {"a": nested(500)}]),
    *each(put, arrays=[*LISTED, [], [[]], [{}]], leaves=[*LISTED, [], [[]], [{}]]),
    *each(on_array, name=NO_NAMES, dtype=NO_DTYPES, shape=LISTED),
    *each(on_array, chunk_shape=[*LISTED, [3, 4], [0, 4]]),
    *each(on_array, metadata=[*LISTED, [2**21, 1], [1], [1, 2**32], [1, 2, 3]]),
    *each(on_array, crc32c=["", "0", "x" * 64, 3, None, "0" * 8 + " " * 24, "\u0660" * 64]),
    *each(on_leaf, "w", dtype=["int32", 3], shape=[*LISTED, [1], []], array=[-1, 99, 1.0, True, 0]),
    *each(on_leaf, "w", path=[3, "w", None, [1.5], [None], [True], [["w"]], [], ["half"], ["x"]]),
    *each(on_leaf, "w", path=[["w", 0], [2**64], nested(500)], kind=["object", "", 3, None, "str"]),
    *each(on_leaf, "w", spec=[3, [], True, {}], mesh=[3, [], True, "x", {"x": "y"}, {"x": -1}]),
    *each(on_leaf, "w", fingerprint=[3, [], "", "x" * 16, " " * 32]),
    *each(on_leaf, "key", key_impl=[3, [], True, {}, "", "\n"]),
    *each(on_leaf, "more", pieces=[*LISTED, [], [[0] * 4]]),
    *each(on_leaf, "step", value=[3, "x", None, "", "1.5", [], "9" * 10**5]),
    *each(on_leaf, "name", value=[3, None, "no digits", [], [3], ["a", "b"], {}]),
    *[on_leaf("step", kind="bool", value=value) for value in [0, "True", None]],
    *[on_leaf("step", kind="float", value=value) for value in [1.5, "x", []]],
    on_leaf("step", kind="complex", value="1+"),
    on_leaf("step", kind="bytes", value="0"),
    *[on_piece(place, value) for place, values in enumerate(OF_PIECES) for value in values],
    *[without(key) for key in ("about", "data", "structure", "leaves", "arrays")],
    *[without("arrays", 0, key) for key in ("name", "shape", "crc32c")],
    *[without("leaves", 0, key) for key in ("path", "kind", "shape")],
    lambda body: leaf_at(body, "w").pop("array"),
    lambda body: leaf_at(body, "more").update(pieces=leaf_at(body, "more")["pieces"] * 2),
    lambda body: (  # not tied: keys are made for each leaf
        body["leaves"].extend({**leaf_at(body, "key"), "path": [f"{n}"]} for n in range(10**4)),
        body["structure"]["dict"].extend(
            [f"{n}", len(body["leaves"]) - 10**4 + n] for n in range(10**4)
        ),
    ),
    lambda body: body["arrays"].append(array_named(body)),
    lambda body: (
        leaf_at(body, "small", 2).update(path=["more"]),
        next(leaf for leaf in body["leaves"] if leaf["path"] == ["more"]).update(path=["small", 2]),
    ),
    lambda body: body["structure"]["dict"].append(["twice", 0]),
    lambda body: body["structure"]["dict"].pop(),
]
ABSURD = [
    on_array(shape=[2**62, 2**62], chunk_shape=[2**31, 2**31]),
    on_array(shape=[1] * 1000, chunk_shape=[1] * 1000),
    on_array(shape=[2**60, 1], chunk_shape=[2**60, 1], crc32c="0" * 8),
    on_array(shape=[2**62, 0], chunk_shape=[1, 1], crc32c=""),
    lambda body: leaf_at(body, "more").update(pieces=leaf_at(body, "more")["pieces"] * 10**4),
    lambda body: leaf_at(body, "more").update(pieces=[], shape=[0, 2**61]),
    huge,
]


def test_hostile_manifests_are_refused(shared: Damaged) -> None:
    for number, edit in enumerate([*HOSTILE, *ABSURD]):
        shared.seal(edit)
        size = shared.manifest.stat().st_size
        # Only the files contradict what is huge. All functions read a manifest in one way.
        function = restore if edit is huge else gda.checkpoint.inspect
        is_absurd = number >= len(HOSTILE)
        with little_memory(2**24 + 100 * size) if is_absurd else contextlib.nullcontext():
            said = said_by(function, shared.path)
        assert len(said) < 3000, number
        assert said.isprintable(), number


def test_the_pieces_of_a_leaf_have_each_of_its_elements_once() -> None:
    count = 2000
    leaf = {"path": [], "kind": "numpy", "shape": [count], "dtype": "int8"}
    leaf |= {"fingerprint": "0" * 16}
    array = {"name": "p", "shape": [count], "chunk_shape": [count], "dtype": "int8"}
    array |= {"metadata": [1, 1], "crc32c": "0" * 8}
    pieces = [[0, i, [i], [1]] for i in range(count)]
    body = {"about": {}, "data": "data-0123456789abcdef", "structure": 0, "arrays": [array]}

    def load(pieces: Any) -> Manifest:
        said = json.dumps({**body, "leaves": [{**leaf, "pieces": pieces}]}).encode()
        return manifest_json.load(sealed(said), "m")

    load(pieces[::-1])
    pieces[5] = [0, 5, [6], [1]]  # element 5 would be memory that nobody wrote
    for wrong in (pieces, pieces[:5] + pieces[6:]):
        with pytest.raises(CorruptionError, match="do not have each element of its shape"):
            load(wrong)


def test_memory_is_taken_only_for_data_in_files(plain: Damaged) -> None:
    plain.seal(huge)
    directory = plain.data / array_named(plain.body)["name"]
    for number in range(63):  # all but one
        with open(directory / f"c.{number}", "wb") as file:
            file.truncate(2**38 + 4)
    with little_memory():
        assert f"{directory}/c.63 is missing" in said_by(restore, plain.path)


def test_a_manifest_too_large_is_neither_read_nor_written(
    plain: Damaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(plain.manifest, 2**40)
    for function in (restore, verify, gda.checkpoint.inspect):
        with little_memory(2**20):
            said = said_by(function, plain.path)
        assert f"has {2**40} bytes; expected are at most {2**28}" in said
    plain.mend()
    monkeypatch.setattr(manifest_json, "MOST_BYTES", 1500)
    with pytest.raises(ValueError, match="expected are at most 1500"):
        save_tiny(plain.path, make_tree(1), overwrite=True)
    monkeypatch.undo()
    check_equal(restore(plain.path), plain_arrays(make_tree()))


def test_keys_of_no_known_kind(plain: Damaged) -> None:
    for kind in ("unknown", "rbg"):
        plain.seal(on_leaf("key", key_impl=kind))
        mesh = mesh_of({"x": 4, "y": 2})
        for options in ({"mesh": mesh, "specs": P()}, {"like": make_tree()}):
            with pytest.raises(ValueError, match="key"):
                restore(plain.path, **options)


def test_inspect_shows_nothing_that_a_terminal_obeys(plain: Damaged) -> None:
    evil = "\x1b[2J\x1b]0;x\x07\u202e\x9b31m\n\r"

    def edit(body: dict[str, Any]) -> None:
        leaf_at(body, "w").update(spec=f"P('x'){evil}", mesh={evil: 4})
        leaf_at(body, "name").update(value=[evil])
        body["about"] = {evil: evil, "saved": "x" * 10**5}
        leaf = leaf_at(body, "step")
        leaf["path"] = [evil]
        next(pair for pair in body["structure"]["dict"] if pair[0] == "step")[0] = evil

    plain.seal(edit)
    contents = gda.checkpoint.inspect(plain.path)
    lines = str(contents).split("\n")
    assert len(lines) == len(contents.leaves) + 2
    assert all(line.isprintable() for line in lines)
    assert max(map(len, lines)) < 500
    assert r"\x1b[2J" in lines[-2]
    plain.chunks[0].unlink()
    assert said_by(verify, plain.path).isprintable()


# A fuzzer.


ALLOWED = (CorruptionError, CheckpointNotFoundError)

numbers = st.integers() | st.sampled_from([0, 1, 2, 2**31, 2**32, 2**62, 2**63, 2**64, 10**30, -1])
words = st.text(max_size=8) | st.sampled_from(
    ["float32", "object", "int4", "numpy", "..", "GlobalArray", "str", "bytes", "int"]
)
scalars = st.none() | st.booleans() | numbers | st.floats(allow_nan=False) | words
values = st.recursive(
    scalars,
    lambda below: (
        st.lists(below, max_size=4)
        | st.dictionaries(
            words | st.sampled_from(["dict", "list", "node", "shape", "path"]), below, max_size=4
        )
    ),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All places in some JSON."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(below, (*path, key))


def use(path: Any) -> None:
    """Do everything with a checkpoint; what comes must be what its manifest says, or an error."""
    try:
        contents = gda.checkpoint.inspect(path)
    except ALLOWED:
        for function in (restore, verify):
            with pytest.raises(ALLOWED):
                function(path)
        return
    assert all(line.isprintable() for line in str(contents).split("\n"))
    with contextlib.suppress(*ALLOWED):
        verify(path)
    # A kind of keys that JAX does not have may be one that its user has to register.
    with contextlib.suppress(ValueError, CheckpointNotFoundError):
        leaves = jax.tree_util.tree_flatten_with_path(restore(path))[0]
        found = {path_of_keys(keys): leaf for keys, leaf in leaves}
        for leaf in contents.leaves:
            if isinstance(leaf, ArrayLeaf):
                array = numbers_of(found.pop(leaf.path))
                assert (array.shape, array.dtype) == (leaf.shape, leaf.dtype)
            else:
                assert repr(found.pop(leaf.path)) == repr(leaf.value)
        assert not found
    for options in ({"mesh": mesh_of({"x": 4, "y": 2}), "specs": P()}, {"like": make_tree()}):
        with contextlib.suppress(ValueError, TypeError, KeyError, CheckpointNotFoundError):
            restore(path, **options)


@rarely(5)
@given(st.data())
def test_fuzzed_fields(shared: Damaged, data: st.DataObject) -> None:
    body = copy.deepcopy(shared.body)
    for _ in range(data.draw(st.integers(1, 3))):
        *parents, last = data.draw(st.sampled_from(list(places(body))))
        where: Any = functools.reduce(operator.getitem, parents, body)
        what = data.draw(st.sampled_from(["replace", "remove", "repeat", "copy"]))
        if what == "remove":
            del where[last]
        elif what == "repeat" and isinstance(where, list):
            where.append(where[last])
        elif what == "copy":
            keys = data.draw(st.sampled_from(list(places(body))))
            where[last] = copy.deepcopy(functools.reduce(operator.getitem, keys, body))
        else:
            where[last] = data.draw(values)
        if not list(places(body)):
            break
    shared.seal(body)
    # Through TensorStore, as an object store, and without it.
    layers = [{"base": f"file://{shared.path}/"}]
    use(data.draw(st.sampled_from([shared.path, {"driver": "kvstack", "layers": layers}])))
