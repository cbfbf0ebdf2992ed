"""The command line, run in the process of a test."""

import pytest
from running import Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)
