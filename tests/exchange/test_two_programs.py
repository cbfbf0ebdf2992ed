"""Offers of two processes, pulled by two others: whole versions, and processes that fail."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, mesh_of
from running import wait_for

import gda
from gda.arrays.transport.connection import Connection
from gda.exchange import offering
from gda.layout.indices import start_of
from gda.testing import Pool

ROWS, COLUMNS = P("x"), P(None, "x")
SHAPE = (64, 32)
LARGE = (2048, 2048)  # 16 MiB, more than the sockets of the offer hold: a pull has a middle
SHORT = 4.0  # seconds until a pull ends that waits in vain

Outcome = tuple[str, Any]

# In the processes of both programs.

_offers: list[gda.Offer] = []


def offered(shape: tuple[int, int] = SHAPE, address: str | None = None) -> str:
    """Offer arrays in rows, whole, without a mesh, and a number; return the address."""
    _offers.append(gda.offer(tree_of(shape), address, name="weights"))
    # The sockets of its connections have buffers as small.
    _offers[-1]._server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)
    return _offers[-1].address


def tree_of(shape: tuple[int, int] = SHAPE, mesh: Mesh | None = None) -> Any:
    mesh = mesh or mesh_of({"x": jax.device_count()})
    rows = np.repeat(np.arange(shape[0], dtype=np.float32)[:, None], shape[1], axis=1)
    whole = {"whole": cut(batch(4, 4), mesh, P()), "numpy": batch(3), "step": 1}
    return {"rows": cut(rows, mesh, ROWS)} | whole


def ended() -> None:
    while _offers:
        _offers.pop().close()


def outcome(pull: Callable[[], Any]) -> Outcome:
    """Return the elements of this process by name and place of a pull, or its error."""
    try:
        tree = pull()
    except Exception as error:
        return type(error).__name__, str(error)
    return "whole", {
        (name, start_of(shard.index)): np.asarray(shard.data)
        for name, leaf in tree.items()
        if hasattr(leaf, "local_shards")
        for shard in leaf.local_shards
    }


def pulled(
    address: str,
    kind: AxisType = AxisType.Auto,
    *,
    differ: bool = False,
    seconds: float = 60,
    **options: Any,
) -> Outcome:
    """Pull the rows as columns; if they ``differ``, the last process wants them as rows."""
    mesh = mesh_of({"x": jax.device_count()}, kind)
    spec = ROWS if differ and jax.process_index() else COLUMNS
    specs = lambda path, leaf: spec if path == "rows" else P()  # noqa: E731
    return outcome(lambda: gda.pull(address, mesh, specs, timeout=seconds, **options))


def pulled_with_a_pause(
    address: str,
    folder: Path,
    done: Path = Path(os.devnull),
    short: float | None = None,
    **options: Any,
) -> Outcome:
    """Pull, and wait before the first block arrives until a file says that it may.

    From then on it waits ``short`` seconds.
    """
    receive, guard = Connection.receive_blocks, threading.Lock()

    def pause(self: Connection, blocks: Any) -> None:
        (folder / f"paused {jax.process_index()}").touch()
        wait_for([folder / "go"])
        with guard:
            if short is not None and self.deadline.seconds != short:
                self.deadline.__init__(short)  # of all connections of this pull
        receive(self, blocks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "receive_blocks", pause)
        found = pulled(address, **options)
    done.touch()
    return found


def num_pulls_soon() -> int:
    """Return the number of pulls that hold a version in this process, once they had time to end."""
    end = time.monotonic() + 50
    while (count := _offers[-1]._versions._pulls.total()) and time.monotonic() < end:
        time.sleep(0.05)
    return count


# Here.


def assert_failed(outcomes: list[Outcome], kind: str, *words: str) -> None:
    for found, said in outcomes:
        assert found == kind, said
        assert all(word in said for word in words), said


def assert_right(outcomes: list[Outcome]) -> None:
    for kind, values in outcomes:
        assert kind == "whole", values
        for (name, start), value in values.items():
            whole = batch(4, 4)
            if name == "rows":
                whole = np.repeat(np.arange(start[0] + len(value))[:, None], 2048, axis=1)
            place = [slice(n, n + size) for n, size in zip(start, value.shape, strict=True)]
            np.testing.assert_array_equal(value, (batch(3) if name == "numpy" else whole)[*place])


@pytest.fixture(scope="module")
def other() -> Iterator[Pool]:
    """A program that a test may kill; the next call starts it again."""
    with Pool(2, devices=2) as pool:
        yield pool


@pytest.fixture
def programs(process_pool: Callable[..., Pool], other: Pool) -> Iterator[tuple[Pool, Pool]]:
    """The program that offers, and the one that pulls."""
    offering = process_pool(2, devices=4)
    yield offering, other
    offering.run(ended)


def test_two_processes_pull_columns_of_the_rows_of_two(programs: tuple[Pool, Pool]) -> None:
    offering, pulling = programs
    addresses = offering.run(offered)
    assert len({*addresses}) == 1
    assert_right(pulling.run(pulled, addresses[0], AxisType.Explicit))
    for options, kind, said in [
        ({"token": "guess"}, "PermissionError", "has another token"),
        ({"at": ["adam"]}, "KeyError", "adam is not in the tree"),
        ({"differ": True}, "DisagreementError", "rows"),
    ]:
        assert_failed(pulling.run(pulled, addresses[0], **options), kind, said)
    assert_right(pulling.run(pulled, addresses[0]))


def test_every_pulled_tree_is_of_one_version(programs: tuple[Pool, Pool]) -> None:
    offering, pulling = programs
    address = offering.run(offered_versions)[0]
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(pulling.run, versions_pulled, address, 6)
        while not running.done():
            offering.run(updated, 5)
        pulls = running.result()
    assert offering.run(num_pulls_soon) == [0, 0]
    assert offering.run(updated, 1) == [1, 1]
    for one, other in zip(*pulls, strict=True):
        assert len({*one, *other}) == 1  # the values of all arrays of both processes
    seen = [next(iter(each)) for each in pulls[0]]
    assert seen == sorted(seen)


def version_tree(number: int) -> Any:
    mesh = mesh_of({"x": jax.device_count()})
    data = np.full((16, 8), number, np.float32)
    return {f"w{i}": cut(data, mesh, ROWS) for i in range(4)} | {"step": number}


def offered_versions() -> str:
    _offers.append(gda.offer(version_tree(1)))
    return _offers[-1].address


def updated(count: int) -> int:
    """Update so many times; return the number of versions that are held."""
    for _ in range(count):
        _offers[-1].update(version_tree(_offers[-1].version + 1))
    return len(_offers[-1]._versions._held)


def versions_pulled(address: str, count: int) -> list[set[float]]:
    """Pull at least so many times, until there were three versions; return the values of each."""
    mesh = mesh_of({"x": jax.device_count()})
    seen = []
    while len(seen) < count or len({*map(tuple, seen)}) < 3:
        tree = gda.pull(address, mesh, lambda path, leaf: P(None, "x"))
        values = {float(tree.pop("step"))}
        for array in tree.values():
            values |= {float(x) for shard in array.local_shards for x in np.unique(shard.data)}
        seen.append(values)
    return seen


def test_an_update_that_one_process_did_not_hear_of_is_made_good_by_the_next(
    programs: tuple[Pool, Pool],
) -> None:
    offering, pulling = programs
    address = offering.run(offered)[0]
    said = offering.run(update_of_another_value)
    assert all("numpy" in each for each in said), said
    assert_right(pulling.run(pulled, address, min_version=1))
    assert offering.run(update_unheard_in_the_last) == [2, 1]
    assert offering.run(updated_once) == [3, 3]
    assert_right(pulling.run(pulled, address, min_version=3))


def update_of_another_value() -> str:
    with pytest.raises(gda.DisagreementError) as error:
        _offers[-1].update(tree_of() | {"numpy": batch(3) + jax.process_index()})
    return str(error.value)


def update_unheard_in_the_last() -> int:
    """Update; the last process gets an error in place of the decision."""
    do = offering.all_do

    def unheard(*given: Any, **options: Any) -> Any:
        done = do(*given, **options)
        if jax.process_index():
            raise gda.LateProcessError("process 1 heard nothing")
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offering, "all_do", unheard)
        try:
            return updated_once()
        except gda.LateProcessError:
            return _offers[-1].version


def updated_once() -> int:
    _offers[-1].update(tree_of())
    return _offers[-1].version


def test_arrays_that_only_some_processes_hold(programs: tuple[Pool, Pool]) -> None:
    offering, pulling = programs
    address = offering.run(offered_by_the_last)[0]
    first, second = pulling.run(pulled_by_the_last, address)
    assert first == ("whole", {})
    assert_right([second])
    assert len(second[1]) == 2


def offered_by_the_last() -> str:
    mesh = Mesh(np.array(jax.devices()[4:]), "x")
    _offers.append(gda.offer({"rows": tree_of(mesh=mesh)["rows"]}))
    return _offers[-1].address


def pulled_by_the_last(address: str) -> Outcome:
    mesh = Mesh(np.array(jax.devices()[2:]), "x")
    return outcome(lambda: gda.pull(address, mesh, COLUMNS))


def test_processes_on_several_machines_need_an_address(programs: tuple[Pool, Pool]) -> None:
    offering, pulling = programs
    said = "several machines, which 127.0.0.1 does not connect"
    assert_failed(offering.run(offered_on_machines_of_their_own, None), "ValueError", said)
    (_, address), _ = offering.run(offered_on_machines_of_their_own, "127.0.0.1:0")
    assert_right(pulling.run(pulled, address))


def offered_on_machines_of_their_own(address: str | None) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offering, "machine", lambda: f"machine {jax.process_index()}")
        try:
            return "whole", offered(address=address)
        except ValueError as error:
            return "ValueError", str(error)


# Failures in the middle.


@contextmanager
def in_the_middle(
    pulling: Pool, address: str, folder: Path, **options: Any
) -> Iterator[Future[list[Outcome]]]:
    """Give the outcomes of a pull that has begun, and goes on after the block."""
    folder.mkdir(exist_ok=True)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(pulling.run, pulled_with_a_pause, address, folder, **options)
        try:
            wait_for(folder / f"paused {process}" for process in range(2))
            yield running
        finally:
            (folder / "go").touch()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_an_offer_that_is_closed_in_the_middle_ends_the_pull(
    programs: tuple[Pool, Pool], tmp_path: Path
) -> None:
    offering, pulling = programs
    address = offering.run(offered, LARGE)[0]
    with in_the_middle(pulling, address, tmp_path) as running:
        offering.run(ended)
    said = f"the offer at {address}", "ended the connection"
    assert_failed(running.result(), "ConnectionError", *said)


def test_a_process_that_is_stopped_is_named_in_time(
    programs: tuple[Pool, Pool], tmp_path: Path
) -> None:
    offering, pulling = programs
    address = offering.run(offered, LARGE)[0]
    pids = offering.run(os.getpid), pulling.run(os.getpid)
    with ExitStack() as until_the_end:
        with in_the_middle(pulling, address, tmp_path / "one", short=SHORT) as running:
            until_the_end.enter_context(stopped(pids[0][1]))
        outcomes = running.result()
    said = f"process 1 of the offer at {address}", f"the end of the {SHORT:g} s of timeout="
    assert_failed(outcomes, "TimeoutError", *said)
    done, folder = tmp_path / "done", tmp_path / "two"
    with in_the_middle(pulling, address, folder, done=done, seconds=12) as running:  # noqa: SIM117
        with stopped(pids[1][1]):
            (folder / "go").touch()
            wait_for([done])  # the other one has an error
    first, second = running.result()
    assert_failed([first], "LateProcessError", "process 1")
    assert second[0] != "whole"
    assert offering.run(num_pulls_soon) == [0, 0]
    assert_right(pulling.run(pulled, address))


def test_a_process_that_is_killed_is_named_and_the_offer_outlives_it(
    programs: tuple[Pool, Pool], tmp_path: Path
) -> None:
    """Both programs offer, and are in the middle of a pull from each other."""
    offering, dying = programs
    address, of_dying = offering.run(offered, LARGE)[0], dying.run(offered, LARGE)[0]
    pid = dying.run(os.getpid)[1]
    with (
        in_the_middle(dying, address, tmp_path / "one", short=SHORT) as died,
        in_the_middle(offering, of_dying, tmp_path / "two") as running,
    ):
        os.kill(pid, signal.SIGKILL)
    assert_failed(running.result(), "ConnectionError", f"process 1 of the offer at {of_dying}")
    with pytest.raises(gda.testing.ProcessError, match="process 1"):
        died.result()
    assert offering.run(num_pulls_soon) == [0, 0]
    assert_right([pulled(address)])
