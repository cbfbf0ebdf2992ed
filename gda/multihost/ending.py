"""Ending in time: a signal in one process becomes the same answer in all, at the same call.

JAX's own ``reached_preemption_sync_point`` is True for one step number, which a loop may pass over,
and notices SIGTERM alone, until another library replaces its handler. It only serves a SIGTERM
that came before gda had its handler, with a count of calls in place of steps.

A process that got a signal announces it. Then a thread of each process holds further calls back,
and tells how many have begun. When all have told, the answer is True at the call after the highest
number, which no process has begun. Only these threads wait for each other, never the computation.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property
from types import FrameType
from typing import Any, NamedTuple

import jax
from jax.experimental.multihost_utils import reached_preemption_sync_point

from gda.layout.text import format_processes, signal_name
from gda.multihost.background import in_thread
from gda.multihost.coordination import Service, service
from gda.multihost.meeting import LateProcessError

_FOLDER = "gda/multihost/ending"
_LATE_SECONDS = 300.0  # a process may make its first call minutes after the others
_MORE_SECONDS = 30.0
_LOOK_SECONDS = 60.0  # after which the thread of a closed object ends
_ACTION_BYTES = 256  # more than a ``struct sigaction`` has

_log = logging.getLogger("gda")
_libc = ctypes.CDLL(None)
_made = itertools.count()
_EARLY = "JAX's word of a SIGTERM that came before gda heard signals"
_Came = deque[tuple[int | None, float]]  # signals, or None for a wish to save, and their times
_calls = itertools.count(1)  # of ``check``, of all objects: JAX has one count for a program


class _Notice(NamedTuple):
    """A signal that a process got; without a name, its wish to save."""

    process: int
    name: str
    ends: bool
    came: float  # by the monotonic clock of the process that has the notice


class Ending:
    """The end of a program, which a signal announces to one of its processes or to several.

    All processes make it in the same order, in the main thread, and call ``check`` equally often. A
    handler that the program had before is called too, but not that of JAX's preemption service.

    Args:
      signals: the signals that end the program.
      save_on: the signals after which all processes save once, and go on.

    Attributes:
      is_ending: True from the call of ``check`` on that found an end.
      since: the time of the first signal that ends the program, by this process's monotonic clock.
      reason: processes and signals of the last True, such as ``"process 1 got SIGTERM"``.

    >>> import os, signal
    >>> ending = Ending()
    >>> ending.check()
    False
    >>> os.kill(os.getpid(), signal.SIGTERM)
    >>> ending.check(), ending.is_ending, ending.reason
    (True, True, 'process 0 got SIGTERM')
    >>> ending.close()
    """

    def __init__(
        self, signals: Sequence[int] = (signal.SIGTERM,), save_on: Sequence[int] = ()
    ) -> None:
        self.is_ending = False
        self.since = math.inf
        self.reason = ""
        self._signals = frozenset(signals)
        self._came: _Came = deque()  # the handlers add to it
        self._folder = f"{_FOLDER}/{next(_made)}"
        self._handled: list[int] = []
        numbers = [*dict.fromkeys([*signals, *save_on])]
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                if number not in _handlers:
                    _handlers[number] = _Handler(number)
                _handlers[number].queues.append(self._came)
            self._handled = numbers
        else:
            _log.warning(
                "this process does not hear %s: Python handles signals in the main thread alone. "
                "Make the object that waits for them, such as gda.checkpoint.Run, there",
                ", ".join(map(signal_name, numbers)),
            )

    def check(self) -> bool:
        """Return True if all processes should save at this call: to end, or by request.

        All processes must call it equally often; the answer is the same in all at the same call,
        and after an end always True. It communicates only after a signal.

        Raises:
          LateProcessError: a signal came, and a process made no call for 300 s.
          ConnectionError: process 0, which runs the service of JAX, has ended.
        """
        if self.is_ending:
            return True
        for number in self._handled:
            _handlers[number].keep()
        notices = self._take(0) if self._listener is None else self._listener.call(self._came)
        if signal.SIGTERM in self._signals and _is_heard_by_jax():
            notices.append(_Notice(0, _EARLY, True, time.monotonic()))
        if not notices:
            return False
        self.since = min((each.came for each in notices if each.ends), default=math.inf)
        self.is_ending = any(notice.ends for notice in notices)
        self.reason = _text(notices)
        is_told = self._listener is None or jax.process_index() in {0, *(e[0] for e in notices)}
        if self.reason and is_told:
            _log.warning("%s: all save and %s", self.reason, "end" if self.is_ending else "go on")
        return True

    def ask(self) -> None:
        """Let ``check`` be True once in all processes; for any thread of any of them."""
        self._came.append((None, time.monotonic()))

    def close(self) -> None:
        """Restore the former handlers; in another thread, at the next signal. Works twice."""
        while self._handled:
            _handlers[self._handled.pop()].leave(self._came)
        if (listener := self.__dict__.get("_listener")) is not None:
            listener.is_closed = True

    @cached_property
    def _listener(self) -> _Listener | None:
        """The thread that agrees with other processes. It starts at the first call in each."""
        found = service()
        if found is None or jax.process_count() == 1:
            return None
        return _Listener(found, self._folder, self._take)

    def _take(self, process: int) -> list[_Notice]:
        """Return the signals that came to this process, once."""
        notices = []
        while self._came:
            number, came = self._came.popleft()
            name = "" if number is None else signal_name(number)
            notices.append(_Notice(process, name, number in self._signals, came))
        return notices


class _Listener:
    """The calls of this process, and the thread that agrees with those of the others."""

    def __init__(self, service: Service, folder: str, take: Callable[[int], list[_Notice]]) -> None:
        self._service, self._folder, self._take = service, folder, take
        self._me, self._processes = jax.process_index(), jax.process_count()
        self._calls = 0
        self._round, self._announced = 0, -1
        self._due: dict[int, list[_Notice]] = {}  # by the number of the call
        self._may_call = threading.Lock()
        self.is_closed = False  # True lets the thread end
        self._thread: Future[None] = in_thread("gda-ending", self._listen)

    def call(self, came: Collection[Any]) -> list[_Notice]:
        """Count a call, and return the notices that are due at it."""
        if came and self._announced != self._round:
            self._announced = self._round
            with suppress(KeyError):  # another process has announced a signal
                self._put(self._round, "by", self._me, overwrite=False)
        with self._may_call:
            self._calls += 1
            due = self._due.pop(self._calls, [])
        if self._thread.done():
            self._thread.result()  # raises if it failed
        return due

    def _listen(self) -> None:
        while True:
            try:
                by = self._get("by", _LOOK_SECONDS)
            except TimeoutError as error:
                if "DEADLINE" not in str(error):
                    return  # JAX has stopped its service
                if not self.is_closed:
                    continue
                # There are no more calls, so the others need not wait for any.
                self._put(self._round, f"calls/{self._me}", [self._calls, []])
                return
            with self._may_call:
                if self._agree(by):
                    return
                self._round += 1

    def _agree(self, by: int) -> bool:
        """Exchange calls and signals, and return True if the program ends."""
        if by == self._me:
            self._put(self._round, "all", self._gather())
            # All have answered, so none still reads the former round.
            self._service.delete(f"{self._folder}/{self._round - 1}/")
        else:
            own = [self._calls, _sent(self._take(self._me))]
            self._put(self._round, f"calls/{self._me}", own)
        try:
            calls, notices, late = self._get("all", _LATE_SECONDS + _MORE_SECONDS)
        except TimeoutError:
            calls, notices, late = 0, [], [by]
        if late:
            who = format_processes(late)
            raise LateProcessError(
                f"process {by} got a signal, and {who} did not call check() within "
                f"{_LATE_SECONDS:g} s, so the processes found no common call at which to save. "
                f"Look for the reason in the output of {who}",
                late,
            )
        notices = _received(notices)
        self._due.setdefault(calls + 1, []).extend(notices)
        return any(notice.ends for notice in notices)

    def _gather(self) -> tuple[int, list[Any], list[int]]:
        """Return the highest number of calls, all signals, and the processes without an answer."""
        most, late = self._calls, []
        told = {self._me: self._take(self._me)}
        limit = time.monotonic() + _LATE_SECONDS
        for process in (each for each in range(self._processes) if each != self._me):
            try:
                calls, notices = self._get(f"calls/{process}", max(0, limit - time.monotonic()))
            except TimeoutError:
                late.append(process)
            else:
                most, told[process] = max(most, calls), _received(notices)
        return most, [each for _, notices in sorted(told.items()) for each in _sent(notices)], late

    def _put(self, number: int, name: str, value: Any, *, overwrite: bool = True) -> None:
        key = f"{self._folder}/{number}/{name}"
        self._service.put(key, json.dumps(value).encode(), overwrite=overwrite)

    def _get(self, name: str, timeout: float) -> Any:
        return json.loads(self._service.get(f"{self._folder}/{self._round}/{name}", timeout))


def _sent(notices: Sequence[_Notice]) -> list[Any]:
    """Return notices as JSON, with the seconds since they came in place of the time."""
    now = time.monotonic()
    return [[*each[:3], now - each.came] for each in notices]


def _received(notices: Sequence[Any]) -> list[_Notice]:
    """Return the notices that another process has just sent."""
    now = time.monotonic()
    return [_Notice(*each, came=now - seconds) for *each, seconds in notices]


class _Handler:
    """The handler of a signal: it adds its number to queues, and calls the former handler."""

    def __init__(self, number: int) -> None:
        self.queues: list[_Came] = []
        self._number, self._pid = number, os.getpid()
        self._is_within = self._was_replaced = False
        self._handle = self._called  # one object, to be recognized
        self._first_action, self._action = _Action(number), _Action(number)
        self._first = self._former = signal.signal(number, self._handle)
        self._address = self._action.read()  # of the code in C that calls any handler in Python
        # JAX has a handler of SIGTERM, in C, from the start of its service on.
        is_python = self._first_action.address == self._address
        is_of_jax = number == signal.SIGTERM and getattr(
            jax.config, "jax_enable_preemption_service", True
        )
        if is_python and is_of_jax and service() is not None:
            _log.warning(
                "%s has replaced JAX's handler of %s. A signal that came before this call may be "
                "lost; from now on gda hears it, and calls that handler too",
                _place(self._first),
                signal_name(number),
            )

    def keep(self) -> None:
        """Take the signal again if other code has taken it; warn once."""
        found, address = signal.getsignal(self._number), self._action.read()
        if found is self._handle and address == self._address:
            return
        if not self._was_replaced:
            self._was_replaced = True
            is_python = address == self._address
            _log.warning(
                "%s has replaced gda's handler of %s. A signal that came before this call may be "
                "lost; from now on gda hears it again%s",
                _place(found) if is_python else getattr(found, "name", "code in C"),
                signal_name(self._number),
                ", and calls that handler too" if is_python else "",
            )
        signal.signal(self._number, self._handle)
        if found is not self._handle:
            self._former = found

    def leave(self, queue: _Came) -> None:
        """Forget a queue; without any, restore the former handler unless ours was replaced."""
        self.queues = [each for each in self.queues if each is not queue]
        if not self.queues and threading.current_thread() is threading.main_thread():
            self._restore()

    def _restore(self) -> None:
        del _handlers[self._number]
        if signal.getsignal(self._number) is self._handle:
            signal.signal(self._number, self._former or signal.SIG_DFL)
            if self._former is self._first:
                self._first_action.write()  # perhaps a handler in C, such as JAX's

    def _called(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked worker, which multiprocessing ends by SIGTERM.
            signal.signal(number, self._first or signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if not self.queues:  # closed in another thread
            self._restore()
            os.kill(os.getpid(), number)
            return
        for queue in self.queues:
            queue.append((number, time.monotonic()))
        former = self._former
        # Unless it calls this one in turn, or is Python's own, which raises KeyboardInterrupt.
        if callable(former) and former is not signal.default_int_handler and not self._is_within:
            self._is_within = True
            try:
                former(number, frame)
            finally:
                self._is_within = False


_handlers: dict[int, _Handler] = {}


_jax_heard = False


def _is_heard_by_jax() -> bool:
    """Return True from the call at which JAX tells all processes that one got SIGTERM."""
    global _jax_heard
    with suppress(RuntimeError):  # its service is off
        _jax_heard = _jax_heard or reached_preemption_sync_point(next(_calls))
    return _jax_heard


class _Action:
    """The system's record of a handler, ``struct sigaction``: Python's own omits those in C."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._record = ctypes.create_string_buffer(_ACTION_BYTES)
        self._address = ctypes.c_void_p.from_buffer(self._record)  # the first field
        self.read()

    @property
    def address(self) -> int | None:
        return self._address.value

    def read(self) -> int | None:
        """Return the address of the handler that is there now."""
        _libc.sigaction(self._number, None, self._record)
        return self.address

    def write(self) -> None:
        """Install the handler that was there when the record was read."""
        _libc.sigaction(self._number, self._record, None)


def _place(handler: Any) -> str:
    return f"{getattr(handler, '__module__', '')}.{getattr(handler, '__qualname__', handler)}"


def _text(notices: Sequence[_Notice]) -> str:
    """Return the processes and their signals, such as ``processes 0, 2 got SIGTERM``."""
    processes: dict[str, set[int]] = {}
    for notice in notices:
        processes.setdefault(notice.name, set()).add(notice.process)
    return "; ".join(
        f"{format_processes(sorted(group))} got {name}" for name, group in processes.items() if name
    )
