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


def test_only_a_subtree(run: Run, a: Path, b: Path) -> None:
    assert run("diff", a, b, "--at", "params/1")[0] == 0
    code, out, _ = run("diff", a, b, "--at", "params")
    assert (code, "name" in out) == (1, False)
    assert run.refusal("diff", a, b, "--at", "params/7") == (
        "gda: --at: params/7 is not in the tree; params has 0; 1; "
        "write keys as in params/layers/0\n"
    )


def test_a_subtree_at_a_key_of_digits(run: Run, tmp_path: Path) -> None:
    for name, number in (("a", 1), ("b", 2)):
        tree = {"layers": {"0": {"w": number}, "1": 3}}
        gda.checkpoint.save(tmp_path / name, tree)
    code, out, _ = run("diff", tmp_path / "a", tmp_path / "b", "--at", "layers/0")
    assert (code, "layers/0/w  1 -> 2" in out) == (1, True)


def test_errors(run: Run, a: Path, b: Path) -> None:
    for chunk in b.glob("data-*/*/c.*"):
        chunk.unlink()
    assert run("diff", a, b)[0] == 1  # reads only the manifests
    (b / "manifest.json").write_bytes(b"{}")
    assert "does not begin like a manifest" in run.refusal("diff", a, b)
