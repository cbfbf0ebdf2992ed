"""The blocks of the pages of the documentation, run and compared with their output.

A block of Python is either examples, which run from the top of the page to its end, or a file whose
first line is its name. A block of commands runs in a folder with those files, and the block of text
below it is its output. Below ``<!-- measured -->`` its numbers may differ by 10 %, and times by any
factor.
"""

import doctest
import importlib
import json
import os
import re
import shlex
import tomllib
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from page_blocks import blocks_of
from running import fresh_python

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))

PROGRAMS = {
    "python": [],
    "gda": ["-m", "gda"],
    "pytest": ["-m", "pytest", "-p", "no:cacheprovider"],
}
READERS = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load}
_FILE = re.compile(r"# ([\w./-]+\.py)\n")
_MEASURED = "<!-- measured -->\n\n```text\n"
_TIME = re.compile(r"\d[\d.]* ?s\b")
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e\+\d+)?")


def blocks(page: str) -> list[tuple[str, str, int]]:
    return blocks_of((DOCS / page).read_text(encoding="utf-8"))


def files(page: str) -> dict[str, str]:
    """Return the blocks that are files, by name."""
    python = [text for language, text, _ in blocks(page) if language == "python"]
    return {named[1]: text for text in python if (named := _FILE.match(text))}


def commands(page: str) -> Iterator[tuple[list[str], str | None]]:
    """Yield each command with the text that is shown as its output."""
    for (language, text, _), following in pairwise([*blocks(page), ("", "", 0)]):
        if language == "bash":
            lines = text.replace("\\\n", "").splitlines()
            for line in lines:
                is_last = line is lines[-1]
                shown = following[1] if is_last and following[0] == "text" else None
                yield shlex.split(line.removeprefix(".venv/bin/")), shown


def runnable(page: str) -> Any:
    """Return a page as a parameter, marked if its blocks compile for TPUs or GPUs."""
    texts = [text for _, text, _ in blocks(page) if "gda.rehearsal_mesh(" in text]
    needs = ["tpu"] * bool(texts) + ["gpu"] * any('("h100:' in text for text in texts)
    return pytest.param(page, marks=pytest.mark.topology(*needs) if needs else ())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory of the test, whose changes of the environment are undone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with mock.patch.dict(os.environ):
        yield tmp_path


# JAX 0.8 warns of a name that flax uses.
@pytest.mark.filterwarnings("ignore:jax.(array_ref|ArrayRef):DeprecationWarning")
@pytest.mark.parametrize("page", [*map(runnable, PAGES)])
def test_examples_give_the_shown_results(page: str, folder: Path) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    lines = [""] * len(text.splitlines())
    for language, block, first in blocks(page):
        if language == "python" and not _FILE.match(block):
            assert block.startswith(">>> "), f"line {first} is not an example with its output"
            assert "\n\n" not in block, f"after the empty line in the block at {first} nothing runs"
            lines[first - 1 : first - 1 + block.count("\n")] = block.splitlines()
    session = "\n".join(lines) + "\n"
    assert "doctest:" not in text, "an example must not be skipped or be compared loosely"
    assert text.count(">>> ") == session.count(">>> "), "an example outside of a block of Python"
    if "from flax import nnx" in text:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of flax on the oldest JAX, when it is imported
            importlib.import_module("flax.nnx")
    # Whitespace is normalised because messages of one line are wrapped on the pages.
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(doctest.DocTestParser().get_doctest(session, {}, page, page, 0))
    assert runner.summarize().failed == 0


@pytest.mark.parametrize(
    "page", [runnable(page) for page in PAGES if files(page) or list(commands(page))]
)
def test_commands_print_the_shown_output(page: str, folder: Path) -> None:
    for name, text in files(page).items():
        (folder / name).write_text(text)
    left = set(files(page)) - {"conftest.py"}
    for command, shown in commands(page):
        if command[0] not in PROGRAMS:
            continue
        left -= {word.partition(":")[0] for word in command}  # of FILE.py:FUNCTION
        output = run(command)
        if shown is not None:
            is_measured = _MEASURED + shown in (DOCS / page).read_text(encoding="utf-8")
            compare(shown, output, is_all=command[0] == "gda", is_measured=is_measured)
    tests = {name for name in left if name.startswith("test_")}
    assert left == tests, "no command runs these programs"
    if tests:
        run(["pytest", *sorted(tests)])


def run(command: list[str]) -> str:
    """Return all that a command prints, without the progress of compilations that take long."""
    done = fresh_python(*PROGRAMS[command[0]], *command[1:])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + ("" if command[:2] == ["gda", "rehearse"] else done.stderr)


def compare(shown: str, output: str, *, is_all: bool, is_measured: bool = False) -> None:
    """Compare: lines of many processes come in any order, and ``...`` stands for anything."""
    assert shown.strip()
    for part in re.split(r"\n(?=\[\d+\] )", shown):
        text = " ".join(part.split())
        numbers, between = [], [text]
        if is_measured:
            text = _TIME.sub("...", text)
            numbers, between = _NUMBER.findall(text), _NUMBER.split(text)
        pattern = f"({_NUMBER.pattern})".join(
            ".*?".join(map(re.escape, each.split("..."))) for each in between
        )
        find = re.fullmatch if is_all else re.search
        found = find(pattern, " ".join(output.split()))
        assert found, output
        for number, other in zip(numbers, found.groups(), strict=True):
            expected = pytest.approx(float(number.replace(",", "")), rel=0.1)
            assert float(other.replace(",", "")) == expected, output


def test_commands_that_are_not_run_here_install_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for page in PAGES:
        for command, _ in commands(page):
            # tests/test_facts_of_pages.py runs the completion of bash.
            is_completion = command[0].startswith("commands=") or command[0] == "complete"
            if command[0] not in PROGRAMS and not is_completion:
                assert command[:2] == ["pip", "install"], f"{page}: run {shlex.join(command)}"
                for named in re.findall(r"\[([\w,]+)\]", shlex.join(command)):
                    assert set(named.split(",")) <= set(extras["optional-dependencies"])


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("design/")])
def test_every_block_is_one_that_a_test_looks_at(page: str) -> None:
    previous = ""
    for language, block, first in blocks(page):
        if language in READERS:
            READERS[language](block)
        else:
            assert language in {"python", "bash", "text"}, f"line {first} begins a {language} block"
        assert language != "text" or previous == "bash", f"line {first} shows no command's output"
        previous = language
