"""Saves in the background, and fingerprints that tell what was saved."""

import functools
import gc
import logging
import re
import signal
import threading
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from damaged import limit_sizes
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from leaks import no_thread_is_left  # noqa: F401, of every test
from meshes import ORDERS, batch, cut, is_right, mesh_of, ordered_mesh
from running import python

import gda
from gda.arrays.transport import to_host
from gda.checkpoint import SaveError, restore, save, save_async
from gda.storage.stores.directory import FileStore
from gda.trees import written_blocks

DATA = batch(16, 8)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written into a directory before it is set."""
    gate = threading.Event()
    write = FileStore.write_sealed

    def write_later(store: FileStore, name: str, payload: Any) -> int:
        assert gate.wait(120)
        return write(store, name, payload)

    monkeypatch.setattr(FileStore, "write_sealed", write_later)
    return gate


@functools.partial(jax.jit, donate_argnums=0)
def in_place(x: jax.Array) -> jax.Array:
    """Return other values, in the memory of the argument."""
    return x * 0


def test_xla_copies_what_it_would_donate_while_numpy_has_a_view(mesh: Mesh) -> None:
    """Of each block alone; a save in the background relies on it."""
    x = jax.device_put(DATA, NamedSharding(mesh, P(("x", "y"))))
    views = [np.asarray(shard.data) for shard in x.addressable_shards[:4]]
    addresses = [view.ctypes.data for view in views]
    jax.block_until_ready(in_place(x))
    assert not x.is_deleted()
    np.testing.assert_array_equal(np.concatenate(views), DATA[:8])
    x.delete()
    np.testing.assert_array_equal(np.concatenate(views), DATA[:8])
    assert [view.ctypes.data for view in views] == addresses


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The devices that gda takes for accelerators, of which NumPy has no views."""
    devices: list[Any] = []
    for module in (written_blocks, to_host):
        monkeypatch.setattr(module, "is_host", lambda device: device not in devices)
    return devices


def test_each_block_is_summed_up_where_it_is(
    auto_mesh: Mesh, tmp_path: Path, accelerators: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks on an accelerator beside blocks on CPUs, whichever of them is JAX's default."""
    limit_sizes(monkeypatch, 64, 2**20, 64)
    two = mesh_of({"x": 2})
    h = cut(DATA + 1, Mesh(auto_mesh.devices[3], "x"), P("x"))
    assert not {*h.array.devices()} & {*two.devices.flat}
    accelerators.extend(h.array.devices())
    save_async(tmp_path, {"cpu": cut(DATA, two, P("x")), "accelerator": h}).result()
    on_accelerator, on_cpu = gda.checkpoint.verify(tmp_path).leaves
    assert on_cpu.fingerprint == gda.fingerprint(DATA)  # pyright: ignore
    assert on_accelerator.fingerprint == gda.fingerprint(DATA + 1)  # pyright: ignore


def test_arrays_of_the_caller_are_not_held(
    tmp_path: Path, gate: threading.Event, accelerators: list[Any]
) -> None:
    """The save has copies; the memory of the arrays themselves is free while it runs."""
    accelerators.append(jax.devices()[0])
    tree = {"numpy": DATA.copy(), "on an accelerator": jax.device_put(DATA, jax.devices()[0])}
    alive = [weakref.ref(each) for each in tree.values()]
    pending = save_async(tmp_path, tree)
    del tree
    gc.collect()
    held = [each() is not None for each in alive]
    gate.set()
    pending.result()
    assert held == [False, False]


@pytest.mark.parametrize("where", ["CPU", "an accelerator", "one without pinned memory"])
def test_arrays_may_be_changed_when_it_returns(
    mesh: Mesh,
    tmp_path: Path,
    gate: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    accelerators: list[Any],
    where: str,
) -> None:
    # Of two devices, because each compiles its own programs.
    mesh = Mesh(mesh.devices[:2, :1], mesh.axis_names, axis_types=mesh.axis_types)
    if where != "CPU":
        accelerators.extend(mesh.devices.flat)
    if where == "one without pinned memory":
        monkeypatch.setattr(to_host, "_has_pinned_memory", lambda device: False)
    limit_sizes(monkeypatch, 4096, 2**20, 4096)
    big, odd = batch(64, 32), batch(15, 7)
    rows = NamedSharding(mesh, P("x", "y"))
    tree = {
        "numpy": DATA.copy(),
        "big": big.copy(),
        "plain": jax.device_put(big, rows),
        "half": jax.device_put(DATA.astype(jnp.bfloat16), rows),
        "four bits": jax.device_put(DATA.astype(jnp.int4), rows),
        "container": cut(DATA, mesh, P("x")),
        "replicated": cut(DATA, mesh, P()),
        "padded": gda.PaddedArray.from_source(odd, mesh, P("x", "y")),
        "key": jax.random.key(0),
    }
    expected = {
        **dict.fromkeys(["numpy", "container", "replicated", "half"], DATA),
        **dict.fromkeys(["big", "plain"], big),
        "four bits": DATA.astype(jnp.int4).astype(np.float32),
        "padded": odd,
    }
    pending = save_async(tmp_path / "run", tree)
    tree["numpy"] += 1
    tree["big"][:] = -1
    arrays = {name: getattr(x, "array", x) for name, x in tree.items()}
    donated = [arrays[name] for name in ("plain", "half", "replicated")]
    overwritten = [in_place(x) for x in donated]
    for x in arrays.values():
        if isinstance(x, jax.Array) and not x.is_deleted():
            x.delete()
    jax.block_until_ready([in_place(x) for x in overwritten])
    assert not pending.done()
    assert repr(pending) == f"<save to {tmp_path / 'run'}: running>"
    message = re.escape(f"saving to {tmp_path / 'run'} goes on after 0 s; wait longer")
    with pytest.raises(TimeoutError, match=message):
        pending.result(timeout=0)
    gate.set()
    pending.result()
    assert pending.done()
    assert repr(pending) == f"<save to {tmp_path / 'run'}: complete>"
    restored = restore(tmp_path / "run")
    gda.checkpoint.verify(tmp_path / "run")
    key = restored.pop("key")
    for name, values in restored.items():
        np.testing.assert_array_equal(np.asarray(values, np.float32), expected[name], name)
    np.testing.assert_array_equal(*map(jax.random.key_data, (key, jax.random.key(0))))


# Memory, handles and threads of many saves are in tests/test_soak.py.
def test_a_save_that_is_over_has_no_view_of_an_array(
    auto_mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_sizes(monkeypatch, 64, 128, 64)
    array = cut(DATA, auto_mesh, P("x"))
    save_async(tmp_path, {"w": array}).result()
    jax.block_until_ready(in_place(array.array))
    assert array.is_deleted()


def test_a_save_goes_on_after_ctrl_c_in_result(tmp_path: Path, gate: threading.Event) -> None:
    pending = save_async(tmp_path, {"a": DATA})
    main = threading.main_thread().ident
    assert main is not None
    interrupting = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))

    def interrupted() -> None:
        interrupting.start()
        pending.result(timeout=60)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    interrupting.join()
    assert not pending.done()
    with pytest.raises(TimeoutError, match="goes on after 0.01 s"):
        pending.result(timeout=0.01)
    gate.set()
    pending.result()
    assert pending.done()
    np.testing.assert_array_equal(restore(tmp_path)["a"], DATA)


def test_several_at_once(tmp_path: Path, gate: threading.Event) -> None:
    with pytest.raises(TypeError, match="a leaf of type object cannot be saved"):
        save_async(tmp_path / "0", {"a": object()})
    pending = [save_async(tmp_path / str(number), {"a": DATA + number}) for number in range(3)]
    with pytest.raises(SaveError, match=r"another save into .*/2 is running"):
        save_async(tmp_path / "2", {"a": 1}, overwrite=True)
    gate.set()
    for number, each in reversed(list(enumerate(pending))):
        each.result(timeout=30)
        each.result()
        np.testing.assert_array_equal(restore(tmp_path / str(number))["a"], DATA + number)


def test_without_more_threads_a_save_is_over_when_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    pending = save_async(tmp_path, {"a": DATA})
    assert pending.done()
    pending.result()
    np.testing.assert_array_equal(restore(tmp_path)["a"], DATA)


def test_a_failure_is_logged_and_raised_by_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, {"a": 1})

    def fail(store: Any, name: str, parts: Any) -> None:
        raise OSError(28, "No space left on device", name)

    monkeypatch.setattr(FileStore, "write", fail)
    with caplog.at_level(logging.ERROR, "gda"):
        pending = save_async(tmp_path, {"a": DATA}, overwrite=True)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                pending.result()
    assert pending.done()
    assert repr(pending) == f"<save to {tmp_path}: failed>"
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith(f"saving to {tmp_path} failed in the background: OSError: ")
    assert restore(tmp_path) == {"a": 1}


# Python 3.12 and newer start no thread any more once the main one has ended.
ENDING = """
import atexit, sys
import gda, numpy
from gda.storage.stores.directory import FileStore
write = FileStore.write
def fail(store, *arguments):
    if store.url.endswith('heard'):
        raise OSError("the disk is full")
    write(store, *arguments)
FileStore.write = fail
path, *failure = sys.argv[1:]
if not failure:
    gda.checkpoint.save_async(path + '/unheard', {'a': numpy.zeros(3)})
    try:
        gda.checkpoint.save_async(path + '/heard', {'a': numpy.zeros(3)}).result()
    except OSError:
        print('ended')

@atexit.register
def save_at_exit():
    print(gda.checkpoint.save_async(path + '/at_exit', arrays))
    try:
        gda.checkpoint.save_async(path + '/heard', {'a': numpy.zeros(3)}).result()
    except OSError as error:
        print(error)

arrays = {str(i): numpy.full((256, 1024), i, numpy.float32) for i in range(8)}
gda.checkpoint.save_async(path + '/later', arrays)
sys.exit(*failure)
"""


def test_a_program_that_ends_finishes_its_save_and_warns_of_those_that_failed(
    tmp_path: Path,
) -> None:
    done = python("-c", ENDING, tmp_path)
    saved = tmp_path / "at_exit"
    heard = f"<save to {saved}: complete>\nthe disk is full\n"
    assert (done.returncode, done.stdout) == (0, f"ended\n{heard}")
    *_, last = done.stderr.splitlines()
    assert last == (
        f"saving to {tmp_path / 'unheard'} failed in the background: OSError: the disk is full; "
        "the program did not call result() of it"
    )
    assert done.stderr.count("did not call result()") == 1
    for name in ("later", "at_exit"):
        assert len(gda.checkpoint.verify(tmp_path / name).leaves) == 8
    done = python("-c", ENDING, tmp_path / "failed", "the training failed")
    assert (done.returncode, done.stdout) == (1, heard.replace(str(tmp_path), f"{tmp_path}/failed"))
    assert done.stderr.startswith("the training failed\n")
    assert len(gda.checkpoint.verify(tmp_path / "failed" / "later").leaves) == 8


@pytest.mark.processes(2, devices=4)
def test_the_main_threads_compute_meanwhile(shared_tmp_path: Path) -> None:
    mesh = mesh_of({"x": 4, "y": 2})
    total = jax.jit(lambda x: x.sum() + 0 * x, out_shardings=NamedSharding(mesh, P()))
    pending = []
    for number, is_checking in enumerate([True, False]):
        with gda.checking_agreement(is_checking):
            tree = {"a": cut(DATA + number, mesh, P("x")), "n": np.full(8, number, np.int32)}
            pending.append(save_async(shared_tmp_path / str(number), tree))
            tree["a"].delete()
            for _ in range(3):
                g = cut(DATA, mesh, P("x"))
                assert float(total(g.array).addressable_data(0)[0, 0]) == DATA.sum()
                np.testing.assert_array_equal(g.gather(), DATA)
    for number, each in enumerate(pending):
        each.result(timeout=50)
        tree = restore(shared_tmp_path / str(number), mesh=mesh, specs=P("x"))
        assert is_right(tree["a"], DATA + number)


# Fingerprints.


def test_fingerprints_are_those_of_the_arrays(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_sizes(monkeypatch, 1024, 1024, 1024)
    keys = jax.random.split(jax.random.key(0), 8)
    tree = {
        "a": cut(DATA, mesh, P("x")),
        "c": cut(batch(64, 32), mesh, P("x", "y")),
        "e": cut(DATA[:0], mesh, P("x")),
        "k": gda.GlobalArray.from_array(jax.device_put(keys, NamedSharding(mesh, P("y")))),
        "u": gda.GlobalArray.from_array(jnp.ones(3)),
    }
    same = {"n": (DATA, "a"), "j": (jnp.asarray(DATA), "a"), "v": (np.ones(3, np.float32), "u")}
    save(tmp_path, {**tree, **{name: value for name, (value, _) in same.items()}})
    expected = {name: g.fingerprint() for name, g in tree.items()}
    expected |= {name: expected[other] for name, (_, other) in same.items()}
    for leaf in gda.checkpoint.inspect(tmp_path).leaves:
        assert leaf.fingerprint == expected[leaf.path[0]]


@pytest.mark.processes(2, devices=4)
@pytest.mark.parametrize("order", ["interleaved", "shuffled"])
def test_fingerprints_of_blocks_of_several_processes(shared_tmp_path: Path, order: str) -> None:
    mesh = ordered_mesh(ORDERS[order], {"x": 4, "y": 2})
    specs = [P("x"), P("y"), P("y", "x"), P(None, ("x", "y")), P(("y", "x")), P()]
    data = {str(number): batch(8, 16) + number for number in range(len(specs))}
    tree = {name: cut(data[name], mesh, specs[int(name)]) for name in data}
    save(shared_tmp_path / "a", tree)
    leaves = gda.checkpoint.inspect(shared_tmp_path / "a").leaves
    found = {leaf.path[0]: leaf.fingerprint for leaf in leaves}
    assert found == {name: gda.fingerprint(value) for name, value in data.items()}
