"""``gda convert`` as a user runs it, and the other commands at the files that it makes."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from orbax_files import write_orbax
from running import Run, python
from safetensors.numpy import save_file

import gda

BIG = np.arange(2**19, dtype=np.float32).reshape(1024, 512)  # with chunks of its own
W, B = BIG[:3, :4].copy(), np.array([1, 2], np.int8)
TREE = {"layers": [{"w": W, "b": B}], "big": BIG, "step": 7}
ARRAYS = {"layers.0.w": W, "layers.0.b": B, "big": BIG}

MAPS = """
import os, sys, time
import gda, numpy as np

def stacked(tree):
    w = tree["layers"][0]["w"]
    return {"w": gda.storage.stack([w.T, w.T[::-1]], axis=1), "row": w[1], "big": tree["big"][:8]}

def nothing(tree):
    return None

def text(tree):
    return {"w": tree["big"], "name": "llama"}

def failing(tree):
    return {"w": tree["nope"]}

class Unread:
    shape, dtype = (4, 4), np.dtype(np.float32)

    def __init__(self, error):
        self.error = error

    def __getitem__(self, index):
        raise self.error

def unread(tree):
    return {"a": tree["big"], "w": Unread(OSError("the disk is gone"))}

class Killing(Unread):
    def __getitem__(self, index):
        # Another thread may be the first to write.
        late = time.monotonic() + 60
        while time.monotonic() < late and not {*os.listdir(sys.argv[3])} - {".lock"}:
            time.sleep(0.01)
        os.kill(os.getpid(), 9)

def killed(tree):
    return {"a": tree["big"], "w": Killing(None)}

def interrupted(tree):
    return {"a": tree["big"], "w": Unread(KeyboardInterrupt())}
"""


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files of every kind, of the same arrays."""
    folder = tmp_path_factory.mktemp("sources")
    gda.checkpoint.save(folder / "checkpoint", TREE)
    (folder / "safetensors").mkdir()
    save_file(ARRAYS, folder / "safetensors" / "model.safetensors")
    run = {("layers", 0, "w"): W, ("layers", 0, "b"): B, ("big",): BIG, ("step",): 7}
    write_orbax(folder / "orbax", run)
    (folder / "map.py").write_text(MAPS)
    return folder


@pytest.fixture
def convert(run: Run, sources: Path, tmp_path: Path) -> Callable[..., Any]:
    """Converts a source to a name in the folder of the test, with a function of the maps."""

    def converted(source: str, target: str, *options: str, by: str = "") -> Any:
        of_map = ["--map", f"{sources}/map.py:{by}"] if by else []
        return run("convert", sources / source, tmp_path / target, *of_map, *options)

    return converted


def read(path: Path) -> dict[str, Any]:
    """Return the arrays of any files by name."""
    if (path / "manifest.json").exists():
        restored = gda.checkpoint.restore(path)
        if "layers" not in restored:
            return restored
        (layer,) = restored["layers"]
        return {"layers.0.w": layer["w"], "layers.0.b": layer["b"]} | {
            name: value for name, value in restored.items() if name != "layers"
        }
    tensors = gda.storage.open_safetensors(path)
    return {name: np.asarray(tensor) for name, tensor in tensors.items()}


# The usual conversions.


@pytest.mark.parametrize("source", ["checkpoint", "safetensors", "orbax"])
@pytest.mark.parametrize(
    ("target", "options", "kind"),
    [
        ("new", [], "a checkpoint of gda"),
        ("new.safetensors", [], "safetensors files"),
        ("new", ["--to", "safetensors", "--max-file-bytes", "1MiB"], "safetensors files"),
    ],
)
def test_every_pair_of_kinds(
    convert: Callable[..., Any],
    run: Run,
    sources: Path,
    tmp_path: Path,
    source: str,
    target: str,
    options: list[str],
    kind: str,
) -> None:
    code, out, err = convert(source, target, *options)
    has_step = source != "safetensors"
    assert (code, err) == (0, "")
    assert out == f"wrote {3 + has_step} leaves, 2.0 MiB, to {tmp_path / target}, {kind}\n"
    found = read(tmp_path / target)
    assert found.keys() == ARRAYS.keys() | ({"step"} if has_step else set())
    for name, expected in ARRAYS.items():
        np.testing.assert_array_equal(found[name], expected)
        assert found[name].dtype == expected.dtype


def test_a_map_of_views(convert: Callable[..., Any], tmp_path: Path) -> None:
    for source in ("checkpoint", "orbax"):
        assert convert(source, source, by="stacked")[0] == 0
        found = read(tmp_path / source)
        np.testing.assert_array_equal(found["w"], np.stack([W.T, W.T[::-1]], axis=1))
        np.testing.assert_array_equal(found["row"], W[1])
        np.testing.assert_array_equal(found["big"], BIG[:8])


def test_keys_stay_keys(run: Run, tmp_path: Path) -> None:
    keys = {"fry": jax.random.key(1), "rbg": jax.random.split(jax.random.key(2, impl="rbg"), 3)}
    gda.checkpoint.save(tmp_path / "keys", {**keys, "w": W})
    command = ["convert", tmp_path / "keys"]
    assert run(*command, tmp_path / "new", "--dtype", "bf16")[0] == 0
    restored = gda.checkpoint.restore(tmp_path / "new")
    assert restored["w"].dtype == ml_dtypes.bfloat16
    for name, key in keys.items():
        assert restored[name].dtype == key.dtype
        np.testing.assert_array_equal(*map(jax.random.key_data, (restored[name], key)))
    code, _, err = run(*command, tmp_path / "new.safetensors")
    assert (code, "no file holds key<fry>; save the numbers of the keys" in err) == (2, True)
    # As the message says.
    (tmp_path / "map.py").write_text(
        "import jax\n"
        "def data(tree):\n"
        "    return tree | {name: jax.random.key_data(tree[name]) for name in ('fry', 'rbg')}\n"
    )
    of_map = ["--map", f"{tmp_path}/map.py:data"]
    assert run(*command, tmp_path / "new.safetensors", *of_map)[0] == 0
    data = gda.storage.open_safetensors(tmp_path / "new.safetensors")["rbg"]
    np.testing.assert_array_equal(data, jax.random.key_data(keys["rbg"]), strict=True)


def test_metadata_of_safetensors_files_is_kept(run: Run, tmp_path: Path) -> None:
    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"w": W}, source, {"format": "mlx", "license": "MIT"})
    assert run("convert", source, target, "--dtype", "bf16")[0] == 0
    kept = gda.storage.open_safetensors(target).metadata
    assert kept == {"format": "mlx", "license": "MIT"}
    gda.checkpoint.save(tmp_path / "checkpoint", {"w": W})
    assert run("convert", tmp_path / "checkpoint", tmp_path / "c.safetensors")[0] == 0
    assert gda.storage.open_safetensors(tmp_path / "c.safetensors").metadata == {"format": "pt"}


def test_a_dtype_is_for_floats(convert: Callable[..., Any], tmp_path: Path) -> None:
    assert convert("checkpoint", "new", "--dtype", "bf16")[0] == 0
    found = read(tmp_path / "new")
    assert (found["layers.0.b"].dtype, found["step"]) == (np.int8, 7)
    np.testing.assert_array_equal(found["layers.0.w"], W.astype(ml_dtypes.bfloat16))


def test_progress_counts_all_bytes(
    convert: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[int, int]] = []
    monkeypatch.setattr("gda.cli.convert.shows_progress", lambda: lambda *n: shown.append(n))
    assert convert("checkpoint", "new.safetensors")[0] == 0
    total = BIG.nbytes + W.nbytes + B.nbytes + 8
    assert len(shown) > 1
    assert shown[-1] == (total, total)


# The other commands.


def test_leaves_that_cannot_be_read_are_named(run: Run, tmp_path: Path) -> None:
    write_orbax(tmp_path / "run", {("w",): W, ("other",): W})
    metadata = json.loads((tmp_path / "run" / "_METADATA").read_text())
    metadata["tree_metadata"]["('other',)"]["value_metadata"]["value_type"] = "MyType"
    (tmp_path / "run" / "_METADATA").write_text(json.dumps(metadata))
    code, out, err = run("convert", tmp_path / "run", tmp_path / "new")
    assert (code, out, "'MyType', was not written, or in a way" in err) == (2, "", True)


def test_an_item_of_an_orbax_run(run: Run, tmp_path: Path) -> None:
    write_orbax(tmp_path / "run" / "state", {("w",): W})
    write_orbax(tmp_path / "run" / "ema", {("w",): W + 1})
    (tmp_path / "run" / "_CHECKPOINT_METADATA").write_text("{}")
    path, new = tmp_path / "run", tmp_path / "new"
    said = "has 2 items: 'ema'; 'state'; pass the path of the folder of one, such as"
    assert said in run.refusal("convert", path, new)
    assert run("convert", path / "ema", new)[0] == 0
    assert gda.checkpoint.restore(new)["w"].tolist() == (W + 1).tolist()


# A part of a tree, and leaves that a target cannot hold.


@pytest.mark.parametrize("source", ["checkpoint", "orbax"])
def test_a_subtree_by_its_path(convert: Callable[..., Any], tmp_path: Path, source: str) -> None:
    code, out, _ = convert(source, "new.safetensors", "--at", "layers/0")
    assert (code, out.split(",")[0]) == (0, "wrote 2 leaves")
    found = gda.storage.open_safetensors(tmp_path / "new.safetensors")
    assert {name: np.asarray(each).tolist() for name, each in found.items()} == {
        "w": W.tolist(),
        "b": B.tolist(),
    }
    code, out, err = convert(source, "other", "--at", "layers/3")
    assert (code, out) == (2, "")
    assert "--at layers/3: layers/3 is not in the tree; layers has " in err


def test_a_subtree_of_an_item_of_an_orbax_run(run: Run, tmp_path: Path) -> None:
    for item, add in (("state", 0), ("ema", 1)):
        write_orbax(tmp_path / "run" / item, {("w", "kernel"): W + add})
    (tmp_path / "run" / "_CHECKPOINT_METADATA").write_text("{}")
    assert run("convert", tmp_path / "run", tmp_path / "new", "--at", "ema/w")[0] == 0
    np.testing.assert_array_equal(gda.checkpoint.restore(tmp_path / "new")["kernel"], W + 1)


def save_in_two_processes(path: str) -> None:
    data = gda.checkpoint.PerProcess({"next": 10 * jax.process_index()})
    gda.checkpoint.save(path, {"w": W, "data": data, "key": jax.random.key(0), "name": "a"})


@pytest.fixture
def of_two(tmp_path: Path, process_pool: Any) -> Path:
    process_pool(2, devices=4).run(save_in_two_processes, str(tmp_path / "two"))
    return tmp_path / "two"


def test_leaves_that_a_target_cannot_hold_are_named_or_skipped(
    run: Run, of_two: Path, tmp_path: Path
) -> None:
    err = run.refusal("convert", of_two, tmp_path / "new.safetensors")
    assert err.startswith("gda: safetensors files cannot hold data (it has the values of 2 process")
    assert "; key (no file holds key<fry>; " in err
    assert "; name (expected a GlobalArray or a jax.Array, not str; " in err
    assert err.endswith("--skip omits such leaves, and a function of --map may change them\n")
    assert not (tmp_path / "new.safetensors").exists()
    out = run.printed("convert", of_two, tmp_path / "new.safetensors", "--skip")
    assert out.splitlines()[1] == "skipped data, key, name"
    assert [*gda.storage.open_safetensors(tmp_path / "new.safetensors")] == ["w"]


def test_values_of_several_processes_are_merged_or_skipped(
    run: Run, of_two: Path, tmp_path: Path
) -> None:
    err = run.refusal("convert", of_two, tmp_path / "new")
    assert "a checkpoint of gda cannot hold data (it has the values of 2 processes; --merge" in err
    (tmp_path / "data.py").write_text("def merge(values, count):\n    return [values] * count\n")
    function = f"{tmp_path}/data.py:merge"
    run.printed("convert", of_two, tmp_path / "new", "--merge", function)
    restored = gda.checkpoint.restore(tmp_path / "new")
    assert restored["data"].value == [{"next": 0}, {"next": 10}]
    assert (restored["name"], restored["key"].dtype) == ("a", jax.random.key(0).dtype)
    assert "skipped data\n" in run.printed("convert", of_two, tmp_path / "other", "--skip")
    assert gda.checkpoint.restore(tmp_path / "other")["data"] is None


# Bad input.


@pytest.mark.parametrize(
    ("by", "target", "said"),
    [
        ("nope", "new", "map.py has no function 'nope'; it has stacked, nothing, text,"),
        ("nothing", "new", "no array to write in the NoneType of the map; expected is a tree"),
        ("text", "new.safetensors", "such as numpy.asarray(number)); --skip omits such leaves"),
        ("failing", "new", "map.py:failing failed:\nTraceback (most recent call last):\n"),
        ("unread", "new", "gda: the disk is gone\ngda: while reading index [0:4, 0:4] of w\n"),
    ],
)
def test_maps_that_fail(
    convert: Callable[..., Any], run: Run, tmp_path: Path, by: str, target: str, said: str
) -> None:
    code, out, err = convert("checkpoint", target, by=by)
    assert (code, out) == (2, "")
    assert said in err
    assert not (tmp_path / "new" / "manifest.json").exists()
    assert not (tmp_path / "new.safetensors").exists()
    assert convert("checkpoint", target)[0] == 0  # to the same target


@pytest.mark.parametrize("target", ["new", "new.safetensors"])
def test_ctrl_c_leaves_no_tree(convert: Callable[..., Any], tmp_path: Path, target: str) -> None:
    assert convert("checkpoint", target, by="interrupted")[0] == 130
    assert {*tmp_path.glob("new/*")} <= {tmp_path / "new" / ".lock"}
    assert not (tmp_path / "new.safetensors").exists()


@pytest.mark.parametrize("kind", ["checkpoint", "safetensors"])
def test_a_killed_conversion_leaves_no_tree(
    convert: Callable[..., Any], sources: Path, tmp_path: Path, kind: str
) -> None:
    program = "import sys; from gda.cli import main; main(sys.argv[1:])"
    words = ["convert", sources / "checkpoint", tmp_path / "new", "--to", kind]
    of_map = ["--map", f"{sources}/map.py:killed"]
    assert python("-c", program, *words, *of_map).returncode == -signal.SIGKILL
    assert not [*(tmp_path / "new").glob("m*")]  # a manifest, or files of a model
    code, _, err = convert("checkpoint", "new", "--to", kind)
    assert (code, "new is not empty: it has " in err) == (2, True)


def test_a_map_is_a_file_and_a_function(run: Run, sources: Path, tmp_path: Path) -> None:
    command = ["convert", sources / "checkpoint", tmp_path / "new", "--map"]
    assert "such as map.py:to_scanned, not 'map'" in run.refusal(*command, "map")
    assert run.refusal(*command, "none.py:map") == "gda: there is no file 'none.py' here\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--dtype", "bf17"], "bf17"),
        (["--max-file-bytes", "much"], "'much' is not a number of bytes; write 2GiB, say"),
    ],
)
def test_options_that_cannot_be(convert: Callable[..., Any], options: list[str], said: str) -> None:
    code, out, err = convert("checkpoint", "new", *options)
    assert (code, out) == (2, "")
    assert said in err


def test_sources_that_are_none(run: Run, sources: Path, tmp_path: Path) -> None:
    target = tmp_path / "new"
    code, _, err = run("convert", sources / "map.py", target)
    assert (code, err.endswith("map.py: it is a file, or below one\n")) == (2, True)
    (tmp_path / "both").mkdir()
    save_file({"w": W}, tmp_path / "both" / "model.safetensors")
    write_orbax(tmp_path / "both", {("w",): W})
    err = run.refusal("convert", tmp_path / "both", target)
    assert "has safetensors files and an Orbax run side by side; move each into" in err
    code, _, err = run("convert", tmp_path / "both" / "model.safetensors", target)
    assert (code, err) == (0, "")
    write_orbax(tmp_path / "runs" / "100", {("w",): W})
    err = run.refusal("convert", tmp_path / "runs", tmp_path / "other")
    assert "it has '100'. Pass the folder of one step" in err
    gda.checkpoint.save(tmp_path / "numbers", {"step": 1})
    err = run.refusal("convert", tmp_path / "numbers", tmp_path / "other")
    assert f"no array to write in {tmp_path}/numbers; " in err


def test_targets_that_are_there(convert: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    (tmp_path / "a.safetensors").touch()
    code, _, err = convert("checkpoint", "full")
    assert (code, "full is not empty: it has notes. Remove it, or choose" in err) == (2, True)
    for target in ("a.safetensors", "a.safetensors/below"):
        code, _, err = convert("checkpoint", target)
        assert (code, f"{target} is a file, or below one; remove it" in err) == (2, True)
    code, _, err = convert("checkpoint", "b.safetensors", "--to", "checkpoint")
    assert (code, "has the name of a safetensors file, and a checkpoint is" in err) == (2, True)


def test_a_damaged_checkpoint_is_not_converted(run: Run, tmp_path: Path) -> None:
    gda.checkpoint.save(tmp_path / "old", {"big": BIG})
    (chunk,) = tmp_path.glob("old/data-*/*/c.0.0")
    chunk.write_bytes(bytes(chunk.stat().st_size))
    for target in ("new", "new.safetensors"):
        code, out, err = run("convert", tmp_path / "old", tmp_path / target)
        assert (code, out) == (1, "")
        assert "c.0.0 is damaged: its CRC-32C is" in err
    assert {*tmp_path.glob("new/*")} <= {tmp_path / "new" / ".lock"}
    assert not (tmp_path / "new.safetensors").exists()
