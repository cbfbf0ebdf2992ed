"""Ending in time: a signal in one process becomes the same answer in all, at the same call.

JAX's own ``reached_preemption_sync_point`` is not used. It is True once, for one step number, which
a loop may pass over; it raises if its service is off; it hears SIGTERM alone, and not if another
library has replaced its handler. The way below serves in all of these cases, so it is the only one.

Its protocol is that of JAX's service, with calls of ``check`` in place of step numbers. A process
that got a signal announces it. Then a thread of each process holds further calls back, and tells
how many have begun. When all have told, the answer is True at the call after the highest number,
which no process has begun. Only threads wait for each other, so a process that computes, or waits
in a collective, keeps none waiting.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
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

from gda.layout.text import format_processes, signal_name
from gda.multihost.background import in_thread
from gda.multihost.coordination import Service, service
from gda.multihost.meeting import LateProcessError

_FOLDER = "gda/multihost/ending"
_LATE_SECONDS = 300.0  # a process may make its first call minutes after the others
_MORE_SECONDS = 30.0
_LONG_SECONDS = 1e6
_ACTION_BYTES = 256  # more than a ``struct sigaction`` has

_log = logging.getLogger("gda")
_libc = ctypes.CDLL(None)
_made = itertools.count()


class _Notice(NamedTuple):
    """A signal that a process got."""

    process: int
    name: str
    ends: bool


class Ending:
    """The end of a program, which a signal announces to one of its processes or to several.

    All processes make it in the same order, and call ``check`` equally often. Make it in the main
    thread: Python handles signals there alone, and elsewhere a warning says that this process hears
    none. A handler that the program had before is called too. While it is open, JAX's preemption
    service does not hear these signals.

    Args:
      signals: the signals that end the program.
      save_on: the signals after which all processes save once, and go on.

    Attributes:
      is_ending: True from the call of ``check`` on that found an end.
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
        self.reason = ""
        self._signals = frozenset(signals)
        self._came: deque[int] = deque()  # the handlers add to it
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
        """Return True if all processes should save at this call: they end, or are asked to save.

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
        if not notices:
            return False
        self.is_ending = any(notice.ends for notice in notices)
        self.reason = _text(notices)
        if self._listener is None or jax.process_index() in {0, *(each[0] for each in notices)}:
            _log.warning("%s: all save and %s", self.reason, "end" if self.is_ending else "go on")
        return True

    def close(self) -> None:
        """Restore the former handlers, in the main thread. May be called twice."""
        while self._handled:
            _handlers[self._handled.pop()].leave(self._came)

    @cached_property
    def _listener(self) -> _Listener | None:
        """The thread that agrees with other processes. It starts at the first call in each."""
        found = service()
        if found is None or jax.process_count() == 1:
            return None
        return _Listener(found, self._folder, self._take)

    def _take(self, process: int) -> list[_Notice]:
        """Return the signals that came to this process, once."""
        numbers = []
        while self._came:
            numbers.append(self._came.popleft())
        return [_Notice(process, signal_name(each), each in self._signals) for each in numbers]


class _Listener:
    """The calls of this process, and the thread that agrees with those of the others.

    The thread waits for an announcement, at no cost, until an end or until JAX stops its service.
    """

    def __init__(self, service: Service, folder: str, take: Callable[[int], list[_Notice]]) -> None:
        self._service, self._folder, self._take = service, folder, take
        self._me, self._processes = jax.process_index(), jax.process_count()
        self._calls = 0
        self._round, self._announced = 0, -1
        self._due: dict[int, list[_Notice]] = {}  # by the number of the call
        self._may_call = threading.Lock()
        self._thread: Future[None] = in_thread("gda-ending", self._listen)

    def call(self, came: Collection[int]) -> list[_Notice]:
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
                by = self._get("by", _LONG_SECONDS)
            except TimeoutError as error:
                if "DEADLINE" in str(error):
                    continue
                return  # JAX has stopped its service
            with self._may_call:
                if self._agree(by):
                    return
                self._round += 1

    def _agree(self, by: int) -> bool:
        """Tell all calls and signals, and return True if the program ends."""
        self._put(self._round, f"calls/{self._me}", [self._calls, self._take(self._me)])
        if by == self._me:
            self._put(self._round, "all", self._gather())
            # All have told, so none reads those of the round before.
            self._service.delete(f"{self._folder}/{self._round - 1}/")
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
        notices = [_Notice(*each) for each in notices]
        self._due.setdefault(calls + 1, []).extend(notices)
        return any(notice.ends for notice in notices)

    def _gather(self) -> tuple[int, list[_Notice], list[int]]:
        """Return the highest number of calls, all signals, and the processes that did not tell."""
        most, notices, late = 0, [], []
        limit = time.monotonic() + _LATE_SECONDS
        for process in range(self._processes):
            try:
                calls, came = self._get(f"calls/{process}", max(0, limit - time.monotonic()))
            except TimeoutError:
                late.append(process)
            else:
                most, notices = max(most, calls), [*notices, *came]
        return most, notices, late

    def _put(self, number: int, name: str, value: Any, *, overwrite: bool = True) -> None:
        key = f"{self._folder}/{number}/{name}"
        self._service.put(key, json.dumps(value).encode(), overwrite=overwrite)

    def _get(self, name: str, timeout: float) -> Any:
        return json.loads(self._service.get(f"{self._folder}/{self._round}/{name}", timeout))


class _Handler:
    """The handler of a signal: it adds its number to queues, and calls the former handler."""

    def __init__(self, number: int) -> None:
        self.queues: list[deque[int]] = []
        self._number, self._pid = number, os.getpid()
        self._is_within = self._was_replaced = False
        self._handle = self._called  # one object, to be recognized
        self._first_action, self._action = _Action(number), _Action(number)
        self._first = self._former = signal.signal(number, self._handle)
        self._address = self._action.read()  # of the code in C that calls any handler in Python

    def keep(self) -> None:
        """Take the signal again if other code has taken it; warn once."""
        found, address = signal.getsignal(self._number), self._action.read()
        if found is self._handle and address == self._address:
            return
        if not self._was_replaced:
            self._was_replaced = True
            _log.warning(
                "%s has replaced gda's handler of %s. A signal that came before this call may be "
                "lost; from now on gda hears it again%s",
                _place(found) if address == self._address else _file_of(address),
                signal_name(self._number),
                ", and calls that handler too" if address == self._address else "",
            )
        signal.signal(self._number, self._handle)
        if found is not self._handle:
            self._former = found

    def leave(self, queue: deque[int]) -> None:
        """Forget a queue; without any, restore the former handler unless ours was replaced."""
        self.queues = [each for each in self.queues if each is not queue]
        if self.queues:
            return
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
        for queue in self.queues:
            queue.append(number)
        former = self._former
        # Not if it calls this one in turn, nor Python's own, which raises KeyboardInterrupt.
        if callable(former) and former is not signal.default_int_handler and not self._is_within:
            self._is_within = True
            try:
                former(number, frame)
            finally:
                self._is_within = False


_handlers: dict[int, _Handler] = {}


class _Action:
    """The system's record of the handler of a signal, a ``struct sigaction``.

    ``signal.getsignal`` does not see a handler in C, and names one that is no longer there.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._record = ctypes.create_string_buffer(_ACTION_BYTES)
        self._address = ctypes.c_void_p.from_buffer(self._record)  # the first field
        self.read()

    def read(self) -> int | None:
        """Return the address of the handler that is there now."""
        _libc.sigaction(self._number, None, self._record)
        return self._address.value

    def write(self) -> None:
        """Install the handler that was there when the record was read."""
        _libc.sigaction(self._number, self._record, None)


class _Symbol(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _file_of(address: int | None) -> str:
    """Return the library that has an address, or the default that it stands for."""
    if address in (None, 1):
        return "the system's default" if address is None else "code that ignores the signal"
    symbol = _Symbol()
    found = _libc.dladdr(ctypes.c_void_p(address), ctypes.byref(symbol))
    return os.path.basename(symbol.file).decode() if found and symbol.file else "code in C"


def _place(handler: Any) -> str:
    return f"{getattr(handler, '__module__', '')}.{getattr(handler, '__qualname__', handler)}"


def _text(notices: Sequence[_Notice]) -> str:
    """Return the processes and their signals.

    >>> _text([_Notice(0, "SIGTERM", True), _Notice(2, "SIGTERM", True)])
    'processes 0, 2 got SIGTERM'
    """
    processes: dict[str, set[int]] = {}
    for notice in notices:
        processes.setdefault(notice.name, set()).add(notice.process)
    return "; ".join(
        f"{format_processes(sorted(group))} got {name}" for name, group in processes.items()
    )
