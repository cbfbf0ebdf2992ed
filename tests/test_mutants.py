"""The changes of gda that `nox -s mutants` makes, and the fates of some."""

import subprocess
from pathlib import Path

import mutants
import pytest
from mutants import Copy, Mutant, mutants_of, tried

SOURCE = '''
"""A module."""

LIMIT = 2**20


def f(a: int | None, b: list[int] = [], *, is_odd: bool = False) -> bool:
    """Return it."""
    key = a, len(b)
    if a is None or b:
        raise ValueError(f"{a + 1} is not {b}" + "!")
    log.info("%d", a + 1)
    check(b, timeout=a + 1)
    a -= 1 if a < SMALL_BYTES else 2
    return not any(each < 3 for each in b if is_odd)


class C:
    def __repr__(self) -> str:
        return f"{1 + 1}" * (2 + 2)
'''


def test_one_thing_is_changed_at_a_time() -> None:
    assert [f"{each.line}: {each.old} -> {each.new}" for each in mutants_of(SOURCE)] == [
        "7: False -> True",
        "9: a, len(b) -> ((len(b),))",
        "9: a, len(b) -> ((a,))",
        "10: a is None or b -> True",
        "10: a is None or b -> False",
        "10: a is None or b -> (a is None and b)",
        "10: a is None -> (a is not None)",
        "13: check(b, timeout=a + 1) -> pass",
        "14: a -= 1 if a < SMALL_BYTES else 2 -> a += 1 if a < SMALL_BYTES else 2",
        "14: a < SMALL_BYTES -> True",
        "14: a < SMALL_BYTES -> False",
        "14: 1 -> 2",
        "14: 2 -> 3",
        "15: not any(each < 3 for each in b if is_odd) -> "
        "(any((each < 3 for each in b if is_odd)))",
        "15: each < 3 -> (each <= 3)",
        "15: 3 -> 4",
        "15: is_odd -> True",
        "15: is_odd -> False",
    ]


def test_every_mutant_of_gda_is_a_program_of_its_own() -> None:
    for folder in mutants.FOLDERS:
        for mutant in mutants.all_mutants(folder)[::50]:
            data = (mutants.ROOT / mutant.path).read_bytes()
            changed = data[: mutant.start] + mutant.new.encode() + data[mutant.stop :]
            assert compile(changed, mutant.path, "exec") != compile(data, mutant.path, "exec")


# A program of four lines, and its test.

SIGN = """
def sign(n):
    if n > 1:
        return 1
    return n
"""
TEST = """
import time
from program.sign import sign

def test_sign():
    assert sign(5) == 1

def test_hangs():
    time.sleep(600)
"""


class _TestOfSign:
    folder = "program"

    def of(self, mutant: Mutant) -> tuple[list[str], float, bool]:
        return ["tests/test_sign.py::test_sign"], 0.0, True


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copy:
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    for name, text in {"program/sign.py": SIGN, "tests/test_sign.py": TEST}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return Copy(tmp_path / "copy")


def test_a_mutant_is_killed_by_a_test_that_fails(copy: Copy, tmp_path: Path) -> None:
    fates = {
        each.new: tried(each, copy, [_TestOfSign()])
        for each in mutants_of(SIGN, "program/sign.py")
        if each.new in ("False", "(n >= 1)")
    }
    assert fates == {"False": "killed", "(n >= 1)": "survived"}
    for folder in (tmp_path, copy.path):
        assert (folder / "program/sign.py").read_text() == SIGN


def test_tests_that_hang_are_ended(copy: Copy) -> None:
    assert copy.run(["tests/test_sign.py::test_hangs"], 3)[0] is None
