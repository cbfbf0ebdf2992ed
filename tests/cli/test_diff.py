"""``gda diff`` as a user runs it."""

from pathlib import Path

import numpy as np
import pytest
from running import Run

import gda

TREE = {"params": [np.zeros(4), np.ones(2, np.int8)], "step": 1}


@pytest.fixture
def a(tmp_path: Path) -> Path:
    gda.checkpoint.save(tmp_path / "a", TREE)
    return tmp_path / "a"


@pytest.fixture
def b(tmp_path: Path) -> Path:
    params = [np.array([0, 0, 2.0, 1]), np.ones(2, np.int8)]
    gda.checkpoint.save(tmp_path / "b", {"params": params, "step": 1, "name": "\x1b[2J"})
    return tmp_path / "b"


def test_the_same(run: Run, a: Path) -> None:
    assert run("diff", a, a) == (0, f"a:  {a}\nb:  {a}\nthe same: all of 3 leaves, 34 B\n", "")


def test_others(run: Run, a: Path, b: Path) -> None:
    code, out, err = run("diff", a, b)
    assert (code, err) == (1, "")
    assert out == f"{gda.checkpoint.diff(a, b)}\n"
    assert "  params/0  float64[4]\n" in out
    assert "\x1b" not in out


def test_errors(run: Run, a: Path, b: Path) -> None:
    for chunk in b.glob("data-*/*/c.*"):
        chunk.unlink()
    assert run("diff", a, b)[0] == 1  # reads only the manifests
    (b / "manifest.json").write_bytes(b"{}")
    assert "does not begin like a manifest" in run.refusal("diff", a, b)
