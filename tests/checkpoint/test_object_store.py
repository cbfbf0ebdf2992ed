"""Checkpoints in object stores: there and back, damage, faults, and saves at the same time."""

import contextlib
import functools
import http.server
import itertools
import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from damaged import flip
from faulty_store import Fault, Faults, FaultyStore, Request
from forks import Forks, Killing, count_kill, generation_at
from jax.sharding import Mesh, PartitionSpec
from kill_program import values_of
from leaks import no_thread_is_left  # noqa: F401, of every test
from meshes import ORDERS, batch, cut, is_right, ordered_mesh
from s3_server import ENVIRONMENT, Server, open_kv, spec_of
from trials import Trials, tried

from gda import checkpoint
from gda.storage.stores import object_store
from gda.storage.stores.object_store import KvStore
from gda.storage.stores.opening import open_store
from gda.testing import Pool

P = PartitionSpec
Spec = dict[str, Any]  # of a key-value store
WEIGHTS = batch(512, 512)  # 1 MiB, which makes it an array of its own
LOOKS = (checkpoint.inspect, checkpoint.verify, checkpoint.restore)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch, Server() as server:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def spec(server: Server) -> Spec:
    return spec_of(server.port, server.bucket())


@pytest.fixture
def kv() -> Any:
    """A prefix in memory."""
    return ts.KvStore.open("memory://").result() / "run/"


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """The requests to the stores that are opened from now on."""
    faults, real = Faults(), KvStore.__init__

    def opened(self: KvStore, where: Any, timeout: float) -> None:
        real(self, where, timeout)
        self._kv = FaultyStore(self._kv, faults)

    monkeypatch.setattr(KvStore, "__init__", opened)
    return faults


def tree_of(step: int = 7) -> dict[str, Any]:
    return {
        "weights": WEIGHTS + step,
        "small": [batch(8, 2) + step, batch(4)],
        "scale": batch(8).astype(ml_dtypes.bfloat16),
        "host": batch(5, dtype=np.int16),
        "step": step,
        "note": ("a string", None, 0.5),
    }


def check_restored(path: Any, step: int = 7) -> None:
    tree = checkpoint.restore(path)
    jax.tree.map(np.testing.assert_array_equal, tree, tree_of(step))


def keys_of(path: Any) -> Any:
    """Return the key-value store of a spec, or the one that is given."""
    return open_kv(path) if isinstance(path, dict) else path


def names(path: Any) -> list[str]:
    return sorted(name.decode() for name in keys_of(path).list().result())


def directories(path: Any) -> list[str]:
    return sorted({name.partition("/")[0] for name in names(path)})


def chunk_of(path: Any) -> str:
    return next(name for name in names(path) if name.endswith("/c.0.0"))


# There and back.


def test_a_tree_goes_to_a_bucket_and_back(spec: Spec, auto_mesh: Mesh) -> None:
    tree = {**tree_of(), "weights": cut(WEIGHTS + 7, auto_mesh, P("x")), "key": jax.random.key(3)}
    checkpoint.save(spec, tree)
    mesh = ordered_mesh(ORDERS["shuffled"], {"x": 2, "y": 4})
    back = checkpoint.restore(spec, mesh=mesh, specs=P())
    np.testing.assert_array_equal(back["weights"], WEIGHTS + 7)
    np.testing.assert_array_equal(back["small"][0], batch(8, 2) + 7)
    assert (jax.random.key_data(back["key"]) == jax.random.key_data(jax.random.key(3))).all()
    assert checkpoint.verify(spec).nbytes == checkpoint.inspect(spec).nbytes > 2**20
    (old, manifest) = directories(spec)
    assert old.startswith("data-")
    assert manifest == "manifest.json"
    assert open_store(spec, 60).url == f"{spec['endpoint']}/{spec['bucket']}/run/"
    # It is replaced only if that is asked for.
    with pytest.raises(FileExistsError, match="there is a checkpoint at .*; pass overwrite=True"):
        checkpoint.save(spec, tree_of(8))
    checkpoint.save_async(spec, tree_of(9), overwrite=True).result()
    check_restored(spec, 9)
    (new, _) = directories(spec)
    assert new != old
    url = f"{spec['endpoint']}/{spec['bucket']}/none"  # as a web server
    said = f"there is no checkpoint at {url}/: it has no manifest.json"
    with pytest.raises(checkpoint.CheckpointNotFoundError, match=said):
        checkpoint.inspect(url)


def test_next_save_removes_leftovers_of_one_that_died(kv: Any) -> None:
    kv.write("data-0123456789abcdef/zarr.json", b"{}").result()
    kv.write("data-fedcba9876543210/of_others", b"{}").result()
    checkpoint.save(kv, tree_of())
    check_restored(kv)
    assert "data-0123456789abcdef" not in directories(kv)


def test_a_listing_has_the_keys_that_are_needed(faults: Faults) -> None:
    kv = ts.KvStore.open("memory://").result()
    tree = {str(number): batch(512, 512) for number in range(4)}  # with objects of their own
    checkpoint.save(kv / "run/", tree)
    checkpoint.save(kv / "other/", tree)
    data = len([key for key in kv.list().result() if key.startswith(b"run/data-")])
    del faults.listed[:]
    checkpoint.restore(kv / "run/")
    checkpoint.open(kv / "run/")
    checkpoint.inspect(kv / "run/", timeout=10)
    assert faults.listed == []
    checkpoint.save(kv / "run/", tree, overwrite=True)
    # The manifest, and the objects of the data that is replaced, to remove them.
    assert len(faults.listed) == 1 + 2 * data


def save_and_restore(spec: Spec) -> None:
    """Save a tree twice in this process and others, and restore it onto another layout."""
    os.environ.update(ENVIRONMENT)
    mesh = ordered_mesh(ORDERS["interleaved"], {"x": 4, "y": 2})
    for step in (1, 2):
        tree = {
            "w": cut(WEIGHTS + step, mesh, P("x", "y")),
            "small": cut(batch(8, 2), mesh, P("x")),
        }
        checkpoint.save(spec, tree, overwrite=True)
    other = ordered_mesh(ORDERS["reversed"], {"x": 8})
    back = checkpoint.restore(spec, mesh=other, specs={"w": P(None, "x"), "small": P("x")})
    assert is_right(back["w"], WEIGHTS + 2)
    assert is_right(back["small"], batch(8, 2))
    with pytest.raises(FileExistsError, match="there is a checkpoint"):
        checkpoint.save(spec, tree)


def test_two_processes_save_and_restore_one_tree(
    spec: Spec, process_pool: Callable[..., Pool]
) -> None:
    process_pool(2, devices=4).run(save_and_restore, spec)
    assert len(directories(spec)) == 2


# The kinds of paths.


def test_a_url_is_a_prefix_with_or_without_a_slash(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    for url in ("s3://some-bucket/run", "gs://some-bucket/run/", "memory://run"):
        assert open_store(url, 60).url == url.rstrip("/") + "/"


def test_bad_paths_are_refused() -> None:
    transaction = ts.KvStore.open("memory://").result().with_transaction(ts.Transaction())
    for path, error, said in [
        ("nosuch://bucket/run", ValueError, "unsupported URL scheme"),
        ({"driver": "s3", "bucket": "B"}, ValueError, "Invalid S3 bucket name"),
        (None, TypeError, "a directory, a URL such as .*key-value store or .*, not a NoneType"),
        (ts.array(batch(3)), TypeError, "the spec of one, not a TensorStore"),
        (transaction, ValueError, "open in a transaction, so nothing would be durable"),
    ]:
        for work in (checkpoint.restore, lambda path: checkpoint.save(path, {})):
            with pytest.raises(error, match=said):
                work(path)


def test_without_tensorstore_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(ImportError, match=r"needs TensorStore: pip install .*\[checkpoint\]"):
        checkpoint.restore("s3://some-bucket/run")


# Missing and damaged files.


def test_nothing_or_something_else_is_there(kv: Any) -> None:
    with pytest.raises(checkpoint.CheckpointNotFoundError, match="at .*run/: it is empty"):
        checkpoint.inspect(kv)
    kv.write("photos/cat.jpg", b"meow").result()
    said = "is not empty and not a checkpoint: it has photos. Save into a directory of its own"
    with pytest.raises(FileExistsError, match=said):
        checkpoint.save(kv, tree_of(), overwrite=True)
    with pytest.raises(checkpoint.CheckpointNotFoundError, match="it has photos"):
        checkpoint.restore(kv)
    assert names(kv) == ["photos/cat.jpg"]


def test_the_bucket_is_not_there(spec: Spec) -> None:
    spec |= {"bucket": "nobody-made-this"}
    for work in (checkpoint.restore, lambda path: checkpoint.save(path, {"a": batch(3)})):
        with pytest.raises(OSError, match="/nobody-made-this/run/: .*NoSuchBucket"):
            work(spec)


def test_damaged_objects_are_named(kv: Any) -> None:
    checkpoint.save(kv, tree_of())
    chunk = chunk_of(kv)
    for name, named in [
        (chunk, r"array weights, chunk c.0.0: .*"),
        (chunk.replace("c.0.0", "zarr.json"), "its metadata: .*"),
    ]:
        whole = kv.read(name).result().value
        for data, said in [
            (flip(whole, len(whole) // 2), "is damaged: its CRC-32C is"),
            (whole[:-1], "bytes, not"),
            (whole + b"x", "is damaged: its CRC-32C is"),  # of the last bytes alone
            (b"", "has 0 bytes, not"),
            (None, "missing"),
        ]:
            kv.write(name, data).result()
            for look in (checkpoint.restore, checkpoint.verify):
                match = named + name + (f" .*{said}" if name == chunk else "")
                with pytest.raises(checkpoint.CorruptionError, match=match) as caught:
                    look(kv)
            assert len(caught.value.problems) == 1
        kv.write(name, whole).result()
    checkpoint.verify(kv)


# The requests of a read.


def test_each_object_is_written_and_fetched_once_and_many_at_a_time(
    kv: Any, faults: Faults, auto_mesh: Mesh
) -> None:
    together = threading.Barrier(8)  # breaks if fewer requests are under way at a time

    def fault(request: Request) -> None:
        if "weights/c." in request.name:
            together.wait(60)

    faults.fault = fault
    tree = {"weights": cut(WEIGHTS, auto_mesh, P("x", "y")), "small": batch(8)}
    checkpoint.save(kv, tree)
    assert set(faults.counts("write").values()) == {1}
    del faults.requests[:]
    np.testing.assert_array_equal(checkpoint.restore(kv)["weights"], WEIGHTS)
    fetched = faults.counts("read")
    assert sum("weights/c." in path for path in fetched) == 8
    assert fetched.pop("manifest.json") == 2  # the first asks for its size
    assert set(fetched.values()) == {1}


# Requests that never succeed: bounded time, a message, the checkpoint that was there, and the next
# save.

LASTING = {
    "403": "PERMISSION_DENIED: Injected",
    "never": "no answer within 0.5 s, retries included",
}


def for_ever(what: str, is_hit: Callable[[Request], bool] = lambda request: True) -> Fault:
    return lambda request: what if is_hit(request) else None


def is_commit(request: Request) -> bool:
    return request.kind == "write" and request.name == "manifest.json"


@pytest.mark.parametrize(
    ("where", "what"),
    [*[("a chunk", what) for what in LASTING], ("everything", "never"), ("the manifest", "403")],
)
def test_writes_that_never_succeed_leave_the_old_checkpoint(
    kv: Any, faults: Faults, where: str, what: str
) -> None:
    checkpoint.save(kv, tree_of())
    del faults.requests[:]
    is_hit = {
        "a chunk": lambda request: request.kind == "write" and "/c." in request.name,
        "everything": lambda request: request.number > 8,
        "the manifest": is_commit,
    }[where]
    faults.fault = for_ever(what, is_hit)
    with pytest.raises(OSError, match=LASTING[what]) as caught:
        checkpoint.save(kv, tree_of(8), overwrite=True, timeout=0.5)
    faults.fault = lambda request: None
    if where == "a chunk":
        assert "/c." in f"{caught.value.filename}{caught.value}"
        assert "nothing was committed" in "".join(caught.value.__notes__)
        assert len(directories(kv)) == 2
    check_restored(kv)
    check_next_save(kv)


def check_next_save(path: Any) -> None:
    checkpoint.save(path, tree_of(9), overwrite=True)
    check_restored(path, 9)
    assert len(directories(path)) == 2


def test_a_commit_whose_answer_is_lost_keeps_its_data(kv: Any, faults: Faults) -> None:
    checkpoint.save(kv, tree_of())
    committed: list[Request] = []

    def fault(request: Request) -> str | None:
        if is_commit(request):
            committed.append(request)
            return "lose the answer"
        return "403" if committed else None

    faults.fault = fault
    with pytest.raises(OSError, match="manifest.json") as caught:
        checkpoint.save(kv, tree_of(8), overwrite=True)
    assert not hasattr(caught.value, "__notes__")
    faults.fault = lambda request: None
    check_restored(kv, 8)


@pytest.mark.parametrize("what", LASTING)
def test_objects_that_cannot_be_read(kv: Any, faults: Faults, what: str) -> None:
    checkpoint.save(kv, {"a": WEIGHTS})
    for file in ("c.0.0", "manifest.json", "zarr.json"):
        faults.fault = for_ever(what, lambda request, file=file: request.name.endswith(file))
        with pytest.raises(OSError, match=LASTING[what]) as caught:
            checkpoint.restore(kv, timeout=0.5)
        assert not isinstance(caught.value, FileNotFoundError)
        assert isinstance(caught.value, TimeoutError) == (what != "403")
        assert f"/{file}" in str(caught.value)


def test_after_one_answer_that_did_not_come_nobody_waits_as_long_again(
    kv: Any, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_TIMEOUT_AFTER_ONE", 0.1)
    faults.fault = for_ever("never")
    store = KvStore(kv, timeout=0.5)
    for seconds in (0.5, 0.1):
        with pytest.raises(TimeoutError, match=f"no answer within {seconds} s"):
            store.entries()


class Busy(http.server.BaseHTTPRequestHandler):
    """A server that answers the first requests with 503, more often than TensorStore asks."""

    status = iter([503] * 7)

    def do_GET(self) -> None:
        self.send_error(next(self.status, 404))

    def log_message(self, format: str, *_: object) -> None: ...  # noqa: A002


def test_failures_that_pass_are_repeated_and_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = {"max_retries": 2, "initial_delay": "10ms", "max_delay": "10ms"}
    monkeypatch.setattr(object_store, "_FEW_RETRIES", {"http_request_retries": attempts})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Busy) as busy:
        thread = threading.Thread(target=busy.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{busy.server_port}/ck"
        try:
            with pytest.raises(checkpoint.CheckpointNotFoundError, match="it has no manifest.json"):
                checkpoint.inspect(url)
        finally:
            busy.shutdown()
            thread.join()
    for absent in (url, "http://no-such-host.invalid/ck"):
        with pytest.raises(OSError, match="/ck/manifest.json: .*(Could not connect|resolve)"):
            checkpoint.inspect(absent)
    monkeypatch.setattr(object_store, "_SECONDS", 0.0)
    with pytest.raises(OSError, match="/ck/manifest.json: .*Could not connect to server"):
        checkpoint.inspect(url)


def test_retries_of_a_spec_are_those_of_the_user() -> None:
    attempts = {"max_retries": 1, "initial_delay": "10ms", "max_delay": "10ms"}
    spec = {"driver": "http", "base_url": "http://127.0.0.1:9", "path": "/ck/"}
    theirs = KvStore(spec | {"http_request_retries": attempts}, 60)
    assert theirs.spec()["http_request_retries"] == attempts
    assert "http_request_retries" not in KvStore(spec, 60).spec()


def test_a_timeout_is_a_number_of_seconds(tmp_path: Path) -> None:
    for look in [*LOOKS, functools.partial(checkpoint.save, tree={})]:
        for timeout in (0, -1.0, float("nan"), "5"):
            with pytest.raises(ValueError, match="timeout must be a number of seconds above 0, no"):
                look(tmp_path / "run", timeout=timeout)


def test_next_save_removes_replaced_data(
    kv: Any, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.save(kv, tree_of())
    faults.fault = for_ever("403", lambda request: request.kind == "delete")
    checkpoint.save(kv, tree_of(8), overwrite=True)
    faults.fault = lambda request: None
    assert "is no longer used and could not be removed" in caplog.text
    check_restored(kv, 8)
    assert len(directories(kv)) == 3
    check_next_save(kv)


# The one request that commits.


def test_commit_with_a_lost_answer_is_a_commit(kv: Any, faults: Faults) -> None:
    checkpoint.save(kv, tree_of())
    faults.fault = for_ever("lose the answer", is_commit)
    checkpoint.save(kv, tree_of(8), overwrite=True, timeout=0.5)
    check_restored(kv, 8)
    assert len(directories(kv)) == 2


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_commit_that_arrives_after_it_was_given_up(
    kv: Any, faults: Faults, comes_first: bool
) -> None:
    """Then it finds its chunks, or is refused because another save was committed meanwhile."""
    checkpoint.save(kv, tree_of())
    faults.fault = for_ever("late", is_commit)
    with pytest.raises(TimeoutError, match="run/manifest.json"):
        checkpoint.save(kv, tree_of(8), overwrite=True, timeout=0.3)
    faults.fault = lambda request: None
    check_restored(kv)
    if not comes_first:
        checkpoint.save(kv, tree_of(9), overwrite=True)
    before = kv.read("manifest.json").result().value
    faults.land()
    has_changed = kv.read("manifest.json").result().value != before
    assert has_changed == comes_first
    check_restored(kv, 8 if comes_first else 9)
    check_next_save(kv)


# Two saves into one prefix, in every order of their steps.

STEPS = ["claim", "write", "commit", "clean"]


class Saver(threading.Thread):
    """A save that does a step whenever it is told to."""

    def __init__(self, path: Any, tree: Any) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self._path, self._tree = path, tree
        self._orders: queue.Queue[None] = queue.Queue()
        self._stops: queue.Queue[None] = queue.Queue()
        self.start()

    def run(self) -> None:
        self._orders.get()
        try:
            # One worker writes in the thread that saves.
            checkpoint.save(self._path, self._tree, overwrite=True, max_workers=1)
        except BaseException as error:
            self.error = error
        self._stops.put(None)

    def stop(self) -> None:
        self._stops.put(None)
        self._orders.get()

    def step(self) -> None:
        self._orders.put(None)
        self._stops.get(timeout=60)


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let savers go on step by step."""
    write, replacing = KvStore.write, KvStore.replacing

    def stop() -> None:
        if isinstance(saver := threading.current_thread(), Saver):
            saver.stop()

    def write_in_turn(store: KvStore, name: str, data: bytes) -> None:
        if name.endswith("zarr.json"):  # the first object of a save
            stop()
        write(store, name, data)

    @contextlib.contextmanager
    def replacing_in_turn(store: KvStore, *args: Any) -> Iterator[None]:
        stop()
        try:
            with replacing(store, *args):
                yield
        finally:
            stop()

    monkeypatch.setattr(KvStore, "write", write_in_turn)
    monkeypatch.setattr(KvStore, "replacing", replacing_in_turn)


ORDERS_OF_STEPS = [
    tuple("A" if i in of_a else "B" for i in range(8))
    for of_a in itertools.combinations(range(8), 4)
]


def check_order(path: Any, order: tuple[str, ...]) -> None:
    checkpoint.save(path, {"by": "nobody", "data": batch(4)})
    savers = {name: Saver(path, {"by": name, "data": batch(4)}) for name in "AB"}
    done = {"A": 0, "B": 0}
    claimed, committed = {}, []
    for name in order:
        step = STEPS[done[name]]
        done[name] += 1
        savers[name].step()
        if step == "claim":
            claimed[name] = list(committed)
        elif step == "commit" and claimed[name] == committed:
            committed.append(name)
        # At every moment the last commit is there, whole.
        by = checkpoint.restore(path)["by"]
        assert by == (committed[-1] if committed else "nobody"), (order, step)
        checkpoint.verify(path)
    for name, saver in savers.items():
        saver.join(60)
        if name in committed:
            assert saver.error is None
        else:
            assert isinstance(saver.error, checkpoint.SaveError)
            said = "another save into .* committed before this one; save again"
            assert re.search(said, str(saver.error))
            assert "nothing was committed" in "".join(saver.error.__notes__)
    checkpoint.save(path, {"a": batch(4)}, overwrite=True)


@pytest.mark.usefixtures("in_turn")
@tried("two programs save to an object store, in every order of their steps", sample=4)
def test_of_two_saves_one_fails_and_takes_nothing_away(trials: Trials) -> None:
    assert len(ORDERS_OF_STEPS) == 70
    for order in trials.of(ORDERS_OF_STEPS):
        kv = ts.KvStore.open("memory://run/").result()
        check_order(kv, order)
        left = {name.partition(b"/")[0] for name in kv.list().result()}
        assert len(left) == 2, order
        trials.count("one committed")


@pytest.mark.usefixtures("in_turn")
def test_of_two_saves_into_a_bucket_one_fails(spec: Spec) -> None:
    check_order(spec, tuple("ABABABAB"))
    assert len(directories(spec)) == 2


# Processes that die.


@tried("a process is killed while it saves to an object store", sample=1, full=200)
def test_a_process_that_is_killed_leaves_the_old_checkpoint_or_the_new_one(
    spec: Spec, forks: Forks, trials: Trials
) -> None:
    checkpoint.save(spec, values_of(1))
    there = begun = 1
    killing = Killing(forks, "save_to_store_until_killed")
    for _ in range(trials.most):
        begun, ended = killing.kill(trials, begun + 1, spec=spec, environment=ENVIRONMENT)
        ended = ended or there
        # The server may work on the last request of a killed process after that has ended, and
        # even after the look at what is there: then the commit is found a trial later.
        before, there = there, generation_at(spec)
        assert there is not None
        assert before <= ended <= there <= begun
        count_kill(trials, begun, ended, there)
    assert "old" in trials.outcomes or trials.most < 20
    checkpoint.save(spec, values_of(begun + 1), overwrite=True)
    assert generation_at(spec) == begun + 1
    assert len(directories(spec)) == 2
