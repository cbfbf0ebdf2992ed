"""A step that all processes do: either all of them have done it, or all hear why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from gda.checkpoint.format.errors import SaveError
from gda.layout.text import join_some
from gda.multihost.meeting import DisagreementError, meet

_SHARED: dict[str, type[Exception]] = {
    "FileExistsError": FileExistsError,
    "DisagreementError": DisagreementError,
}

Judge = Callable[[list[Any]], Any]


def together(work: Callable[[], Any], judge: Judge, what: str, timeout: float) -> Any:
    """Do this process's part, wait for the others, and return what process 0 makes of all parts.

    Args:
      work: what it returns must go into JSON, and so must what ``judge`` returns.
      judge: called in process 0 with what all processes returned; what it raises fails the step.
      what: the step, for the messages.
      timeout: seconds to wait for the others.

    Raises:
      Exception: what ``work`` raised here, or ``judge``.
      SaveError: it raised in another process, which is named.
      LateProcessError: another did not come.
    """
    failures: list[BaseException] = []
    entry: dict[str, Any] = {}
    try:
        entry["done"] = work()
    except BaseException as error:  # the others must hear of it before this process goes
        failures.append(error)
        entry |= {"failed": _said(error), "kind": type(error).__name__}

    def decide(payloads: dict[int, bytes]) -> bytes:
        entries = {process: json.loads(payload) for process, payload in payloads.items()}
        failed = [
            f"process {process} failed: {each['failed']}"
            for process, each in entries.items()
            if "failed" in each
        ]
        if failed:
            kinds = {each["kind"] for each in entries.values() if "kind" in each}
            return json.dumps({"failed": join_some(failed), "kinds": sorted(kinds)}).encode()
        try:
            return json.dumps({"done": judge([each["done"] for each in entries.values()])}).encode()
        except Exception as error:
            failures.append(error)
            said = {"failed": f"process 0 failed: {_said(error)}", "kinds": [type(error).__name__]}
            return json.dumps(said).encode()

    try:
        payload = json.dumps(entry).encode()
        verdict = json.loads(meet(payload, decide, kind=what, what=what, timeout=timeout))
    except Exception:
        if not failures:
            raise
        raise failures[0] from None
    if failures:
        raise failures[0]
    if "failed" in verdict:
        # What a caller may want to catch is the same in all processes.
        kind = _SHARED.get(*verdict["kinds"]) if len(verdict["kinds"]) == 1 else None
        raise (kind or SaveError)(f"{what}: {verdict['failed']}")
    return verdict["done"]


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1000]
