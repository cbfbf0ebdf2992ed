"""A meeting of processes: each brings a payload, one decides, and all get the same decision.

A meeting never hangs: every process raises an error with the numbers of late processes. It costs
each process three small messages; only its first process reads all payloads. While it waits, a
process looks at the places of others: one that has ended, or that waits elsewhere for this one,
will not come. A process that fails before it comes refuses the meeting, and goes on.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import jax

from gda.layout.boundary import set_module
from gda.layout.text import MOST_NAMED, format_processes
from gda.multihost import coordination
from gda.multihost.background import (
    SECONDS_FOR_ANSWERS,
    in_thread,
    is_done,
    wait_for_answers,
)
from gda.multihost.places import (
    Place,
    call_at,
    ended,
    made_alone,
    of_thread,
    places,
    post,
    post_end,
    text_of_end,
)

T = TypeVar("T")
Decide = Callable[[dict[int, bytes]], bytes]

END_OF = "end of "
_SECONDS_AT_EXIT = 5.0
_BETWEEN_LINES = 60.0  # seconds, about processes that are awaited
_PATIENCE = 20.0  # seconds, with a process that has made this call without communication

_FOLDER = "gda/multihost/meeting"
# Every thread numbers its meetings with each set of processes, equal in all processes. Threads have
# the same names in processes that run the same program.
_held: Counter[tuple[str, tuple[int, ...]]] = Counter()
# The number of meetings whose keys are removed, in the process that decides them.
_removed: Counter[tuple[str, tuple[int, ...]]] = Counter()


@set_module("gda")
class DisagreementError(ValueError):
    """The processes have different arrays, or are at different places in the program.

    Every process raises it, with the same message.

    >>> import gda
    >>> try:
    ...     gda.check_processes_agree({'w': 1.0}, name='params')
    ... except gda.DisagreementError as error:
    ...     print(error)  # such as: at w, process 1: shape (16,), process 0: (8,)
    """


@set_module("gda")
class LateProcessError(TimeoutError):
    """Some processes did not come to the place where others wait; ``processes`` has their numbers.

    >>> import gda
    >>> try:
    ...     gda.check_processes_agree({'w': 1.0}, name='params', timeout=60)
    ... except gda.LateProcessError as error:
    ...     print('waited for', error.processes)
    """

    def __init__(self, message: str, processes: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.processes = tuple(processes)


def meet(
    payload: bytes,
    decide: Decide,
    *,
    kind: str,
    what: str,
    timeout: float,
    deciding: float = 0,
    processes: tuple[int, ...] | None = None,
) -> bytes:
    """Bring ``payload``, and return the decision of ``decide`` on the payloads of all processes.

    Communicates: all of ``processes``, which ascend and are all by default, must call it, in the
    same order of meetings. Threads meet threads of the same name.

    Args:
      decide: called in one process, in the calling thread, with the payloads by process; must not
        raise.
      kind: the sort of payload; ``decide`` gets payloads of one kind only.
      what: the place of this process, for errors of the others, such as ``check 'x' (a.py:3)``.
      timeout: seconds to wait for the others.
      deciding: seconds to wait longer for the decision, when all have come.

    Raises:
      DisagreementError: some processes brought another kind, because they are at another place,
        or wait for this one at a meeting of other processes.
      LateProcessError: a process did not come in time, or has ended. All others raise it, and so
        does the late process if it comes later, for the same call.
      ConnectionError: process 0, which runs the service, has ended.
    """
    if processes is None:
        processes = tuple(range(jax.process_count()))
    if processes == (jax.process_index(),):
        return decide({processes[0]: payload})
    passed: _PassedError | None = None
    while True:
        meeting = _next_meeting(processes, what, timeout, deciding)
        header = json.dumps([meeting.number, kind, what]).encode()
        try:
            decision = meeting.hold(header + b"\n" + payload, decide)
            if decision.startswith(b"-"):
                message, calls = json.loads(decision[1:])
                raise with_calls(DisagreementError(f"{what}: {message}"), calls)
            return decision[1:]
        except _PassedError as error:
            passed = error
        except Exception as error:
            if passed is not None:
                error.add_note(f"gda: before that, {passed}")
            raise


ErrorT = TypeVar("ErrorT", bound=Exception)


def with_calls(error: ErrorT, calls: Iterable[str]) -> ErrorT:
    """Return an error with the calls that it ends in all processes."""
    error.__dict__["ended"] = {*map(_call_of, calls)}, time.monotonic()
    return error


def has_ended(call: str, error: BaseException | None, since: float) -> bool:
    """Return True if an error has ended a call, begun at ``since``, in the other processes too.

    An error that was raised while such an error was handled counts too.
    """
    while error is not None:
        calls, at = error.__dict__.get("ended", ((), 0))
        if _call_of(call) in calls and at > since:
            return True
        error = error.__cause__ or error.__context__
    return False


def refuse(reason: str, *, what: str, processes: tuple[int, ...]) -> None:
    """Make the next meeting of ``processes`` fail, without waiting for them.

    The others raise the reason when they come; processes at another call skip this meeting.
    """
    if processes[1:] and jax.process_index() in processes:
        meeting = _next_meeting(processes, what, timeout=0)
        wait_for_answers(lambda: meeting.refuse(reason))


def forget() -> None:
    """Forget the meetings of this thread; no later thread may have its name."""
    name, service = threading.current_thread().name, coordination.service()
    for thread, processes in [*_held]:
        if thread == name:
            del _held[thread, processes], _removed[thread, processes]
            if service is not None and jax.process_index() == processes[0]:
                with contextlib.suppress(Exception):
                    service.delete(f"{_FOLDER}/{_group_of(thread, processes)}/entry/")


# An entry is a header and a payload. A decision begins with + (decided) or - (refused).


def _decided(entries: dict[int, bytes], decide: Decide) -> bytes:
    """Return the decision of ``decide``, or a refusal if the entries are of different kinds."""
    payloads, places = {}, {}
    for process, entry in sorted(entries.items()):
        header, _, payloads[process] = entry.partition(b"\n")
        _, kind, what = json.loads(header)
        places.setdefault(kind, {}).setdefault(what, []).append(process)
    if len(places) == 1:
        return b"+" + decide(payloads)
    groups = [
        f"{format_processes(group)} at {what}"
        for of_kind in sorted(places.values(), key=lambda kind: sum(map(len, kind.values())))
        for what, group in of_kind.items()
    ]
    message = f"the processes are at different places: {'; '.join(groups)}"
    calls = [what for of_kind in places.values() for what in of_kind]
    return b"-" + json.dumps([message, calls]).encode()


def _next_meeting(
    processes: tuple[int, ...], what: str, timeout: float, deciding: float = 0
) -> _Meeting:
    service = coordination.service()
    if service is None:
        raise RuntimeError(
            f"{what}: JAX has {jax.process_count()} processes, and no coordination service through "
            "which they meet. Call gda.launch.initialize() or jax.distributed.initialize() first"
        )
    thread = threading.current_thread().name
    _held[thread, processes] += 1
    of_thread.meetings += 1
    number = _held[thread, processes]
    return _Meeting(service, thread, processes, number, what, timeout, deciding)


class _PassedError(Exception):
    """A meeting of another call has failed, to which this process did not come."""


@dataclass(frozen=True)
class _Meeting:
    service: coordination.Service
    thread: str
    processes: tuple[int, ...]
    number: int
    what: str
    timeout: float
    deciding: float

    @cached_property
    def _group(self) -> str:
        return _group_of(self.thread, self.processes)

    def _key(self, end: str) -> str:
        return f"{_FOLDER}/{self._group}/{end}"

    def hold(self, entry: bytes, decide: Decide) -> bytes:
        """Return the decision; raise a moment after the timeout, even if process 0 is stopped."""
        limit = time.monotonic() + self.timeout + SECONDS_FOR_ANSWERS
        have_come = threading.Event()

        def answer(future: Future[T]) -> T:
            left = limit - time.monotonic() + self.deciding * have_come.is_set()
            if not wait([future], max(0, left)).done:
                raise LateProcessError(
                    f"{self.what}: process 0 did not answer within {self.timeout:g} s: it is "
                    "stopped, or cannot be reached. Look for the reason on its machine",
                    [0],
                )
            return future.result()

        # Few meetings last until a second thread starts, which looks while the first one waits.
        coming = in_thread("gda-meeting", lambda: self._come(entry, have_come))
        next_line, overtaken_since = time.monotonic() + _BETWEEN_LINES, math.inf
        call = call_at(_call_of(self.what))  # in this thread
        while not is_done(coming):
            is_overtaken = answer(in_thread("gda-look", lambda: self._look(coming, call)))
            overtaken_since = min(overtaken_since, time.monotonic()) if is_overtaken else math.inf
            if time.monotonic() - overtaken_since > _PATIENCE:
                raise answer(in_thread("gda-look", lambda: self._failed(self._overtaken)))
            if time.monotonic() > next_line:
                next_line += _BETWEEN_LINES
                answer(in_thread("gda-look", self._log_late))
        heard = answer(in_thread("gda-meeting", lambda: self._heard(coming)))
        if isinstance(heard, bytes):
            return heard
        # In this thread, or the decision would go on after Ctrl-C here.
        decision = _decided(heard, decide)
        limit = time.monotonic() + self.timeout + SECONDS_FOR_ANSWERS
        answer(in_thread("gda-meeting", lambda: self._tell(decision)))
        return decision

    def _come(self, entry: bytes, have_come: threading.Event) -> bytes:
        """Wait until all have come; return the decision, or b"" in the process that decides."""
        service, number, me = self.service, self.number, jax.process_index()
        post(service, Place(self.what, self._group, number, self.processes))
        service.put(self._key(f"entry/{me}"), entry)
        some = None if len(self.processes) == jax.process_count() else self.processes
        service.barrier(self._key(f"{number}"), self.timeout, some)
        have_come.set()
        if me == self.processes[0]:
            return b""
        return service.get(self._key(f"{number}/decision"), self.timeout + self.deciding)

    def _look(self, coming: Future[bytes], call: str) -> bool:
        """Raise the error of this meeting if it will not take place.

        Return True if a process has passed this ``call`` without communication.
        """
        if failure := self._failure_heard():
            raise failure
        # The first process looks at all and the others at the first, to ask little of the service.
        me, first = jax.process_index(), self.processes[0]
        found = places(self.service, None if me == first else first)
        # A process may end, or go on to another meeting, when this one has taken place.
        if (describe := self._failure_seen(found)) and not is_done(coming) and not self._is_told():
            raise self._failed(describe)
        others = [found[each] for each in self.processes if each in found]
        return any(each.group == call and each.alone > made_alone[call] for each in others)

    def _is_told(self) -> bool:
        """Return True if the decision is there, even if this process is late to get it."""
        folder = self._key(f"{self.number}/")
        return f"{folder}decision" in self.service.list(folder)

    def _log_late(self) -> None:
        """Log the processes that are awaited, in the first one that waits."""
        if jax.process_index() not in self.processes[:2]:  # the payloads may be many
            return
        waiting = {process for group in self._waiting().values() for process in group}
        if waiting and min(waiting) == jax.process_index():
            late = format_processes({*self.processes} - waiting)
            logging.getLogger("gda").warning("%s: still waiting for %s", self.what, late)

    def _heard(self, coming: Future[bytes]) -> bytes | dict[int, bytes]:
        """Return the decision, or in the process that decides the entries of all."""
        try:
            decision = coming.result()
        except (TimeoutError, ValueError):
            raise self._failed(self._late) from None
        if decision:
            return decision
        if failure := self._failure_heard():
            raise failure  # others have come and left, before the last one came
        return self._entries()

    def _tell(self, decision: bytes) -> None:
        self.service.put(self._key(f"{self.number}/decision"), decision)
        # All processes are here, so all have read the decisions and errors before.
        group = self.thread, self.processes
        for number in range(_removed[group], self.number):
            with contextlib.suppress(RuntimeError):
                self.service.delete(self._key(f"{number}/"))
        _removed[group] = self.number

    def _entries(self) -> dict[int, bytes]:
        entries = self.service.list(self._key("entry/"))
        return {int(key.rpartition("/")[2]): entry for key, entry in entries.items()}

    # A meeting that fails.

    def refuse(self, reason: str) -> None:
        """Fail the meeting, for processes that wait there and those that will come."""
        post(self.service, Place(f"{self.what}, which failed: {reason}"))
        message = f"{self.what}: process {jax.process_index()} failed: {reason}"
        if self._claims(self._group, self.number):
            failure = _FailedMeeting(message, is_late=False, calls=[_call_of(self.what)])
            self.service.put(self._key(f"{self.number}/failure"), json.dumps(failure).encode())
        _release(self.service, self._group, self.number)

    def _failed(self, describe: Callable[[], _FailedMeeting]) -> Exception:
        """Return the error that all raise; the first process that gives up writes it."""
        with contextlib.suppress(ConnectionError):
            post(self.service, Place(self.what))  # so that it no longer counts as waiting
        if not self._claims(self._group, self.number):
            with contextlib.suppress(TimeoutError):
                self.service.get(self._key(f"{self.number}/failure"), timeout=10)
            return self._failure_heard() or describe().error
        failure = describe()
        message = json.dumps(failure).encode()
        for processes, number in failure.also:
            group = _group_of(self.thread, tuple(processes))
            if self._claims(group, number):
                self.service.put(f"{_FOLDER}/{group}/{number}/failure", message)
        self.service.put(self._key(f"{self.number}/failure"), message)
        return self._taken_in(failure)

    def _claims(self, group: str, number: int) -> bool:
        """Return True if this process is the first to give up a meeting."""
        try:
            self.service.put(f"{_FOLDER}/{group}/{number}/by", b"", overwrite=False)
        except KeyError:
            return False
        return True

    def _failure_heard(self) -> Exception | None:
        """Return the error that another process has written."""
        folder = self._key(f"{self.number}/")
        failure = self.service.list(folder).get(f"{folder}failure")
        return None if failure is None else self._taken_in(_FailedMeeting(*json.loads(failure)))

    def _taken_in(self, failure: _FailedMeeting) -> Exception:
        """Return the error, and count the meetings that fail with it, which other calls skip."""
        if _call_of(self.what) not in failure.calls:
            raise _PassedError(failure.message)
        for processes, number in failure.also:
            key = self.thread, tuple(processes)
            if jax.process_index() in processes:
                _held[key] = max(_held[key], number)
                _release(self.service, _group_of(*key), number)
        return failure.error

    def _failure_seen(self, found: dict[int, Place]) -> Callable[[], _FailedMeeting] | None:
        """Return a function that describes the failure, if the meeting cannot take place."""
        if ended(self.service, found, self.processes):
            return self._late
        for process in self.processes:
            place = found.get(process)
            if place is not None and self._is_waited_for_at(place):
                return functools.partial(self._elsewhere, process, place)
        return None

    def _is_waited_for_at(self, place: Place) -> bool:
        """Return True if a process waits for this one at another meeting of this thread."""
        return (
            jax.process_index() in place.processes
            and place.group == _group_of(self.thread, place.processes)
            and place.number > _held[self.thread, place.processes]
        )

    def _elsewhere(self, process: int, place: Place) -> _FailedMeeting:
        there, here = format_processes(place.processes), format_processes(self.processes)
        message = (
            f"{self.what}: the processes are at different places: process {process} waits at "
            f"{place.what} for {there}; process {jax.process_index()} waits at {self.what} for "
            f"{here}. Give all processes the same mesh and the same order of calls"
        )
        also = [[list(self.processes), self.number], [list(place.processes), place.number]]
        calls = [*map(_call_of, [place.what, *self._waiting()])]
        return _FailedMeeting(message, is_late=False, calls=calls, also=also)

    def _overtaken(self) -> _FailedMeeting:
        return self._late(_PATIENCE)._replace(also=[[list(self.processes), self.number]])

    def _late(self, seconds: float | None = None) -> _FailedMeeting:
        found = places(self.service)
        gone = ended(self.service, found, self.processes)
        waiting = self._waiting(gone)
        named = [*gone] or sorted(set(self.processes).difference(*waiting.values()))
        lines = [f"{format_processes(group)} waited at {what}" for what, group in waiting.items()]
        for process in named[:MOST_NAMED]:
            place = found.get(process)
            last = f"was last at {place.what}" if place else "has not met others"
            lines.append(f"process {process} {last}")
        who = format_processes(named) if named else "a process"
        did = text_of_end(gone) if gone else f"did not come within {seconds or self.timeout:g} s"
        message = (
            f"{self.what}: {who} {did}. {'; '.join(lines)}. "
            f"Look for the reason in the output of {who}"
        )
        calls = [*map(_call_of, waiting)]
        return _FailedMeeting(message, is_late=True, calls=calls, processes=named)

    def _waiting(self, gone: Collection[int] = ()) -> dict[str, list[int]]:
        """Return the processes that have come, by their places."""
        waiting: dict[str, list[int]] = {}
        for process, entry in self._entries().items():
            number, _, what = json.loads(entry.partition(b"\n")[0])
            if number == self.number and process not in gone:
                waiting.setdefault(what, []).append(process)
        return waiting


class _FailedMeeting(NamedTuple):
    """The error that ends a meeting of some calls, and ``also`` others: processes and number."""

    message: str
    is_late: bool
    calls: Sequence[str]
    processes: Sequence[int] = ()
    also: Sequence[Any] = ()

    @property
    def error(self) -> Exception:
        if self.is_late:
            return with_calls(LateProcessError(self.message, self.processes), self.calls)
        return with_calls(DisagreementError(self.message), self.calls)


def _release(service: coordination.Service, group: str, number: int) -> None:
    """End the barrier of a meeting, for processes that wait there or come later.

    It fails because this process waits there for itself alone. JAX ends a program whose threads
    wait in its service.
    """
    with contextlib.suppress(Exception):
        service.barrier(f"{_FOLDER}/{group}/{number}", 0.001, [jax.process_index()])


def refuse_all(service: coordination.Service) -> None:
    """Tell the others that this process ends; process 0 waits a moment for them to notice."""

    def post_and_release() -> None:
        post_end(service)
        # The others may wait for the first meeting of this process too.
        _held[threading.main_thread().name, tuple(range(jax.process_count()))] += 0
        for (thread, processes), number in [*_held.items()]:  # threads of saves may go on
            _release(service, _group_of(thread, processes), number + 1)

    with contextlib.suppress(Exception):
        wait_for_answers(post_and_release)
        if jax.process_index() == 0:
            limit, others = time.monotonic() + _SECONDS_AT_EXIT, range(1, jax.process_count())
            found = places(service)
            while len(ended(service, found, others)) < len(others) and time.monotonic() < limit:
                time.sleep(0.05)


def _call_of(what: str) -> str:
    """Return the call of a place, without the line of the program, which may differ."""
    return (what.rpartition(" (")[0] or what).removeprefix(END_OF)


def _group_of(thread: str, processes: tuple[int, ...]) -> str:
    return coordination.short_name((thread, processes))
