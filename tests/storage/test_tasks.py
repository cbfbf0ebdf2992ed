"""Many pieces of work at a time: order, budget, errors, retries and interrupts."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from leaks import no_thread_is_left  # noqa: F401, of every test

import gda
from gda.storage.options import Options
from gda.storage.tasks import AsyncTask, Task, Transfer, run


@pytest.mark.parametrize("max_workers", [None, 1])
def test_one_worker_is_the_thread_of_the_caller(max_workers: int | None) -> None:
    threads = []
    run([Task(1, threading.get_ident, threads.append)] * 3, Options(max_workers))
    assert threads == [threading.get_ident()] * 3


def test_work_overlaps_and_is_finished_by_the_caller() -> None:
    together, threads = threading.Barrier(4, timeout=60), []
    run([Task(1, together.wait, lambda _: threads.append(threading.get_ident()))] * 8, Options(4))
    assert threads == [threading.get_ident()] * 8


@given(
    sizes=st.lists(st.integers(0, 12), max_size=12),
    max_workers=st.integers(1, 4),
    max_bytes=st.none() | st.integers(1, 20),
    asynchronous=st.integers(0, 2**12 - 1),
)
def test_the_budget_and_the_workers_are_never_exceeded(
    sizes: list[int], max_workers: int, max_bytes: int | None, asynchronous: int
) -> None:
    lock = threading.Lock()
    held: list[int] = []
    most: list[tuple[int, int, int]] = []
    finished = []

    def begin(i: int) -> int:
        with lock:
            held.append(i)
            most.append((sum(sizes[k] for k in held), len(held), max(sizes[k] for k in held)))
        return i

    def finish(i: int) -> None:
        with lock:
            held.remove(i)
        finished.append(i)

    with ThreadPoolExecutor(2) as pool:

        def task(i: int) -> Task | AsyncTask:
            if asynchronous >> i & 1:
                return AsyncTask(sizes[i], lambda: pool.submit(int, begin(i)), finish)
            return Task(sizes[i], lambda: begin(i), finish)

        run(map(task, range(len(sizes))), Options(max_workers, max_bytes))
    assert sorted(finished) == list(range(len(sizes)))
    for nbytes, count, largest in most:
        assert count <= 2 * max_workers
        assert max_bytes is None or nbytes <= max(max_bytes, largest)


def test_tasks_are_taken_only_when_there_is_room() -> None:
    taken, finished = [], []

    def tasks() -> Iterator[Task]:
        for i in range(5):
            taken.append(i)
            yield Task(10, lambda: None, lambda _: finished.append(len(taken) - len(finished)))

    run(tasks(), Options(4, 10))
    assert max(finished) <= 2  # one that is read, and one that waits for room


def test_memory_counts_until_its_transfer_is_done() -> None:
    moving: list[int] = []

    def finish(i: int) -> Transfer:
        moving.append(i)
        assert len(moving) <= 2
        return Transfer(lambda: False, lambda: moving.remove(i))

    for max_workers in [None, 3]:
        tasks = [Task(10, lambda i=i: i, finish) for i in range(6)]
        run(tasks, Options(max_workers, 20))
        assert len(moving) == 2, "the last ones may go on"
        moving.clear()


# Errors and interrupts.


@pytest.mark.parametrize("max_workers", [None, 2, 8])
@pytest.mark.parametrize("where", ["work", "finish"])
def test_an_error_stops_the_rest(max_workers: int | None, where: str) -> None:
    begun = []

    def fail(_: object = None) -> None:
        raise OSError("gone")

    def tasks() -> Iterator[Task]:
        for i in range(100):
            begun.append(i)
            steps = {"work": lambda: None, "finish": lambda _: None}
            if i == 3:
                steps[where] = fail
            yield Task(1, **steps)

    with pytest.raises(OSError, match="gone"):
        run(tasks(), Options(max_workers))
    assert len(begun) < 100


def test_future_of_a_library_is_cancelled() -> None:
    future: Future[None] = Future()

    def fail() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        run([AsyncTask(1, lambda: future), Task(1, fail)], Options())
    assert future.cancelled()


def test_an_asynchronous_error_is_noted() -> None:
    def begin() -> Future[None]:
        future: Future[None] = Future()
        future.set_exception(OSError("gone"))
        return future

    def cannot_begin() -> Future[None]:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        run([AsyncTask(1, cannot_begin)], Options())
    task = AsyncTask(1, begin, note=lambda error: error.add_note("the third"))
    with pytest.raises(OSError, match="gone") as caught:
        run([task], Options())
    assert caught.value.__notes__ == ["the third"]


_INTERRUPTED = """
import os, threading, time
from gda.storage.tasks import Task, run
from gda.storage.options import Options, Retry

begun = []
def work():
    begun.append(0)
    os.write(1, b"begun\\n")  # in one piece, unlike print
    {what}

try:
    run([Task(1, work)] * 50, Options({workers}, retry={retry}))
except KeyboardInterrupt:
    print("interrupted", len(begun) < 50, threading.active_count())
"""


@pytest.mark.parametrize(
    ("workers", "what", "retry"),
    [
        # Short sleeps in a loop of Python's, as a signal just before one does not end it.
        ("1", "for _ in range(600): time.sleep(0.1)", "None"),
        ("4", "raise OSError", "Retry(OSError, delay=60)"),
    ],
)
def test_ctrl_c_ends_it_at_once(workers: str, what: str, retry: str) -> None:
    program = _INTERRUPTED.format(what=what, workers=workers, retry=retry)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        begun = [process.stdout.readline() for _ in range(int(workers))]
        time.sleep(0.1)  # in which it begins to wait
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert {*begun} == {"begun\n"}
    assert out.splitlines()[-1] == "interrupted True 1"


# Trying again.


class Flaky:
    """Work that fails some times before it does not."""

    def __init__(self, failures: int, error: type[Exception] = OSError) -> None:
        self.failures, self.error, self.calls = failures, error, 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error(f"failure {self.calls}")
        return "fine"


def _asynchronous(work: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future


QUICK = gda.Retry((OSError, KeyError), attempts=3, delay=0.001)
KINDS = {
    "caller": (1, Task),
    "threads": (2, Task),
    "library": (1, lambda n, work, finish: AsyncTask(n, lambda: _asynchronous(work), finish)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_errors_that_are_named_are_tried_again(kind: str) -> None:
    max_workers, task = KINDS[kind]
    options, finished = Options(max_workers, retry=QUICK), []
    flaky = [Flaky(2), Flaky(0), Flaky(1, KeyError)]
    run([task(1, f, finished.append) for f in flaky], options)
    assert finished == ["fine"] * 3
    assert [f.calls for f in flaky] == [3, 1, 2]
    always = Flaky(9)
    with pytest.raises(OSError, match="failure 3") as caught:
        run([task(1, always, print)], options)
    assert caught.value.__notes__ == ["gda: after attempt 3 of 3"]
    assert always.calls == 3


def test_another_error_is_not_tried_again() -> None:
    flaky = Flaky(9, ValueError)
    with pytest.raises(ValueError, match="failure 1") as caught:
        run([Task(1, flaky)], Options(retry=QUICK))
    assert not hasattr(caught.value, "__notes__")


def test_waiting_ends_when_another_fails() -> None:
    waits = threading.Event()

    def slow() -> None:
        waits.set()
        raise OSError("tried again in a day")

    def wrong() -> None:
        waits.wait(60)
        time.sleep(0.05)
        raise ValueError("wrong")

    retry = gda.Retry(OSError, delay=86400)
    with pytest.raises(ValueError, match="wrong"):
        run([Task(1, slow), Task(1, wrong)], Options(2, retry=retry))


@given(delay=st.floats(0, 100), attempts=st.integers(1, 2000))
def test_delays_grow_up_to_a_bound(delay: float, attempts: int) -> None:
    retry = gda.Retry(OSError, delay=delay)
    assert delay / 2 * 0.999 <= retry.seconds_after(attempts) <= max(delay, 10)
    assert retry.seconds_after(1) <= delay


# Options that are wrong.

RETRY_ERRORS = partial(gda.Retry, OSError)


@pytest.mark.parametrize(
    ("make", "name", "value", "message"),
    [
        (gda.Retry, "errors", KeyboardInterrupt, "errors must be an exception class"),
        (RETRY_ERRORS, "attempts", 0, "attempts must be a whole number"),
        (RETRY_ERRORS, "delay", -1, "delay must be from 0 to 86400 seconds, not -1"),
        (Options, "max_workers", 0, "max_workers must be a whole number, at least 1, not 0"),
        (Options, "max_bytes", 0, "max_bytes must be a whole number, at least 1, not 0"),
        (Options, "progress", 1, "progress must be True, False or a function"),
        (Options, "retry", OSError, r"retry must be a gda.Retry, such as gda.Retry\(OSError\)"),
    ],
)
def test_options_that_make_no_sense(make: Any, name: str, value: Any, message: str) -> None:
    kind = TypeError if name in ("errors", "progress", "retry") else ValueError
    with pytest.raises(kind, match=message):
        make(**{name: value})
