"""A step of all processes: either it succeeds in all, or all raise."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax

from gda.layout.text import MOST_CHARACTERS, join_some
from gda.multihost.meeting import DisagreementError, has_ended, meet
from gda.multihost.places import one_line

T = TypeVar("T")


class Done(NamedTuple, Generic[T]):
    """A step that has succeeded in all: the result of ``work`` here, and that of ``decide``.

    ``parts`` are the results of ``share`` in the process that decided, elsewhere empty.
    """

    mine: T
    decision: Any
    parts: list[Any]


def all_do(
    work: Callable[[], T],
    *,
    what: str,
    timeout: float,
    deciding: float = 0,
    share: Callable[[T], Any] = lambda done: done,
    decide: Callable[[dict[int, Any]], Any] = lambda parts: None,
    kind: str | None = None,
    processes: tuple[int, ...] | None = None,
    failed: type[Exception] = DisagreementError,
    shared: tuple[type[Exception], ...] = (),
) -> Done[T]:
    """Do the part of this process, wait for the others, and get the decision on all parts.

    Communicates and raises as ``meet``. An error of ``work``, ``share`` or ``decide`` is raised
    where it occurred, and in the other processes an error of class ``failed`` that names it.

    Args:
      share: turns the result of ``work`` into a value of JSON for the process that decides.
      decide: called in one process with these values by process; returns a value of JSON for all.
      shared: classes of errors that all processes raise as the failed one does.
    """
    if jax.process_count() == 1:
        mine = work()
        parts = [json.loads(json.dumps(share(mine)))]  # as if it had been sent
        return Done(mine, json.loads(json.dumps(decide({0: parts[0]}))), parts)
    parts: list[Any] = []
    errors: list[BaseException] = []

    def count(payloads: dict[int, bytes]) -> bytes:
        entries = {process: json.loads(payload) for process, payload in payloads.items()}
        failures = {process: each for process, each in entries.items() if "failed" in each}
        if not failures:
            done = {process: each["done"] for process, each in entries.items()}
            parts.extend(done.values())
            try:
                return json.dumps({"done": decide(done)}).encode()
            except BaseException as error:  # Ctrl-C too: the others wait for the decision
                errors.append(error)
                failures = {jax.process_index(): _failure(error)}
        reasons = [
            f"process {process} failed: {each['failed']}" for process, each in failures.items()
        ]
        kinds = {each["kind"] for each in failures.values()}
        kind = kinds.pop() if len(kinds) == 1 else None
        return json.dumps({"failed": join_some(reasons, MOST_CHARACTERS), "kind": kind}).encode()

    bring = functools.partial(
        meet,
        decide=count,
        kind=kind or what,
        what=what,
        timeout=timeout,
        deciding=deciding,
        processes=processes,
    )
    begun = time.monotonic()
    try:
        mine = work()
        entry = json.dumps({"done": share(mine)}).encode()
    except BaseException as error:
        # The others must know before this process ends; their answer does not matter. They do not
        # come if the work met them, and that ended this step.
        if not has_ended(what, error, begun):
            with contextlib.suppress(Exception):
                bring(json.dumps(_failure(error)).encode())
        raise
    try:
        decision = json.loads(bring(entry))
    finally:
        if errors:
            raise errors[0]
    if "failed" in decision:
        kinds = {each.__name__: each for each in shared}
        raise kinds.get(decision["kind"], failed)(f"{what}: {decision['failed']}")
    return Done(mine, decision["done"], parts)


def _failure(error: BaseException) -> dict[str, str]:
    return {"failed": one_line(error), "kind": type(error).__name__}
