"""The place of each process, for the others to see, and the processes that have ended.

A process posts its place when it constructs its first array, and before it waits for others. So
another process on its machine learns at once that it has ended; on other machines JAX learns it,
after ``heartbeat_timeout_seconds``, and then ends the program. A process that exits says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax

from gda.layout.boundary import frame_of_caller
from gda.layout.text import MOST_CHARACTERS
from gda.multihost import coordination
from gda.multihost.coordination import Service

_FOLDER = "gda/multihost/place"
_PIDS = "gda/multihost/pid"
_ENDS = "gda/multihost/end/"


class _OfThread(threading.local):
    meetings = 0  # to which this thread has come, or which it has refused


of_thread = _OfThread()
# The number of calls without communication that this process has made, by ``call_at``.
made_alone: Counter[str] = Counter()
# The services, by address, to which this process has posted its pid, with its number there.
_posted: set[tuple[str, int]] = set()


class Place(NamedTuple):
    """The last place of a process, with its meeting, if that has not failed, and its machine.

    After a call without communication, ``alone`` counts those at ``group``, its ``call_at``.
    """

    what: str
    group: str = ""
    number: int = 0
    processes: tuple[int, ...] = ()
    machine: str = ""
    pid: int = 0
    alone: int = 0


@cache
def introduce() -> None:
    """Post a first place of this process, so that others notice its end even before a meeting."""
    if (service := coordination.service()) is not None:
        # Construction does not communicate, and so does not fail with the service.
        with contextlib.suppress(Exception):
            post(service, Place("its first array"), overwrite=False)


def post(service: Service, place: Place, *, overwrite: bool = True) -> None:
    are_all = len(place.processes) == jax.process_count()
    fields = place._replace(machine=machine(), pid=os.getpid())._asdict()
    fields |= {"processes": "all" if are_all else place.processes}  # they may be many
    key = f"{_FOLDER}/{jax.process_index()}/at"
    service.put(key, json.dumps(fields).encode(), overwrite=overwrite)
    if (own := (coordination.coordinator_address(), jax.process_index())) not in _posted:
        service.put(f"{_pids()}{jax.process_index()}/at", str(os.getpid()).encode())
        _posted.add(own)


def here(name: str) -> str:
    """Return a call with the line of the program that makes it: ``gda.load_tree (train.py:31)``."""
    frame, _ = frame_of_caller()
    if frame is None:
        return f"{name} (an unknown place)"
    return f"{name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


def call_at(name: str) -> str:
    """Return a key for a call and the lines of the program that lead to it.

    A process that has made a call there has passed it, and one that has made the same call on
    another line may still come.
    """
    lines, (frame, _) = [], frame_of_caller()
    while frame is not None:
        lines.append((os.path.basename(frame.f_code.co_filename), frame.f_lineno))
        frame = frame.f_back
    return coordination.short_name((name, lines))


def places(service: Service, process: int | None = None) -> dict[int, Place]:
    """Return the places of all processes that have posted one, or that of one process."""
    folder = f"{_FOLDER}/" if process is None else f"{_FOLDER}/{process}/"
    found = {}
    for key, value in service.list(folder).items():
        fields = json.loads(value)
        if fields["processes"] == "all":
            fields["processes"] = range(jax.process_count())
        fields["processes"] = tuple(fields["processes"])
        found[int(key.split("/")[-2])] = Place(**fields)
    return found


def neighbours(service: Service) -> dict[int, Place]:
    """Return the machine and the pid of each process on this machine, for ``ended``.

    Many processes ask, each for a few: the places of all would be many bytes in each of them.
    """
    return {
        int(key.split("/")[-2]): Place("", machine=machine(), pid=int(pid))
        for key, pid in service.list(_pids()).items()
    }


def _pids() -> str:
    return f"{_PIDS}/{coordination.short_name(machine())}/"


def ended(service: Service, places: dict[int, Place], processes: Iterable[int]) -> dict[int, str]:
    """Return the processes that have ended, as far as this machine knows, with their errors."""
    errors = {int(key.split("/")[-2]): error for key, error in service.list(_ENDS).items()}
    return {
        process: errors.get(process, b"").decode()
        for process in processes
        if process in errors
        or ((place := places.get(process)) and is_near(place) and _is_gone(place.pid))
    }


def text_of_end(gone: dict[int, str]) -> str:
    errors = "; ".join(dict.fromkeys(filter(None, gone.values())))
    return f"ended after {errors}" if errors else "ended"


def post_end(service: Service) -> None:
    """Post that this process ends, with the error that ends it."""
    error = getattr(sys, "last_value", None)  # that Python has shown
    text = "" if error is None else one_line(error)
    service.put(f"{_ENDS}{jax.process_index()}/last", text.encode())


def one_line(error: BaseException) -> str:
    """Return kind and message of an error as one line that is short enough to be sent."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:MOST_CHARACTERS]


def is_near(place: Place) -> bool:
    """Return True if the process is on this machine, which notices its end."""
    return bool(place.machine) and place.machine == machine()


@cache
def machine() -> str:
    """Return a text for this kernel and its table of processes; empty if they are unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _is_gone(pid: int) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        end = select.poll()
        end.register(handle)
        return bool(end.poll(0))  # also if its parent has not asked for its exit code
    finally:
        os.close(handle)
