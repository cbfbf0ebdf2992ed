"""The command line, run in the process of a test."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a document, or a text, to a file; returns its path."""

    def written(document: Any, name: str = "model.json") -> Path:
        path = tmp_path / name
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return path

    return written
