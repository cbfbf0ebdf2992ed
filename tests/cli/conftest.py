"""The command line, run in the process of a test."""

import pytest
from commands import Result, Run, exit_code


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process; gives its exit code and what it printed."""

    def in_process(*args: object) -> Result:
        code = exit_code(*args)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return in_process
