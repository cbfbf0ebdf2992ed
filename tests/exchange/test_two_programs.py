"""Offers of four processes, pulled by two: whole versions, and what happens if a process fails."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from gda.exchange import offering
from gda.exchange.connection import Connection
from gda.multihost.agreement import checking_agreement
from gda.testing import Pool

ROWS, COLUMNS = P("x"), P(None, "x")
SHAPE = (64, 32)
LARGE = (2048, 2048)  # 16 MiB, more than the sockets of the offer hold: a pull has a middle
SHORT = 4.0  # seconds until a pull ends that waits in vain

Outcome = tuple[str, Any]

# In the processes of both programs.

_offers: list[gda.Offer] = []


def offered(shape: tuple[int, int] = SHAPE, token: str | None = None) -> str:
    """Offer arrays in rows, whole, without a mesh, and a number; return the address."""
    mesh = mesh_of({"x": jax.device_count()})
    _offers.append(gda.offer(tree_of(mesh, shape), name="weights", token=token))
    # The sockets of its connections have buffers as small.
    _offers[-1]._server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)
    return _offers[-1].address


def tree_of(mesh: Mesh, shape: tuple[int, int] = SHAPE) -> Any:
    def rows(index: Any) -> np.ndarray:
        return np.repeat(np.arange(shape[0], dtype=np.float32)[index[0], None], shape[1], axis=1)

    return {
        "rows": gda.GlobalArray.from_callback(shape, mesh, ROWS, rows, dtype=np.float32),
        "whole": cut(batch(4, 4), mesh, P()),
        "numpy": batch(3),
        "step": 1,
    }


def ended() -> None:
    while _offers:
        _offers.pop().close()


def values_of(tree: Any) -> dict[str, Any]:
    """Return the elements of this process, by the name of the leaf and their place."""
    return {
        f"{name} {shard.index}": np.asarray(shard.data)
        for name, leaf in tree.items()
        if hasattr(leaf, "local_shards")
        for shard in leaf.local_shards
    }


def outcome(pull: Callable[[], Any]) -> Outcome:
    """Return the values of a pull, or the error."""
    try:
        return "whole", values_of(pull())
    except Exception as error:
        return type(error).__name__, str(error)


def specs(path: str, leaf: Any) -> P:
    return COLUMNS if path == "rows" else P()


def pulled(
    address: str, kind: AxisType = AxisType.Auto, seconds: float = 60, **options: Any
) -> Outcome:
    mesh = mesh_of({"x": jax.device_count()}, kind)
    return outcome(lambda: gda.pull(address, mesh, specs, timeout=seconds, **options))


def pulled_in_two_ways(address: str) -> Outcome:
    mesh = mesh_of({"x": jax.device_count()})
    spec = ROWS if jax.process_index() else COLUMNS
    return outcome(
        lambda: gda.pull(address, mesh, {"rows": spec, "whole": P(), "numpy": P(), "step": P()})
    )


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


def assert_failed(outcomes: list[Outcome], kind: str, *words: str) -> None:
    for found, said in outcomes:
        assert found == kind, said
        assert all(word in said for word in words), said


def assert_right(outcomes: list[Outcome]) -> None:
    for kind, values in outcomes:
        assert kind == "whole", values
        for place, value in values.items():
            name, _, said = place.partition(" ")
            index = eval(said)
            if name == "rows":
                rows = np.arange(LARGE[0], dtype=np.float32)[: len(value)]
                np.testing.assert_array_equal(value, np.broadcast_to(rows[:, None], value.shape))
            else:
                whole = {"whole": batch(4, 4), "numpy": batch(3)}[name]
                np.testing.assert_array_equal(value, whole[index])


# Here.


@pytest.fixture
def programs(process_pool: Callable[..., Pool]) -> Iterator[tuple[Pool, Pool]]:
    """The program of four processes that offers, and that of two that pulls."""
    offering, pulling = process_pool(4, devices=2), process_pool(2, devices=4)
    yield offering, pulling
    offering.run(ended)


def test_two_processes_pull_columns_of_the_rows_of_four(programs: tuple[Pool, Pool]) -> None:
    offering, pulling = programs
    addresses = offering.run(offered)
    assert len({*addresses}) == 1
    assert_right(pulling.run(pulled, addresses[0], AxisType.Explicit, verify=True))


def test_every_pulled_tree_is_of_one_version(programs: tuple[Pool, Pool]) -> None:
    offering, pulling = programs
    address = offering.run(offered_versions)[0]
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(pulling.run, versions_pulled, address, 8)
        while not running.done():
            offering.run(updated, 5)
        pulls = running.result()
    assert offering.run(num_pulls_soon) == [0] * 4
    assert offering.run(num_held_after_another) == [1] * 4
    for one, other in zip(*pulls, strict=True):
        assert len({*one, *other}) == 1  # the values of all arrays of both processes
    seen = [next(iter(each)) for each in pulls[0]]
    assert seen == sorted(seen)


def version_tree(number: int) -> Any:
    mesh = mesh_of({"x": jax.device_count()})
    data = np.full((16, 8), number, np.float32)
    with checking_agreement(False):
        return {f"w{i}": cut(data, mesh, ROWS) for i in range(4)} | {"step": number}


def offered_versions() -> str:
    _offers.append(gda.offer(version_tree(1)))
    return _offers[-1].address


def updated(count: int) -> None:
    """Update so many times."""
    for _ in range(count):
        _offers[-1].update(version_tree(_offers[-1].version + 1))


def num_held_after_another() -> int:
    """Return the number of versions that are held after an update without pulls."""
    updated(1)
    return len(_offers[-1]._versions._held)


def versions_pulled(address: str, count: int) -> list[set[float]]:
    """Pull at least so many times, until there were three versions; return the values of each."""
    mesh = mesh_of({"x": jax.device_count()})
    seen = []
    while len(seen) < count or len({*map(tuple, seen)}) < 3:
        tree = gda.pull(address, mesh, lambda path, leaf: P(None, "x"))
        values = {float(x) for data in values_of(tree).values() for x in np.unique(data)}
        seen.append(values | {float(tree["step"])})
    return seen


def test_an_update_of_another_layout_in_one_process_is_an_error_in_all(
    programs: tuple[Pool, Pool],
) -> None:
    offering, pulling = programs
    address = offering.run(offered)[0]
    said = offering.run(update_of_another_value)
    assert all("numpy" in each for each in said), said
    assert_right(pulling.run(pulled, address, min_version=1))


def update_of_another_value() -> str:
    mesh = mesh_of({"x": jax.device_count()})
    with pytest.raises(gda.DisagreementError) as error:
        _offers[-1].update(tree_of(mesh) | {"numpy": batch(3) + jax.process_index()})
    return str(error.value)


def test_an_update_that_one_process_did_not_hear_of_is_made_good_by_the_next(
    programs: tuple[Pool, Pool],
) -> None:
    offering, pulling = programs
    address = offering.run(offered)[0]
    assert offering.run(update_unheard_in_the_last) == [2, 2, 2, 1]
    assert offering.run(updated_once) == [3] * 4
    assert_right(pulling.run(pulled, address, min_version=3))


def update_unheard_in_the_last() -> int:
    """Update; the last process gets an error in place of the decision."""
    do = offering.all_do

    def unheard(*given: Any, **options: Any) -> Any:
        done = do(*given, **options)
        if jax.process_index() == 3:
            raise gda.LateProcessError("process 3 heard nothing")
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offering, "all_do", unheard)
        try:
            return updated_once()
        except gda.LateProcessError:
            return _offers[-1].version


def updated_once() -> int:
    _offers[-1].update(tree_of(mesh_of({"x": jax.device_count()})))
    return _offers[-1].version


def test_processes_that_pull_different_things_all_hear_of_it(programs: tuple[Pool, Pool]) -> None:
    offering, pulling = programs
    address = offering.run(offered)[0]
    assert_failed(pulling.run(pulled_in_two_ways, address), "DisagreementError", "rows")
    assert_right(pulling.run(pulled, address))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"token": "guess"}, "PermissionError", "has another token"),
        ({"at": ["adam"]}, "KeyError", "adam is not in the tree"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_all_processes_that_pull_raise_one_error(
    programs: tuple[Pool, Pool], options: Any, kind: str, message: str
) -> None:
    offering, pulling = programs
    address = offering.run(offered)[0]
    assert_failed(pulling.run(pulled, address, **options), kind, message)


def test_arrays_that_only_some_processes_hold(programs: tuple[Pool, Pool]) -> None:
    offering, pulling = programs
    address = offering.run(offered_by_the_last)[0]
    first, second = pulling.run(pulled_by_the_last, address)
    assert first == ("whole", {})
    assert_right([second])
    assert len(second[1]) == 2


def offered_by_the_last() -> str:
    mesh = Mesh(np.array(jax.devices()[4:]), "x")
    _offers.append(gda.offer({"rows": tree_of(mesh)["rows"]}))
    return _offers[-1].address


def pulled_by_the_last(address: str) -> Outcome:
    mesh = Mesh(np.array(jax.devices()[6:]), "x")
    return outcome(lambda: gda.pull(address, mesh, COLUMNS))


@pytest.mark.parametrize("address", [None, "127.0.0.1:0"])
def test_processes_on_several_machines_need_an_address(
    programs: tuple[Pool, Pool], address: str | None
) -> None:
    offering, pulling = programs
    outcomes = offering.run(offered_on_machines_of_their_own, address)
    if address is None:
        said = "several machines, which 127.0.0.1 does not connect"
        assert_failed(outcomes, "ValueError", said)
    else:
        (found,) = {address for _, address in outcomes}
        assert_right(pulling.run(pulled, found))


def offered_on_machines_of_their_own(address: str | None) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offering, "machine", lambda: f"machine {jax.process_index()}")
        try:
            tree = tree_of(mesh_of({"x": jax.device_count()}))
            _offers.append(gda.offer(tree, address))
            return "whole", _offers[-1].address
        except Exception as error:
            return type(error).__name__, str(error)


# Failures in the middle.


def in_the_middle(
    pulling: Pool, address: str, folder: Path, happens: Callable[[], object], **options: Any
) -> list[Outcome]:
    """Return the outcomes of a pull, in the middle of which something happens."""
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(pulling.run, pulled_with_a_pause, address, folder, **options)
        try:
            wait_for(folder / f"paused {process}" for process in range(2))
            happens()
        finally:
            (folder / "go").touch()
        return running.result()


def test_an_offer_that_is_closed_in_the_middle_ends_the_pull(
    programs: tuple[Pool, Pool], tmp_path: Path
) -> None:
    offering, pulling = programs
    address = offering.run(offered, LARGE)[0]
    outcomes = in_the_middle(pulling, address, tmp_path, lambda: offering.run(ended))
    said = f"the offer at {address}", "ended the connection"
    assert_failed(outcomes, "ConnectionError", *said)
    address = offering.run(offered)[0]
    assert_right(pulling.run(pulled, address))


def test_a_process_of_the_offer_that_is_stopped_is_named_in_time(
    programs: tuple[Pool, Pool], tmp_path: Path
) -> None:
    offering, pulling = programs
    address = offering.run(offered, LARGE)[0]
    pid = offering.run(os.getpid)[2]
    try:
        outcomes = in_the_middle(
            pulling, address, tmp_path, lambda: os.kill(pid, signal.SIGSTOP), short=SHORT
        )
    finally:
        os.kill(pid, signal.SIGCONT)
    said = f"process 2 of the offer at {address}", f"the end of the {SHORT:g} s of timeout="
    assert_failed(outcomes, "TimeoutError", *said)
    assert_right(pulling.run(pulled, address))


def test_a_process_of_the_offer_that_is_killed_is_named(
    process_pool: Callable[..., Pool], tmp_path: Path
) -> None:
    pulling = process_pool(2, devices=4)
    with Pool(2) as offering:
        address = offering.run(offered, LARGE)[0]
        pid = offering.run(os.getpid)[1]
        outcomes = in_the_middle(pulling, address, tmp_path, lambda: os.kill(pid, signal.SIGKILL))
    assert_failed(outcomes, "ConnectionError", f"process 1 of the offer at {address}")


def test_the_offer_outlives_a_process_that_pulls(
    process_pool: Callable[..., Pool], tmp_path: Path
) -> None:
    offering = process_pool(4, devices=2)
    address = offering.run(offered, LARGE)[0]
    try:
        with Pool(2) as pulling, ThreadPoolExecutor(1) as thread:
            pids = pulling.run(os.getpid)
            running = thread.submit(
                pulling.run, pulled_with_a_pause, address, tmp_path, short=SHORT
            )
            wait_for(tmp_path / f"paused {process}" for process in range(2))
            assert offering.run(num_pulls) == [1, 0, 0, 0]
            os.kill(pids[0], signal.SIGKILL)
            (tmp_path / "go").touch()
            with pytest.raises(gda.testing.ProcessError, match="process 0"):
                running.result()
        assert_right([outcome(lambda: gda.pull(address, mesh_of({"x": 4}), specs))])
        assert offering.run(num_pulls_soon) == [0, 0, 0, 0]
    finally:
        offering.run(ended)


def test_a_process_that_pulls_hears_of_one_that_is_stopped(
    programs: tuple[Pool, Pool], tmp_path: Path
) -> None:
    offering, pulling = programs
    address = offering.run(offered, LARGE)[0]
    pid = pulling.run(os.getpid)[1]
    done = tmp_path / "done"

    def stop_until_the_other_has_an_error() -> None:
        os.kill(pid, signal.SIGSTOP)
        (tmp_path / "go").touch()
        try:
            wait_for([done])
        finally:
            os.kill(pid, signal.SIGCONT)

    first, second = in_the_middle(
        pulling, address, tmp_path, stop_until_the_other_has_an_error, done=done, seconds=12
    )
    assert_failed([first], "LateProcessError", "process 1")
    assert second[0] != "whole"
    assert offering.run(num_pulls_soon) == [0, 0, 0, 0]
    assert_right(pulling.run(pulled, address))


def num_pulls() -> int:
    """Return the number of pulls that hold a version in this process."""
    return _offers[-1]._versions._pulls.total()


def num_pulls_soon() -> int:
    end = time.monotonic() + 50
    while num_pulls() and time.monotonic() < end:
        time.sleep(0.05)
    return num_pulls()


def test_a_pull_waits_for_a_program_that_offers_later(
    process_pool: Callable[..., Pool],
) -> None:
    offering = process_pool(4, devices=2)
    address = offering.run(offered)[0]
    offering.run(ended)
    with ThreadPoolExecutor(1) as thread:
        pulling = thread.submit(gda.pull, address, timeout=60)
        threading.Event().wait(0.5)
        offering.run(offered_at, address)
        np.testing.assert_array_equal(pulling.result()["numpy"], batch(3))
    offering.run(ended)


def offered_at(address: str) -> None:
    _offers.append(gda.offer({"numpy": batch(3)}, address))
