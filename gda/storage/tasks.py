"""Many tasks at a time, within a budget of bytes: the loop under every load and save.

Tasks run in threads of this loop, or in those of the library that reads. Results are finished
in the caller's thread. This module does not depend on JAX or on files.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from gda.storage.options import Options


class Future(Protocol):
    """The common part of the futures of TensorStore and of ``concurrent.futures``."""

    def add_done_callback(self, callback: Callable[[Any], Any], /) -> Any: ...
    def result(self) -> Any: ...
    def cancel(self) -> Any: ...


class Task(NamedTuple):
    """A task for one of the threads of the loop.

    ``finish`` is called in the caller's thread with the result of ``work``, in any order of tasks.
    If it returns a ``Transfer``, the memory is held until that is done.
    """

    nbytes: int  # of host memory that it holds until it is finished
    work: Callable[[], Any]
    finish: Callable[[Any], object] = lambda _: None


class AsyncTask(NamedTuple):
    """A task that a library does in its own threads.

    ``begin`` is called in the caller's thread and returns at once. ``note`` is called with an error
    of the read, to add a note about it. ``library_bytes`` is the memory of the library for
    it, which is bounded over all tasks. The rest is as in ``Task``.
    """

    nbytes: int
    begin: Callable[[], Future]
    finish: Callable[[Any], object] = lambda _: None
    note: Callable[[Exception], object] = lambda _: None
    library_bytes: int = 0


class JoinedFutures:
    """Several futures as one, which is done when all are; ``result`` then calls ``steps``."""

    def __init__(
        self, futures: Sequence[Future], steps: Sequence[Callable[[], object]] = ()
    ) -> None:
        self._futures, self._steps = futures, steps

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        counts = itertools.count(1)  # their threads may call at the same time

        def count(_: object) -> None:
            if next(counts) == len(self._futures):
                callback(self)

        for future in self._futures:
            future.add_done_callback(count)
        if not self._futures:
            callback(self)

    def result(self) -> None:
        for future in self._futures:
            future.result()
        for step in self._steps:
            step()

    def cancel(self) -> None:
        for future in self._futures:
            future.cancel()


class Transfer(NamedTuple):
    """A transfer that still needs the memory of a finished task."""

    is_done: Callable[[], bool]
    wait: Callable[[], object]


# The default number of concurrent reads in the threads of a library. A remote store takes this many
# requests; each may need memory of its own for a chunk.
_MOST_PENDING = 32
# The memory of a library for all its reads, unless two need more: with 16 MiB, an Orbax run with
# chunks of 8 MiB took 1.4 times as long.
_MOST_LIBRARY_BYTES = 32 * 2**20


def run(tasks: Iterable[Task | AsyncTask], options: Options) -> None:
    """Do all ``tasks``; return when the last is finished.

    Tasks begin in order, at most ``max_workers`` at a time. A task waits while it and the
    unfinished tasks together would hold more than ``max_bytes``; a task larger than that runs
    alone. With one worker, or ``None``, every ``Task`` runs in the caller's thread; with ``None``
    32 ``AsyncTask``s may run at the same time.

    Raises the first error of a task that is not retried. After it, or ``KeyboardInterrupt``, no
    task begins, running ones are waited for, or cancelled in a library, and no thread is left.
    """
    _Crew(iter(tasks), options).run()


class _Attempt:
    """A task that was begun, and the number of its attempts."""

    def __init__(self, task: Task | AsyncTask) -> None:
        self.task = task
        self.count = 0
        self.future: Future | None = None
        self.result: Any = None
        self.error: BaseException | None = None

    def work(self) -> None:
        """Do the task; keep its result, or its error for the caller's thread to handle."""
        self.count += 1
        try:
            assert isinstance(self.task, Task)
            self.result, self.error = self.task.work(), None
        except BaseException as error:
            self.error = error


class _Crew:
    """The tasks of one ``run``, and the threads that do them."""

    def __init__(self, tasks: Iterator[Task | AsyncTask], options: Options) -> None:
        self._tasks = tasks
        most = options.max_workers
        self._most = {Task: most or 1, AsyncTask: most or _MOST_PENDING}
        self._max_bytes, self._retry = options.max_bytes, options.retry
        # Only the caller's thread uses these.
        self._held_bytes = self._held_by_library = 0
        self._begun = {Task: 0, AsyncTask: 0}
        self._later: list[tuple[float, _Attempt]] = []
        self._transfers: deque[tuple[int, Transfer]] = deque()
        self._asynchronous: set[_Attempt] = set()
        self._threads: list[threading.Thread] = []
        self._waiting: queue.SimpleQueue[_Attempt | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Attempt] = queue.SimpleQueue()
        self._is_over = False

    def run(self) -> None:
        try:
            self._direct()
        finally:
            self._end()

    def _end(self) -> None:
        """Begin no more tasks; wait until running ones and the threads have ended."""
        self._is_over = True
        for _ in self._threads:
            self._waiting.put(None)  # wakes the thread
        for attempt in self._asynchronous:
            if attempt.future is not None:
                attempt.future.cancel()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _direct(self) -> None:
        """Hand out tasks within the budget, and finish those that are done."""
        following = next(self._tasks, None)
        while following is not None or any(self._begun.values()):
            while following is not None and self._makes_room(following):
                self._held_bytes += following.nbytes
                self._held_by_library += _library_bytes(following)
                self._begun[type(following)] += 1
                self._begin(_Attempt(following))
                # First, because the size of the next task may depend on it.
                self._finish(self._all_done())
                following = next(self._tasks, None)
            if any(self._begun.values()):
                self._finish(self._wait())

    def _makes_room(self, task: Task | AsyncTask) -> bool:
        """Return True if a task may begin; wait for transfers if that frees enough memory."""
        if self._begun[type(task)] >= self._most[type(task)]:
            return False
        library_bytes = self._held_by_library + _library_bytes(task)
        # Two may always run: two threads of a library decode large chunks in half the time.
        if self._begun[AsyncTask] > 1 and library_bytes > _MOST_LIBRARY_BYTES:
            return False
        if self._max_bytes is None:
            return True
        while self._transfers and (
            self._transfers[0][1].is_done() or self._held_bytes + task.nbytes > self._max_bytes
        ):
            nbytes, transfer = self._transfers.popleft()
            transfer.wait()
            self._held_bytes -= nbytes
        return not self._held_bytes or self._held_bytes + task.nbytes <= self._max_bytes

    def _begin(self, attempt: _Attempt) -> None:
        if isinstance(attempt.task, AsyncTask):
            self._begin_asynchronous(attempt, attempt.task)
            return
        if len(self._threads) < self._begun[Task] and self._most[Task] > 1:
            self._start_thread()
        if self._threads:
            self._waiting.put(attempt)
        else:
            attempt.work()
            self._done.put(attempt)

    def _begin_asynchronous(self, attempt: _Attempt, task: AsyncTask) -> None:
        attempt.count += 1
        self._asynchronous.add(attempt)
        try:
            attempt.future = task.begin()
        except Exception as error:
            attempt.error = error
            self._done.put(attempt)
            return
        attempt.future.add_done_callback(lambda _: self._done.put(attempt))

    def _start_thread(self) -> None:
        name = f"{threading.current_thread().name}-reader-{len(self._threads)}"
        thread = threading.Thread(target=self._serve, name=name)
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:
            # Python starts no threads at interpreter exit, but begun tasks must still finish.
            self._threads.remove(thread)

    def _wait(self) -> list[_Attempt]:
        """Return the attempts that are done, at least one; begin those to be tried again."""
        seconds = None
        if self._later:
            seconds = max(0, min(due for due, _ in self._later) - time.monotonic())
        try:
            return [self._done.get(timeout=seconds), *self._all_done()]
        except queue.Empty:
            pass
        now = time.monotonic()
        due = [attempt for when, attempt in self._later if when <= now]
        self._later = [(when, attempt) for when, attempt in self._later if when > now]
        for attempt in due:
            self._begin(attempt)
        return self._all_done()

    def _all_done(self) -> list[_Attempt]:
        """Return the attempts that were done since the last call."""
        done = []
        with contextlib.suppress(queue.Empty):
            while True:
                done.append(self._done.get_nowait())
        return done

    def _finish(self, done: list[_Attempt]) -> None:
        for attempt in done:
            self._asynchronous.discard(attempt)
            if attempt.future is not None and attempt.error is None:
                try:
                    attempt.result = attempt.future.result()
                except Exception as error:
                    attempt.error = error
            if isinstance(attempt.task, AsyncTask) and isinstance(attempt.error, Exception):
                attempt.task.note(attempt.error)
            attempt.future = None
        # Errors first: after one, the other results are of no use.
        for attempt in sorted(done, key=lambda each: each.error is None):
            if attempt.error is None:
                self._finish_one(attempt)
            else:
                self._try_later(attempt)

    def _try_later(self, attempt: _Attempt) -> None:
        retry, error = self._retry, attempt.error
        assert error is not None
        attempt.error = None
        if retry is not None and isinstance(error, retry.errors):
            if attempt.count < retry.attempts:
                due = time.monotonic() + retry.seconds_after(attempt.count)
                self._later.append((due, attempt))
                return
            error.add_note(f"gda: after attempt {attempt.count} of {retry.attempts}")
        try:
            raise error
        finally:
            # The traceback has this frame, which would keep the error and all blocks until a
            # garbage collection.
            del error, attempt

    def _finish_one(self, attempt: _Attempt) -> None:
        task, result = attempt.task, attempt.result
        attempt.result = None
        following = task.finish(result)
        self._begun[type(task)] -= 1
        self._held_by_library -= _library_bytes(task)
        if isinstance(following, Transfer) and self._max_bytes is not None:
            self._transfers.append((task.nbytes, following))
        else:
            self._held_bytes -= task.nbytes

    def _serve(self) -> None:
        while (attempt := self._waiting.get()) is not None and not self._is_over:
            attempt.work()
            self._done.put(attempt)
            del attempt


def _library_bytes(task: Task | AsyncTask) -> int:
    return task.library_bytes if isinstance(task, AsyncTask) else 0
