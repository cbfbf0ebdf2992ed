"""Many pieces of work at a time, within a budget of bytes: the loop under every load and save.

Work runs in threads of its own, what it gave is finished in the caller's thread. Nothing here knows
of JAX or of files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple


class Task(NamedTuple):
    """One piece of work.

    Attributes:
      nbytes: host memory that it holds from its beginning until it is finished.
      work: called in one of the threads.
      finish: called with what ``work`` returned, in the caller's thread, in any order of tasks.
    """

    nbytes: int
    work: Callable[[], Any]
    finish: Callable[[Any], object] = lambda _: None


def run(tasks: Iterable[Task], *, max_workers: int = 1, max_bytes: int | None = None) -> None:
    """Do all ``tasks``; return when the last is finished.

    Tasks are taken and begun in order, at most ``max_workers`` at a time, and none while those that
    were begun and are not finished hold so much that it would exceed ``max_bytes``; one that is
    larger than that runs alone. With one worker everything happens in the caller's thread.

    Raises:
      Exception: the first that a task raised, in ``work`` or ``finish``. No task is begun after it,
        and those that run are waited for: no thread is left. So with ``KeyboardInterrupt``.
    """
    if max_workers == 1:
        for task in tasks:
            task.finish(task.work())
        return
    _Crew(iter(tasks), max_workers, max_bytes).run()


class _Crew:
    def __init__(self, tasks: Iterator[Task], max_workers: int, max_bytes: int | None) -> None:
        self._tasks = tasks
        self._max_workers = max_workers
        self._max_bytes = max_bytes
        # Guards all below; told when work is there to be begun, or done.
        self._changed = threading.Condition()
        self._waiting: list[Task] = []
        self._done: list[tuple[Task, Any]] = []
        self._failure: BaseException | None = None
        self._is_over = False
        self._threads: list[threading.Thread] = []

    def run(self) -> None:
        try:
            self._direct()
        finally:
            with self._changed:
                self._is_over = True
                self._waiting.clear()
                self._changed.notify_all()
            for thread in self._threads:
                thread.join()

    def _direct(self) -> None:
        """Hand out tasks as the budget allows, and finish what was done."""
        held, begun = 0, 0
        following = next(self._tasks, None)
        while following is not None or begun:
            while following is not None and begun < self._max_workers:
                fits = self._max_bytes is None or held + following.nbytes <= self._max_bytes
                if begun and not fits:
                    break
                held, begun = held + following.nbytes, begun + 1
                self._begin(following, begun)
                following = next(self._tasks, None)
            for task, result in self._take_done():
                task.finish(result)
                held, begun = held - task.nbytes, begun - 1

    def _begin(self, task: Task, begun: int) -> None:
        with self._changed:
            self._waiting.append(task)
            self._changed.notify_all()
        if begun > len(self._threads):
            name = f"{threading.current_thread().name}-reader-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name)
            self._threads.append(thread)
            thread.start()

    def _take_done(self) -> list[tuple[Task, Any]]:
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._failure)
            if self._failure is not None:
                raise self._failure
            done, self._done = self._done, []
            return done

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_over)
                if self._is_over:
                    return
                task = self._waiting.pop(0)
            try:
                result = task.work()
            except BaseException as error:  # for the caller's thread, whatever it is
                with self._changed:
                    self._failure = self._failure or error
                    self._changed.notify_all()
                return
            with self._changed:
                self._done.append((task, result))
                self._changed.notify_all()
            del task, result
