"""A step of all processes: either all have done it, or all hear the reason."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax

from gda.layout.text import join_some
from gda.multihost.meeting import DisagreementError, meet

T = TypeVar("T")


class Done(NamedTuple, Generic[T]):
    """A step that all processes have done.

    Attributes:
      mine: the result of ``work`` in this process.
      verdict: the result of ``judge``, in every process.
      parts: the results of ``tell`` of all processes, in the process that judged; elsewhere empty.
    """

    mine: T
    verdict: Any
    parts: list[Any]


def all_do(
    work: Callable[[], T],
    *,
    what: str,
    timeout: float,
    tell: Callable[[T], Any] = lambda done: done,
    judge: Callable[[dict[int, Any]], Any] = lambda parts: None,
    kind: str | None = None,
    processes: tuple[int, ...] | None = None,
    failed: type[Exception] = DisagreementError,
    shared: tuple[type[Exception], ...] = (),
) -> Done[T]:
    """Do the part of this process, wait for the others, and hear the verdict on all parts.

    Communicates: all of ``processes`` must call it, in the same order of steps.

    Args:
      work: the part of this process.
      what: the step, for the messages.
      timeout: seconds to wait for the others.
      tell: turns the result of ``work`` into a value of JSON for the process that judges.
      judge: called in one process with these values by process. It returns a value of JSON, for
        all processes; if it raises, the step fails.
      kind: of the step; processes that are at steps of different kinds disagree. By default
        ``what``.
      processes: ascending; by default all.
      failed: the class of error in a process whose own work did not fail.
      shared: classes of errors that all processes raise as the failed one does, so that callers
        can catch them.

    Raises:
      Exception: an error of ``work`` or ``tell`` here, or of ``judge``.
      failed: one of them raised in another process; the message names it.
      DisagreementError, LateProcessError, ConnectionError: as ``meet`` does.
    """
    ballot = _Ballot(judge)
    bring = functools.partial(
        meet, judge=ballot.count, kind=kind or what, what=what, timeout=timeout, processes=processes
    )
    try:
        mine = work()
        entry = json.dumps({"done": tell(mine)}).encode()
    except BaseException as error:
        # The others must hear of it before this process ends; their answer does not matter here.
        with contextlib.suppress(Exception):
            bring(json.dumps(_failure(error)).encode())
        raise
    verdict = json.loads(bring(entry))
    if ballot.error is not None:
        raise ballot.error
    if "failed" in verdict:
        kinds = {each.__name__: each for each in shared}
        raise kinds.get(verdict["kind"], failed)(f"{what}: {verdict['failed']}")
    return Done(mine, verdict["done"], ballot.parts)


class _Ballot:
    """The parts of all processes, in the one that judges, and the error of its judge."""

    def __init__(self, judge: Callable[[dict[int, Any]], Any]) -> None:
        self._judge = judge
        self.parts: list[Any] = []
        self.error: Exception | None = None

    def count(self, payloads: dict[int, bytes]) -> bytes:
        """Return the verdict."""
        entries = {process: json.loads(payload) for process, payload in payloads.items()}
        failures = {process: each for process, each in entries.items() if "failed" in each}
        if not failures:
            parts = {process: each["done"] for process, each in entries.items()}
            self.parts = list(parts.values())
            try:
                return json.dumps({"done": self._judge(parts)}).encode()
            except Exception as error:
                self.error = error
                failures = {jax.process_index(): _failure(error)}
        said = [f"process {process} failed: {each['failed']}" for process, each in failures.items()]
        kinds = {each["kind"] for each in failures.values()}
        kind = kinds.pop() if len(kinds) == 1 else None
        return json.dumps({"failed": join_some(said), "kind": kind}).encode()


def _failure(error: BaseException) -> dict[str, str]:
    kind = type(error).__name__
    return {"failed": f"{kind}: {error}".replace("\n", " ")[:1000], "kind": kind}
