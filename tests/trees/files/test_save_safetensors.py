"""Trees saved as safetensors files: equal to those of the real package, whole or not at all."""

import errno
import json
import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from leaks import little_memory, no_file_is_left_open  # noqa: F401, of every test
from meshes import ORDERS, batch, cut, mesh_of, ordered_mesh
from safetensors.numpy import save
from trials import rarely

import gda
from gda.multihost import shared_folders
from gda.storage import new_files, open_safetensors, save_safetensors
from gda.storage.sources import SAFETENSORS_DTYPES
from gda.testing import Pool
from gda.testing.strategies import ShardedCase, mesh_shapes, sharded_cases
from gda.trees.files import rows

DATA = batch(16, 8)
SPECS = [P(), P("x"), P("x", "y"), P(("y", "x")), P(None, "y"), P(None, ("x", "y"))]


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def bytes_of(tree: dict[str, Any], metadata: Any = None) -> bytes:
    """Return what the package writes."""
    arrays = {name: np.ascontiguousarray(value) for name, value in tree.items()}
    shaped = {name: array.reshape(np.shape(tree[name])) for name, array in arrays.items()}
    return save(shaped, metadata)


# The bytes.


def test_a_tree_of_everything(auto_mesh: Mesh, tmp_path: Path) -> None:
    rows = gda.load_tree(DATA[:13], auto_mesh, P("x"), pad=True)
    odd = gda.load_tree(DATA[:13, :7], auto_mesh, P("x", "y"), pad=True)
    tree = {
        "padded": [rows, odd],
        "jax": jax.device_put(DATA, NamedSharding(auto_mesh, P("y"))),
        "one device": jnp.asarray(DATA[0]),
        "numpy": (DATA.T, DATA[::2, ::3], np.asfortranarray(DATA), DATA.astype(">f4")),
        "scalar": np.int32(3),
        "nothing": None,
        "empty": jnp.zeros((0, 4)),
        "deep": {"a": {"b.c": cut(batch(4, 6, 8), auto_mesh, P(None, "y", "x"))}},
    }
    save_safetensors(tmp_path, tree)
    expected = {
        "padded.0": DATA[:13],
        "padded.1": DATA[:13, :7],
        "jax": DATA,
        "one device": DATA[0],
        "numpy.0": DATA.T,
        "numpy.1": DATA[::2, ::3],
        "numpy.2": DATA,
        "numpy.3": DATA,
        "scalar": np.int32(3),
        "empty": np.zeros((0, 4), np.float32),
        "deep.a.b.c": batch(4, 6, 8),
    }
    assert (tmp_path / "model.safetensors").read_bytes() == bytes_of(expected)
    save_safetensors(tmp_path, {})
    assert (tmp_path / "model.safetensors").read_bytes() == save({})


def test_every_dtype(auto_mesh: Mesh, tmp_path: Path) -> None:
    data = {name: (DATA % 3).astype(dtype) for name, dtype in SAFETENSORS_DTYPES.items()}
    wide = [name for name in data if data[name].dtype.itemsize == 8 and name != "C64"]
    tree = {
        name: values if name in wide else cut(values, auto_mesh, P("x", "y"))
        for name, values in data.items()
    }
    save_safetensors(tmp_path / "a.safetensors", tree)
    assert (tmp_path / "a.safetensors").read_bytes() == bytes_of(data)


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
ARRAYS = st.builds(
    lambda dtype, shape: np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype),
    st.sampled_from([*SAFETENSORS_DTYPES.values()]),
    st.lists(st.integers(0, 4), max_size=3),
)


@rarely(3)
@given(
    st.dictionaries(NAMES.filter("__metadata__".__ne__), ARRAYS, min_size=1, max_size=8),
    st.none() | st.dictionaries(NAMES, st.text(max_size=5).filter(str.isprintable), max_size=1),
)
def test_any_names_dtypes_and_shapes(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any], metadata: Any
) -> None:
    path = tmp_path_factory.mktemp("any") / "a.safetensors"
    save_safetensors(path, tree, metadata=metadata)
    assert path.read_bytes() == bytes_of(tree, metadata)


@rarely(2)
@given(
    st.data(),
    st.lists(st.integers(1, 7), min_size=1, max_size=4),
    st.sampled_from([1, 50, 10**6]),
    st.sampled_from([0, 9, 10**6]),
    st.sampled_from([1, 100, 10**6]),
)
def test_any_stripes(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    shape: list[int],
    part_bytes: int,
    long_run: int,
    max_bytes: int,
) -> None:
    mesh = mesh_of({"x": 2, "y": 2, "z": 2})
    axes = data.draw(st.permutations([*"xyz", *[None] * len(shape)]))
    values = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    tree = gda.load_tree({"w": values}, mesh, P(*axes[: len(shape)]), pad=True)
    path = tmp_path_factory.mktemp("any") / "a.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(new_files, "PART_BYTES", part_bytes)
        patch.setattr("gda.trees.files.stripes._LONG_RUN", long_run)
        patch.setattr("gda.trees.files.stripes.PART_BYTES", 0)
        save_safetensors(path, tree, max_bytes=max_bytes)
    assert path.read_bytes() == bytes_of({"w": values})


def test_columns_on_the_devices_of_a_process_are_written_as_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    pwrite = os.pwrite

    def counting(file: int, data: Any, offset: int) -> int:
        written.append(len(data))
        return pwrite(file, data, offset)

    monkeypatch.setattr(os, "pwrite", counting)
    mesh = mesh_of({"x": 2, "y": 4})
    save_safetensors(tmp_path, {"w": cut(DATA, mesh, P("x", "y"))})
    assert written == [256, 256]
    written.clear()
    monkeypatch.setattr("gda.trees.files.stripes._LONG_RUN", 0)
    save_safetensors(tmp_path, {"w": cut(DATA, mesh, P("x", "y"))})
    assert written == [8] * 64
    assert np.array_equal(open_safetensors(tmp_path)["w"][...], DATA)


# Names.


@pytest.mark.parametrize(
    ("tree", "options", "error", "message"),
    [
        (
            {"a.b": DATA, "a": {"b": DATA}},
            {},
            ValueError,
            r"at a/b and a.b have the same name 'a.b'",
        ),
        (DATA, {}, ValueError, "the name '' cannot be used .* put the array into a dict"),
        ({"__metadata__": DATA}, {}, ValueError, "the name '__metadata__' cannot be used"),
        ({"\ud800": DATA}, {}, ValueError, "surrogates not allowed"),
        ([DATA, 3.5], {}, TypeError, "not float; or a source or NumPy array, such as numpy.asarra"),
        ([DATA, np.ma.array([1], mask=True)], {}, TypeError, "a masked array would lose its mask"),
        ([DATA, np.array(["x"])], {}, TypeError, "no dtype <U1; convert the array to one of bool,"),
        ([DATA, np.zeros(2, ml_dtypes.int4)], {}, TypeError, "no dtype int4"),
        ({"w": DATA}, {"max_file_bytes": 0}, ValueError, "max_file_bytes must be a whole number"),
        ({"w": DATA}, {"metadata": {1: "a"}}, TypeError, "metadata must map texts to texts, not b"),
        ({"w": DATA}, {"metadata": {"a": "\ud800"}}, ValueError, "surrogates not allowed"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_trees_and_options_that_cannot_be_saved(
    tree: Any, options: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message) as raised:
        save_safetensors(tmp_path / "new", tree, **options)
    if isinstance(tree, list):
        assert raised.value.__notes__ == [f"gda: at {0 if options else 1} of the tree"]
    assert names_in(tmp_path) == []


def test_arrays_that_cannot_be_saved(auto_mesh: Mesh, tmp_path: Path) -> None:
    gone = cut(DATA, auto_mesh, P("x"))
    gone.delete()
    with pytest.raises(RuntimeError, match="was deleted"):
        save_safetensors(tmp_path, {"w": gone})
    with pytest.raises(TypeError, match=r"no file holds key<fry>; .*jax\.random\.key_data"):
        save_safetensors(tmp_path, {"w": jax.random.key(0)})
    with pytest.raises(TypeError, match="is being traced"):
        jax.jit(lambda x: save_safetensors(tmp_path, {"w": x}))(DATA)
    assert names_in(tmp_path) == []


def test_paths_that_cannot_be_used(tmp_path: Path) -> None:
    for path in ("", "gs://bucket/model", "s3://bucket/a.safetensors"):
        with pytest.raises(ValueError, match="is not a folder or file of a mounted file system"):
            save_safetensors(path, {"w": DATA})
    with pytest.raises(ValueError, match=r"has 512 bytes, more than max_file_bytes=100; pass a fo"):
        save_safetensors(tmp_path / "a.safetensors", {"w": DATA}, max_file_bytes=100)
    assert names_in(tmp_path) == []


# Several files.


def test_files_and_index_are_those_of_published_models(auto_mesh: Mesh, tmp_path: Path) -> None:
    values = {"a": DATA, "b": DATA[:1], "c": DATA[:9], "d": DATA[:4], "e": DATA[:4]}
    tree = {name: cut(each, auto_mesh, P(None, "y")) for name, each in values.items()}
    save_safetensors(tmp_path, tree, max_file_bytes=256, metadata={"format": "pt"})
    # As transformers fills them: what is larger than the limit has a file of its own.
    groups = ["a", "c", "bd", "e"]
    files = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    assert names_in(tmp_path) == [*files, "model.safetensors.index.json"]
    for file, group in zip(files, groups, strict=True):
        expected = bytes_of({name: values[name] for name in group}, {"format": "pt"})
        assert (tmp_path / file).read_bytes() == expected
    index = (tmp_path / "model.safetensors.index.json").read_text()
    weight_map = {name: file for file, group in zip(files, groups, strict=True) for name in group}
    content = {"metadata": {"total_size": 34 * 32}, "weight_map": weight_map}
    assert index == json.dumps(content, indent=2, sort_keys=True) + "\n"
    loaded = gda.load_tree(open_safetensors(tmp_path), auto_mesh, P(None, "x"))
    assert all(np.array_equal(loaded[name], values[name]) for name in values)


@pytest.mark.parametrize("before", [256, 10**6])
@pytest.mark.parametrize("after", [512, 10**6])
def test_the_model_of_a_folder_is_replaced(before: int, after: int, tmp_path: Path) -> None:
    tree = {str(i): DATA - i for i in range(4)}
    save_safetensors(tmp_path, {str(i): DATA + i for i in range(3)}, max_file_bytes=before)
    save_safetensors(tmp_path, tree, max_file_bytes=after)
    save_safetensors(tmp_path / "alone", tree, max_file_bytes=after)
    tensors, alone = open_safetensors(tmp_path), open_safetensors(tmp_path / "alone")
    token = r"(?<=^model)-[0-9a-f]{16}(?=-)"  # of files that come beside others
    for name in tree:
        file = tensors[name].path
        plain = re.sub(token, "", file.name)
        assert (file.name != plain) == (plain != "model.safetensors")
        assert plain == alone[name].path.name
        assert file.read_bytes() == alone[name].path.read_bytes()
    assert len(names_in(tmp_path)) == len(names_in(tmp_path / "alone")) + 1


# Whole or not at all.


def fail_at(call: int, patch: pytest.MonkeyPatch) -> None:
    """Make ``os.pwrite`` fail at its n-th call, as on a full disk."""
    works, calls = os.pwrite, iter(range(call))

    def function(*args: Any) -> Any:
        if next(calls, None) is None:
            raise OSError(28, "No space left on device")
        return works(*args)

    patch.setattr(os, "pwrite", function)


def test_an_error_names_the_file_and_the_block(
    auto_mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(0, monkeypatch)
    with pytest.raises(OSError, match=r"No space left on device: '.*'") as raised:
        save_safetensors(tmp_path, {"a": cut(DATA, auto_mesh, P("x", "y"))})
    assert Path(raised.value.filename).suffix == ".safetensors"
    assert raised.value.__notes__[0].startswith("gda: while writing index [0:4, 0:4] of a")
    assert names_in(tmp_path) == []


def test_a_file_that_takes_no_more_bytes_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A write of some bytes, and then of none: some file systems say so, and give no error.
    left, works = iter([3]), os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda file, data, at: works(file, data[: next(left, 0)], at) if data else 0
    )
    with pytest.raises(OSError, match=r"the file took 3 of \d+ bytes and no more"):
        save_safetensors(tmp_path, {"a": DATA})
    assert names_in(tmp_path) == []


def test_a_memory_map_is_saved_on_a_kernel_without_huge_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_: Any) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    data = np.arange(2**19, dtype=np.float32).reshape(512, 1024)
    np.save(tmp_path / "data.npy", data)
    monkeypatch.setattr(mmap, "mmap", Refusing)
    save_safetensors(tmp_path / "model", {"w": np.load(tmp_path / "data.npy", mmap_mode="r")})
    np.testing.assert_array_equal(open_safetensors(tmp_path / "model")["w"][...], data)


@pytest.mark.parametrize("mesh_shape", [{"x": 2}, {"x": 8}])
def test_all_is_durable_before_it_is_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh_shape: dict[str, int]
) -> None:
    steps: list[tuple[str, int]] = []  # what was done with the file of a number
    written: dict[int, int] = {}  # the last step that wrote to it
    real = {name: getattr(os, name) for name in ("fsync", "pwrite", "replace")}

    def noted(name: str, number: int) -> None:
        steps.append((name, number))
        if name == "pwrite":
            written[number] = len(steps)

    def fsync(file: int) -> None:
        real["fsync"](file)
        noted("fsync", os.fstat(file).st_ino)

    def pwrite(file: int, *given: Any) -> int:
        noted("pwrite", os.fstat(file).st_ino)
        return real["pwrite"](file, *given)

    def replace(path: Any, place: Any) -> None:
        noted("replace", os.stat(path).st_ino)
        real["replace"](path, place)

    for function in (fsync, pwrite, replace):
        monkeypatch.setattr(os, function.__name__, function)
    mesh = mesh_of(mesh_shape)
    tree = {str(n): cut(batch(8, 64), mesh, (P("x"), P(None, "x"))[n % 2]) for n in range(6)}
    save_safetensors(tmp_path / "model", tree, max_file_bytes=5000)
    monkeypatch.undo()
    files = [each for each in (tmp_path / "model").iterdir() if each.suffix == ".safetensors"]
    assert len(files) == 3
    last = {step: at for at, step in enumerate(steps, 1)}
    for number in [each.stat().st_ino for each in files]:
        assert written[number] < last["fsync", number] < last["replace", number]
    replaced = max(at for (name, _), at in last.items() if name == "replace")
    assert replaced < last["fsync", (tmp_path / "model").stat().st_ino]


# Several processes.


@pytest.mark.processes(4, devices=2)
def test_many_processes_write_one_model(shared_tmp_path: Path) -> None:
    values = {str(i): DATA + i for i in range(len(SPECS))} | {"local": DATA, "padded": DATA[:11]}
    for order in (ORDERS["contiguous"], ORDERS["shuffled"]):
        mesh = ordered_mesh(order, {"x": 4, "y": 2}, AxisType.Explicit)
        tree: dict[str, Any] = {str(i): cut(DATA + i, mesh, spec) for i, spec in enumerate(SPECS)}
        tree["local"] = jnp.asarray(DATA)
        tree["padded"] = gda.load_tree(DATA[:11], mesh, P("x"), pad=True)
        save_safetensors(shared_tmp_path, tree, max_file_bytes=1500)
        tensors = open_safetensors(shared_tmp_path)
        assert all(np.array_equal(tensors[name][...], values[name]) for name in values)
        gda.check_processes_agree({}, name="read")
        save_safetensors(shared_tmp_path / "one.safetensors", tree)
        assert (shared_tmp_path / "one.safetensors").read_bytes() == bytes_of(values)
        gda.check_processes_agree({}, name="read")


@pytest.mark.processes(4, devices=2)
def test_short_runs_of_many_processes_are_exchanged_first(
    shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = ordered_mesh(ORDERS["shuffled"], {"x": 4, "y": 2}, AxisType.Explicit)
    specs = {"columns": P(None, ("x", "y")), "both": P("y", "x"), "shared": P(None, "x")}
    values = {name: batch(1032, 16) + number for number, name in enumerate(specs)}
    tree: dict[str, Any] = {name: cut(values[name], mesh, specs[name]) for name in specs}
    # Of three layers, only the second dimension has enough for all devices.
    values |= {"layers": batch(3, 700, 8), "padded": batch(1001, 16), "rows": DATA}
    tree["layers"] = cut(values["layers"], mesh, P(None, None, ("x", "y")))
    tree["padded"] = gda.load_tree(values["padded"], mesh, P("y", "x"), pad=True)
    tree["rows"] = cut(DATA, mesh, P("x"))
    monkeypatch.setattr(rows, "_MAX_BYTES", 2**15)
    sizes = []
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: sizes.append(len(args[1])) or write(*args))
    save_safetensors(shared_tmp_path / "a.safetensors", tree)
    assert (shared_tmp_path / "a.safetensors").read_bytes() == bytes_of(values)
    assert sum(size < 1000 for size in sizes) <= 1  # of rows, four processes have a block each
    gda.check_processes_agree({}, name="read")


def save_case(path: Path, case: ShardedCase, order: list[int]) -> None:
    size = int(np.prod(list(case.mesh_shape.values())))
    mesh = ordered_mesh(order[:size], dict(case.mesh_shape))
    data = batch(*case.global_shape, dtype=np.int32)
    with gda.checking_agreement(False):
        g = cut(data, mesh, case.spec)
    save_safetensors(path, {"w": g, "v": g})


@rarely(2)
@given(sharded_cases(mesh_shapes(max_devices=8), max_dims=3), st.permutations(range(8)))
def test_any_layout_of_many_processes(
    tmp_path_factory: pytest.TempPathFactory,
    process_pool: Callable[..., Pool],
    case: ShardedCase,
    order: list[int],
) -> None:
    data = batch(*case.global_shape, dtype=np.int32)
    path = tmp_path_factory.mktemp("any") / "a.safetensors"
    process_pool(4, devices=2).run(save_case, path, case, order)
    assert path.read_bytes() == bytes_of({"w": data, "v": data})


@pytest.mark.processes(2, devices=4)
def test_if_one_process_fails_all_raise_and_nothing_is_left(
    shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"w": cut(DATA, ordered_mesh(range(8), {"x": 8}), P("x"))}
    for failing in (0, 1):
        with monkeypatch.context() as patch:
            if jax.process_index() == failing:
                fail_at(1, patch)
            error = OSError if jax.process_index() == failing else gda.DisagreementError
            with pytest.raises(error, match="No space left on device"):
                save_safetensors(shared_tmp_path / "new", tree)
        gda.check_processes_agree({}, name="over")
        assert names_in(shared_tmp_path) == []


@pytest.mark.processes(2, devices=4)
def test_processes_that_do_not_agree_write_nothing(shared_tmp_path: Path) -> None:
    me = jax.process_index()
    with gda.checking_agreement(False):
        g = cut(DATA, ordered_mesh(range(8), {"x": 8}), P("x"))
    for tree, options, message in [
        ({"w": g, "b": np.full(3, me)}, {}, r"at b, process 0: fingerprint"),
        ({"b": jnp.full(3, me)}, {}, r"at b, process 0: fingerprint"),
        # As many files, but of other tensors: [a], [b, c] and [a, b], [c].
        (
            {"a": np.ones(8, np.int8), "b": np.ones(4, np.int8), "c": np.ones(4, np.int8)},
            {"max_file_bytes": 8 + 4 * me},
            "process 0: files of at most 8 bytes, process 1: of at most 12 bytes",
        ),
    ]:
        with pytest.raises(gda.DisagreementError, match=message):
            save_safetensors(shared_tmp_path / "new", tree, **options)
    error = TypeError if me else gda.DisagreementError
    with pytest.raises(error, match="no dtype complex128"):
        save_safetensors(shared_tmp_path / "new", {"w": np.zeros(2, [float, complex][me])})
    assert names_in(shared_tmp_path) == []


@pytest.mark.processes(2, devices=4)
def test_a_folder_that_is_not_shared_is_named(
    shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = shared_tmp_path / str(jax.process_index())
    own.mkdir()
    monkeypatch.chdir(own)
    monkeypatch.setattr(shared_folders, "LATE_SECONDS", 0.1)
    with pytest.raises(OSError, match="model is not one folder for all processes: process 1"):
        save_safetensors("model", {"w": np.zeros(3), "v": np.zeros(3)})
    gda.check_processes_agree({}, name="over")
    assert names_in(own) == []
