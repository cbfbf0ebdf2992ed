"""A step of some processes: either it succeeds in all and they agree, or all raise."""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import Any, Generic, NamedTuple, TypeVar

import jax

from gda.layout.text import MOST_CHARACTERS, MOST_NAMED, format_processes, join_some
from gda.multihost.descriptions import Description, first_differences
from gda.multihost.meeting import DisagreementError, has_ended, meet, with_calls
from gda.multihost.places import here, one_line

T = TypeVar("T")


class Done(NamedTuple, Generic[T]):
    """A step that has succeeded in all: the result of ``work`` here, and that of ``decide``."""

    mine: T
    decision: Any


def all_do(
    work: Callable[[], T],
    *,
    what: str,
    timeout: float,
    deciding: float = 0,
    agreed: Callable[[T], Description] | None = None,
    share: Callable[[T], Any] = lambda done: done,
    decide: Callable[[dict[int, Any]], Any] = lambda parts: None,
    processes: tuple[int, ...] | None = None,
    failed: type[Exception] = DisagreementError,
    shared: tuple[type[Exception], ...] = (),
) -> Done[T]:
    """Do the part of this process, wait for the others, and get the decision on all parts.

    Communicates and raises as ``meet``, unless ``processes`` are one or omit this one. An error of
    ``work``, ``agreed``, ``share`` or ``decide`` is raised where it occurred, and in the other
    processes an error of class ``failed`` that names it.

    Args:
      agreed: describes what must be equal in all, or all raise a ``DisagreementError``. Calls of
        other steps with ``agreed`` differ too; ``what`` then is the name of a call, without place.
      share: turns the result of ``work`` into a value of JSON for the process that decides.
      decide: called in one process with these values by process, if all agree; returns a value of
        JSON for all.
      shared: classes of errors that all processes raise as the failed one does.
    """
    check_joined()
    me = jax.process_index()
    processes = tuple(range(jax.process_count())) if processes is None else processes
    if len(processes) < 2 or me not in processes:
        mine = work()
        part = json.loads(json.dumps(share(mine)))  # as if it had been sent
        return Done(mine, json.loads(json.dumps(decide({me: part}))))
    call, what = what, what if agreed is None else here(what)
    errors: list[BaseException] = []

    def count(payloads: dict[int, bytes]) -> bytes:
        entries = {process: json.loads(payload) for process, payload in payloads.items()}
        failures = {process: each for process, each in entries.items() if "failed" in each}
        if not failures:
            if difference := compare_digests(entries):
                return json.dumps({"difference": difference}).encode()
            try:
                parts = {process: each["done"] for process, each in entries.items()}
                return json.dumps({"done": decide(parts)}).encode()
            except BaseException as error:  # Ctrl-C too: the others wait for the decision
                errors.append(error)
                failures = {me: _failure(error)}
        reasons = [
            f"process {process} failed: {each['failed']}" for process, each in failures.items()
        ]
        kinds = {each["kind"] for each in failures.values()}
        kind = kinds.pop() if len(kinds) == 1 else None
        return json.dumps({"failed": join_some(reasons, MOST_CHARACTERS), "kind": kind}).encode()

    meeting = partial(meet, what=what, timeout=timeout, processes=processes)
    kind = what if agreed is None else "agreed"
    bring = partial(meeting, decide=count, kind=kind, deciding=deciding)
    begun = time.monotonic()
    try:
        mine = work()
        fields = {} if agreed is None else {("", "call"): call} | agreed(mine)
        text = json.dumps([[*key, value] for key, value in fields.items()]).encode()
        entry = {"done": share(mine), "digest": sha256(text).hexdigest(), "place": what}
        payload = json.dumps(entry).encode()
    except BaseException as error:
        # The others must know before this process ends; their answer does not matter. They do not
        # come if the work met them, and that ended this step.
        if not has_ended(what, error, begun):
            with contextlib.suppress(Exception):
                bring(json.dumps(_failure(error)).encode())
        raise
    try:
        decision = json.loads(bring(payload))
    finally:
        if errors:
            raise errors[0]
    if difference := decision.get("difference"):
        described = zlib.compress(text) if me in difference["spokesmen"] else b""
        told = partial(say_difference, difference["groups"])
        differences = meeting(described, told, kind="descriptions").decode()
        error = DisagreementError(f"{what}: {differences}{difference['places']}")
        raise with_calls(error, difference["calls"])
    if "failed" in decision:
        kinds = {each.__name__: each for each in shared}
        raise kinds.get(decision["kind"], failed)(f"{what}: {decision['failed']}")
    return Done(mine, decision["done"])


def check_joined() -> None:
    """Raise if this process was started as one of many and has not joined the others."""
    count = os.environ.get("JAX_NUM_PROCESSES", "1")
    if count != "1" and jax.process_count() == 1:
        raise RuntimeError(
            f"JAX_NUM_PROCESSES says {count} processes, but JAX has only this one; call "
            "gda.launch.initialize() before any other use of JAX"
        )


def _failure(error: BaseException) -> dict[str, str]:
    return {"failed": one_line(error), "kind": type(error).__name__}


def compare_digests(entries: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Compare the digests of processes: return nothing, or the groups that differ."""
    groups: dict[str, list[int]] = {}
    places: dict[str, list[int]] = {}
    for process, entry in sorted(entries.items()):
        groups.setdefault(entry["digest"], []).append(process)
        places.setdefault(entry["place"], []).append(process)
    if len(groups) == 1:
        return {}
    heard = sorted(groups.values(), key=len)
    if len(heard) > MOST_NAMED:
        # The majority and the smallest groups are enough.
        heard = [*heard[: MOST_NAMED - 1], heard[-1]]
    where = [f"{format_processes(group)} at {place}" for place, group in places.items()]
    apart = join_some(where, MOST_CHARACTERS / 3)
    return {
        "groups": heard,
        "spokesmen": [group[0] for group in heard],
        "calls": [*places],
        "places": f". They are at different places: {apart}" if where[1:] else "",
    }


def say_difference(groups: Sequence[list[int]], payloads: dict[int, bytes]) -> bytes:
    """Return the fields in which the groups differ, from descriptions by their first processes."""
    descriptions: list[Description] = [
        {(path, field): value for path, field, value in json.loads(zlib.decompress(payload))}
        for payload in (payloads[group[0]] for group in groups)
    ]
    return f"the processes do not agree: {first_differences(groups, descriptions)}".encode()
