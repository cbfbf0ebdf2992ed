"""A meeting of processes: each brings a payload, one judges, and all hear the same verdict.

Through JAX's coordination service a meeting never hangs: every process raises an error with the
numbers of late processes. A meeting costs each process three small messages, for any number of
processes; only its first process reads all payloads. Without the service, a collective with a
watchdog takes its place.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

import jax
import numpy as np

from gda.layout.boundary import set_module
from gda.layout.text import format_processes
from gda.multihost import coordination
from gda.multihost.allgather import all_gather

Judge = Callable[[dict[int, bytes]], bytes]

_FOLDER = "gda/multihost/meeting"
# Every thread numbers its meetings with each set of processes, equal in all processes. Threads have
# the same names in processes that run the same program.
_held: Counter[tuple[str, tuple[int, ...]]] = Counter()


@set_module("gda")
class DisagreementError(ValueError):
    """The processes have different arrays, or are at different places in the program.

    Every process raises it, with the same message.

    >>> import gda
    >>> def may_go_on(params):
    ...     try:
    ...         gda.check_processes_agree(params, name='params')
    ...     except gda.DisagreementError as error:
    ...         print(error)  # such as: at ['w'], process 1: shape (16,), process 0: (8,)
    ...         return False
    ...     return True
    >>> may_go_on({'w': 1.0})
    True
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
    judge: Judge,
    *,
    kind: str,
    what: str,
    timeout: float,
    processes: tuple[int, ...] | None = None,
) -> bytes:
    """Bring ``payload``, and return the verdict of ``judge`` on the payloads of all processes.

    Communicates: all of ``processes`` must call it, in the same order of meetings. Threads meet
    threads of the same name.

    Args:
      payload: of any length.
      judge: called in one process with the payloads by process; must not raise.
      kind: the sort of payload; ``judge`` gets payloads of one kind only.
      what: the place of this process, for errors of the others, such as ``check 'x' (a.py:3)``.
      timeout: seconds to wait for the others.
      processes: ascending; by default all.

    Raises:
      DisagreementError: some processes brought another kind, because they are at another place.
      LateProcessError: a process did not come in time. All others raise it, and so does the late
        process if it comes later.
      ConnectionError: process 0, which runs the service, has ended.
    """
    if processes is None:
        processes = tuple(range(jax.process_count()))
    if processes == (jax.process_index(),):
        return judge({processes[0]: payload})
    service = coordination.service()
    if service is None:
        entries = _by_collective(_entry(0, kind, what, payload), processes, what, timeout)
        return _open(_judged(entries, judge), what)
    thread = threading.current_thread().name
    _held[thread, processes] += 1
    number = _held[thread, processes]
    meeting = _Meeting(service, thread, processes, number, what, timeout)
    return _open(meeting.hold(_entry(number, kind, what, payload), judge), what)


# An entry is a header and a payload. A verdict begins with + (judged) or - (refused).


def _entry(number: int, kind: str, what: str, payload: bytes) -> bytes:
    return json.dumps([number, kind, what]).encode() + b"\n" + payload


def _judged(entries: dict[int, bytes], judge: Judge) -> bytes:
    """Return the verdict of ``judge``, or a refusal if the entries are of different kinds."""
    payloads, places = {}, {}
    for process, entry in sorted(entries.items()):
        header, _, payloads[process] = entry.partition(b"\n")
        _, kind, what = json.loads(header)
        places.setdefault(kind, {}).setdefault(what, []).append(process)
    if len(places) == 1:
        return b"+" + judge(payloads)
    said = [
        f"{format_processes(group)} at {what}"
        for of_kind in sorted(places.values(), key=lambda kind: sum(map(len, kind.values())))
        for what, group in of_kind.items()
    ]
    return f"-the processes are at different places: {'; '.join(said)}".encode()


def _open(verdict: bytes, what: str) -> bytes:
    if verdict.startswith(b"-"):
        raise DisagreementError(f"{what}: {verdict[1:].decode()}")
    return verdict[1:]


@dataclass(frozen=True)
class _Meeting:
    service: coordination.Service
    thread: str
    processes: tuple[int, ...]
    number: int
    what: str
    timeout: float

    @cached_property
    def _folder(self) -> str:
        # Not the list itself, which may be long; not its hash(), which may differ.
        group = sha256(repr((self.thread, self.processes)).encode()).hexdigest()[:16]
        return f"{_FOLDER}/{group}"

    def hold(self, entry: bytes, judge: Judge) -> bytes:
        service, number, me = self.service, self.number, jax.process_index()
        service.put(f"{_FOLDER}/at/{me}", self.what.encode())
        service.put(f"{self._folder}/entry/{me}", entry)
        some = None if len(self.processes) == jax.process_count() else self.processes
        try:
            service.barrier(f"{self._folder}/{number}", self.timeout, some)
        except (TimeoutError, ValueError) as error:
            raise self._late(error) from None
        verdict_key = f"{self._folder}/verdict/{number}"
        if me != self.processes[0]:
            try:
                return service.get(verdict_key, self.timeout)
            except TimeoutError as error:
                raise self._late(error) from None
        verdict = _judged(self._entries(), judge)
        service.put(verdict_key, verdict)
        with contextlib.suppress(RuntimeError):
            # All processes are here, so all have read the previous verdict.
            service.delete(f"{self._folder}/verdict/{number - 1}")
        return verdict

    def _entries(self) -> dict[int, bytes]:
        entries = self.service.list(f"{self._folder}/entry/")
        return {int(key.rpartition("/")[2]): entry for key, entry in entries.items()}

    def _late(self, reason: Exception) -> LateProcessError:
        """Return the error that all raise; the first process that gives up writes it."""
        service, key = self.service, f"{self._folder}/late/{self.number}"
        try:
            service.put(f"{key}/by", b"", overwrite=False)
        except KeyError:
            with contextlib.suppress(TimeoutError):
                said = json.loads(service.get(f"{key}/said", timeout=10))
                return LateProcessError(*said)
            return LateProcessError(f"{self.what}: {reason}")
        waiting: dict[str, list[int]] = {}
        late = set(self.processes)
        for process, entry in self._entries().items():
            number, _, what = json.loads(entry.partition(b"\n")[0])
            if number == self.number:
                waiting.setdefault(what, []).append(process)
                late.discard(process)
        lines = [f"{format_processes(group)} waited at {what}" for what, group in waiting.items()]
        lines += [f"process {process} {self._last_seen(process)}" for process in sorted(late)[:8]]
        who = format_processes(late) if late else "a process"
        message = (
            f"{self.what}: {who} did not come within {self.timeout:g} s. "
            f"{'; '.join(lines)}. Look for the reason in the output of {who}"
            f"{_because(reason)}"
        )
        service.put(f"{key}/said", json.dumps([message, sorted(late)]).encode())
        return LateProcessError(message, sorted(late))

    def _last_seen(self, process: int) -> str:
        try:
            what = self.service.get(f"{_FOLDER}/at/{process}", timeout=0.1).decode()
        except TimeoutError:
            return "has not been at such a place"
        return f"was last at {what}"


def _because(reason: Exception) -> str:
    dead = "heartbeat" in str(reason) or "unhealthy" in str(reason)
    other = isinstance(reason, ValueError)
    if dead:
        return "; it has died: its heartbeats have stopped"
    return "; others wait there for another set of processes" if other else ""


def _by_collective(
    payload: bytes, processes: tuple[int, ...], what: str, timeout: float
) -> dict[int, bytes]:
    """Return the payloads of all processes; wait for all of them, without a limit."""

    def alarm() -> None:
        logging.getLogger("gda").error(
            "%s: waiting for %s for %g s, in a collective, because JAX's coordination service was "
            "not found; the stack of this process follows",
            what,
            format_processes(processes),
            timeout,
        )
        faulthandler.dump_traceback(all_threads=True)

    watchdog = threading.Timer(timeout, alarm)
    watchdog.daemon = True
    watchdog.start()
    try:
        # All processes know both sizes beforehand, so that no disagreement hangs.
        size = np.frombuffer(np.int64(len(payload)).tobytes(), np.uint8)
        sizes = all_gather(size, processes).view(np.int64).ravel()
        padded = np.zeros(max(int(sizes.max()), 1), np.uint8)
        padded[: len(payload)] = np.frombuffer(payload, np.uint8)
        rows = all_gather(padded, processes)
    finally:
        watchdog.cancel()
    return {
        process: row[:size].tobytes()
        for process, row, size in zip(processes, rows, sizes.tolist(), strict=True)
    }
