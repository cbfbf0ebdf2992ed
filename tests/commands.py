"""The command line, run in the process of a test."""

import json
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from gda import cli

Result = tuple[int, str, str]
Run = Callable[..., Result]


def exit_code(*args: Any) -> Any:
    """Run a command and return its exit code."""
    try:
        return cli.main([str(arg) for arg in args])
    except SystemExit as end:
        return end.code


def document_of(*args: str) -> dict[str, Any]:
    """Return what a command says with --json."""
    with redirect_stdout(StringIO()) as out:
        assert cli.main([*args, "--json"]) == 0
    return json.loads(out.getvalue())
