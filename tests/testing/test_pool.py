import os
import re
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from running import LOOPBACK, addresses_listened_on, is_running, wait_for, wait_until_gone

import gda.testing.pool
from gda.testing import Pool, ProcessError

# A group, because all tests use one pool.
pytestmark = pytest.mark.xdist_group("pool")


@pytest.fixture(scope="module")
def pool():
    with Pool(2, devices=3) as pool:
        yield pool


def total(values):
    """The sum of what all processes hold, by way of a collective."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    values = np.asarray(values, np.float32)
    x = jax.make_array_from_callback(
        values.shape, NamedSharding(mesh, PartitionSpec("x")), lambda index: values[index]
    )
    return float(jnp.sum(x))


def rank(offset, *, scale=1):
    return offset + scale * jax.process_index()


class Things:
    @staticmethod
    def double(value):
        return 2 * value

    def method(self):
        pass


def test_results_come_in_the_order_of_the_processes(pool):
    assert pool.run(rank, 10, scale=5) == [10, 15]
    assert pool.run(total, [1, 2, 3, 4, 5, 6]) == [21, 21]  # which talk to each other


def test_functions_of_libraries_and_of_classes_can_be_called(pool):
    assert pool.run(jax.process_count) == [2, 2]
    assert pool.run(Things.double, 4) == [8, 8]
    assert "device_count=8" in os.environ["XLA_FLAGS"]
    assert pool.run(jax.local_device_count) == [3, 3]


def raise_in(process, message):
    if jax.process_index() in process:
        raise ValueError(message)


def test_an_error_is_the_error_of_a_process_and_has_its_traceback(pool):
    with pytest.raises(ProcessError) as caught:
        pool.run(raise_in, [1], "no such block")
    assert caught.value.process == 1
    message = str(caught.value)
    assert message.startswith("process 1 of 2: ValueError: no such block\nTraceback")
    assert f'File "{__file__}"' in message
    assert "in raise_in" in message
    assert "gda/testing" not in message


def test_processes_are_kept_if_all_of_them_fail_alike_and_replaced_otherwise(pool, monkeypatch):
    monkeypatch.setattr(gda.testing.pool, "GRACE", 50)  # one may be late
    pids = pool.run(os.getpid)
    assert len({*pids, os.getpid()}) == 3
    with pytest.raises(ProcessError, match=r"(?s)process . of 2: ValueError.*process . of 2: Val"):
        pool.run(raise_in, [0, 1], "both")
    with pytest.raises(ProcessError, match=r"process . of 2: SystemExit: 5"):
        pool.run(sys.exit, 5)
    assert pool.run(os.getpid) == pids
    with pytest.raises(ProcessError, match="process 0 of 2: ValueError: one"):
        pool.run(raise_in, [0], "one")
    assert set(pool.run(os.getpid)).isdisjoint(pids)


def end_in(process, how):
    print("last words")
    if jax.process_index() == process:
        how()
    return total([1.0] * 6)


def kill_me():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("process", [0, 1])  # 0 has the service of JAX
def test_a_process_that_dies_is_named_and_where_the_others_stood(pool, process):
    pool.run(total, [1.0] * 6)
    with pytest.raises(ProcessError) as caught:
        pool.run(end_in, process, kill_me)
    message = str(caught.value)
    assert caught.value.process == process
    killed = f"process {process} of 2 was killed by SIGKILL\nThe end of its output:\nlast words"
    assert message.startswith(killed)
    # It got an error from its collective, or waited in it, or JAX ended it with its service.
    endings = [f"process {1 - process} of 2: ", "in total"]
    endings += ["process 1 of 2 was killed by SIGABRT"] * (process == 0)
    assert any(ending in message for ending in endings)


def sleep_in(process, seconds, folder=None):
    if jax.process_index() == process:
        if folder is not None:
            (folder / str(process)).touch()
        time.sleep(seconds)


def nothing():
    """A call that loads this module in the processes, so that the next call starts at once."""


def ignore_signals():
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    time.sleep(600)


def test_a_process_that_shows_no_stack_is_told_of(pool):
    pool.run(nothing)
    with pytest.raises(ProcessError, match="unknown: the process did not react to a signal"):
        pool.run(ignore_signals, timeout=5)


def lock():
    return threading.Lock()


def shout(size):
    print("x" * size)
    raise_in([0, 1], "after much output")


def shout_and_die(size):
    print("x" * size + "\nlast words")
    os._exit(3)


def test_the_end_of_much_output_and_the_exit_code_of_a_process_are_told(pool):
    with pytest.raises(ProcessError, match="after much output"):
        pool.run(shout, 5_000_000)
    with pytest.raises(ProcessError) as caught:
        pool.run(shout_and_die, 5_000_000)
    message = str(caught.value)
    assert re.match(r"process . of 2 exited with code 3\nThe end of its output:\n", message)
    assert "bytes omitted" in message
    assert "\nlast words" in message
    assert len(message) < 30_000


def test_functions_and_values_that_cannot_be_sent_are_refused(pool):
    with pytest.raises(ProcessError, match="TypeError: lock returned a lock, which cannot"):
        pool.run(lock)
    for function in (lambda: 1, Things().method, object()):
        with pytest.raises(TypeError, match="must stand at the top of a module or in a class"):
            pool.run(function)
    with pytest.raises(TypeError, match="arguments of rank cannot be sent to other processes"):
        pool.run(rank, threading.Lock())


@pytest.mark.parametrize("wrong", [0, -1, "2", 2.0, True, None])
def test_sizes_are_positive_integers(wrong):
    with pytest.raises(
        ValueError, match=f"num_processes must be a positive integer, not {wrong!r}"
    ):
        Pool(wrong)
    with pytest.raises(ValueError, match=f"devices must be a positive integer, not {wrong!r}"):
        Pool(1, wrong)


def test_an_interrupt_ends_the_processes(pool, tmp_path):
    def interrupt():
        wait_for([tmp_path / "0"])
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    pids = pool.run(os.getpid)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        pool.run(sleep_in, 0, 600, tmp_path)
    thread.join()
    assert not any(is_running(pid) for pid in pids)
    assert re.search(r"process 0 of 2:\n.*\n.* in sleep_in", caught.value.__notes__[0])


def test_a_pool_starts_again_after_a_death_and_when_closed(pool):
    before = pool.run(os.getpid)
    os.kill(before[1], signal.SIGKILL)
    wait_until_gone([before[1]])
    pids = pool.run(os.getpid)
    assert set(pids).isdisjoint(before)
    pool.close()
    pool.close()
    assert not any(is_running(pid) for pid in pids)
    assert pool.run(jax.process_index) == [0, 1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_listen_on_this_machine_alone(pool):
    pool.run(total, [1.0] * 6)
    assert all(LOOPBACK.issuperset(each) for each in pool.run(addresses_listened_on))


def test_an_interrupt_that_is_ignored_on_entry_is_not_ignored_in_the_processes(pool):
    pool.close()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert pool.run(signal.getsignal, signal.SIGINT) == [signal.default_int_handler] * 2
    finally:
        signal.signal(signal.SIGINT, before)
