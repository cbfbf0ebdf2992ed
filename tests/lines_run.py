"""A plugin of pytest that records the lines of gda that each test runs: `-p lines_run`.

The processes of a pool record the lines of their part. Each process adds a line of JSON for a test
to a file of its own in the folder that the variable ``LINES_RUN`` names.
"""

import json
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

_TOOL = sys.monitoring.COVERAGE_ID
_GDA = f"{Path.cwd() / 'gda'}/"
_lines: defaultdict[str, set[int]] = defaultdict(set)


def _note(code: CodeType, line: int) -> Any:
    if code.co_filename.startswith(_GDA):
        _lines[f"gda/{code.co_filename.removeprefix(_GDA)}"].add(line)
    return sys.monitoring.DISABLE  # until the next test


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    _lines.clear()
    if sys.monitoring.get_tool(_TOOL) is None:
        sys.monitoring.use_tool_id(_TOOL, "lines_run")
        sys.monitoring.register_callback(_TOOL, sys.monitoring.events.LINE, _note)
        sys.monitoring.set_events(_TOOL, sys.monitoring.events.LINE)
    sys.monitoring.restart_events()
    failed, begun = item.session.testsfailed, time.monotonic()
    result = yield
    record = {
        "test": re.sub(r"@[^]@]+$", "", item.nodeid),  # without the group that xdist adds
        "seconds": time.monotonic() - begun,
        "passed": item.session.testsfailed == failed,
        "lines": {name: sorted(lines) for name, lines in _lines.items()},
    }
    with Path(os.environ["LINES_RUN"], f"{os.getpid()}.jsonl").open("a") as file:
        print(json.dumps(record), file=file)
    return result
