"""A plugin of pytest that records the lines of gda that each test runs: `-p lines_run`.

The processes of a pool record the lines of their part, and of the functions that a test calls
there. Each process adds a line of JSON for a test to a file of its own in the folder that the
variable ``LINES_RUN`` names.
"""

import json
import os
import pickle
import re
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from gda.testing import channel
from gda.testing.pool import Pool

_TOOL = sys.monitoring.COVERAGE_ID
_GDA = f"{Path.cwd() / 'gda'}/"
_lines: defaultdict[str, set[int]] = defaultdict(set)


def _note(code: CodeType, line: int) -> Any:
    if code.co_filename.startswith(_GDA):
        _lines[f"gda/{code.co_filename.removeprefix(_GDA)}"].add(line)
    return sys.monitoring.DISABLE  # until the next test


def _begin() -> None:
    _lines.clear()
    if sys.monitoring.get_tool(_TOOL) is None:
        sys.monitoring.use_tool_id(_TOOL, "lines_run")
        sys.monitoring.register_callback(_TOOL, sys.monitoring.events.LINE, _note)
        sys.monitoring.set_events(_TOOL, sys.monitoring.events.LINE)
    sys.monitoring.restart_events()


def _record(test: str, seconds: float, passed: bool) -> None:
    lines = {name: sorted(lines) for name, lines in _lines.items()}
    record = {"test": test, "seconds": seconds, "passed": passed, "lines": lines}
    with Path(os.environ["LINES_RUN"], f"{os.getpid()}.jsonl").open("a") as file:
        print(json.dumps(record), file=file)


def _call_in_pool(test: str, reference: tuple[str, str, str | None], arguments: bytes) -> Any:
    _begin()
    try:
        args, kwargs = pickle.loads(arguments)
        return channel._find(*reference)(*args, **kwargs)  # as the pool itself
    finally:
        _record(test, 0, True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    test = re.sub(r"@[^@]+$", "", item.nodeid)  # without the group that xdist adds
    ask = Pool.ask

    def recorded(pool: Pool, command: tuple[Any, ...], timeout: float) -> Any:
        if command[0] == "call":
            here = __name__, _call_in_pool.__qualname__, __file__
            command = ("call", here, pickle.dumps(((test, *command[1:]), {})))
        return ask(pool, command, timeout)

    failed, begun = item.session.testsfailed, time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pool, "ask", recorded)
        _begin()
        result = yield
    _record(test, time.monotonic() - begun, item.session.testsfailed == failed)
    return result
