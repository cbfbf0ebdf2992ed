"""The snippets of the README, run and compared with their output."""

import doctest
import re
import tomllib
from pathlib import Path

import pytest
from page_blocks import blocks_of
from running import fresh_python

import gda

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

MAIN_JOB = (
    "python3 -m venv .venv && .venv/bin/pip install -q -e '.[examples]' && "
    ".venv/bin/python examples/train_digits.py"
)
TESTS = (
    "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]' && "
    ".venv/bin/python -m pytest -n 2"
)

INSTALL = "pip install 'PATH/TO/gda[checkpoint]'"
LAUNCH = "python -m gda.launch -n 4 --devices-per-process 2 examples/many_hosts.py"
_NEXT_LINE = re.compile(r" \\\n +")


# Snippets.


def test_every_block_is_one_that_a_test_looks_at() -> None:
    blocks = blocks_of(README)
    assert {language for language, _, _ in blocks} == {"python", "bash", "text"}
    commands = [_NEXT_LINE.sub(" ", text) for language, text, _ in blocks if language == "bash"]
    assert commands == [f"{command}\n" for command in [MAIN_JOB, TESTS, INSTALL]]
    outside = README
    for _, text, _ in blocks:
        outside = outside.replace(text, "", 1)
    # Other ways to write a block in Markdown, in which nothing would look.
    for other in ["~~~", "    ", "\t", "<pre", "<code", ">>>", "import gda\n"]:
        assert other not in outside, f"{other!r} outside of a block that begins with ```python"


def test_the_picture_is_the_one_of_the_quickstart() -> None:
    grid = gda.ShardGrid((8, 8), {"x": 4, "y": 2}, ("x",))
    picture = ROOT / "docs" / "pictures" / "quickstart.svg"
    assert picture.read_text() == gda.show.svg(grid, dtype="float32") + "\n"


def test_the_program_for_many_hosts_runs_as_the_readme_says() -> None:
    assert f"`{LAUNCH}`" in README
    done = fresh_python(*LAUNCH.split()[1:], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "rows" in line]
    assert sorted(lines) == [f"[{i}] process {i} of 4: 512 rows, w = [1. 2. 3.]" for i in range(4)]


def test_python_blocks_give_the_shown_results(tmp_path: Path) -> None:
    # As a reader would type it: in order, in a process where nothing was imported or set before.
    assert "doctest:" not in README, "an example must not be skipped or be compared loosely"
    lines = [""] * len(README.splitlines())
    for language, text, first in blocks_of(README):
        if language == "python":
            assert text.startswith(">>> "), f"line {first} is not an example with its output"
            assert "\n\n" not in text, f"after the empty line in the block at {first} nothing runs"
            block = text.splitlines()
            lines[first - 1 : first - 1 + len(block)] = block
    session = tmp_path / "README.md"
    session.write_text("\n".join(lines) + "\n")
    # Whitespace is normalised because messages of one line are wrapped in the README.
    options = ("-W", "error", "-m", "doctest", "-o", "NORMALIZE_WHITESPACE", "-v")
    done = fresh_python(*options, session)
    assert done.returncode == 0, done.stdout + done.stderr
    examples = sum(line.startswith(">>> ") for line in lines)
    assert re.search(rf"\b{examples} passed", done.stdout), done.stdout


def test_quickstart_program_prints_the_output_of_the_opening() -> None:
    opening = README.partition("\n## ")[0]
    shown = [
        example.want
        for language, text, _ in blocks_of(opening)
        for example in doctest.DocTestParser().get_examples(text)
        if language == "python"
    ]
    done = fresh_python("-W", "error", ROOT / "examples" / "quickstart.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(shown)


# Commands, names and figures.


def test_the_readme_is_read_in_ten_minutes() -> None:
    assert len(README.splitlines()) <= 180


def test_the_table_names_every_extra_for_users() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = README.partition("| feature | extra |")[2].partition("\n\n")[0]
    of_features = [row.split("|")[2] for row in table.splitlines() if row.count("|") == 3]
    named = set(re.findall(r"`([\w-]+)`", " ".join(of_features)))
    assert named == set(project["optional-dependencies"]) - {"bench", "dev", "docs", "test-core"}


def test_the_commands_are_those_that_are_checked() -> None:
    assert TESTS in (ROOT / ".ci" / "run").read_text()
    assert (ROOT / "examples" / "train_digits.py").is_file()


def test_the_layout_in_contributing_names_every_entry_of_the_package() -> None:
    layout = (ROOT / "CONTRIBUTING.md").read_text()
    entries = {
        f"`{path.name}/`" if path.is_dir() else f"`{path.name}`"
        for path in (ROOT / "gda").iterdir()
        if path.suffix == ".py" or any(path.glob("*.py"))
    } - {"`__init__.py`", "`__main__.py`"}
    assert {entry for entry in entries if entry not in layout} == set()
    assert len(entries) <= 14


def test_the_security_page_tells_of_every_server() -> None:
    servers = re.compile(r"Server\)|\.listen\(|create_server|start_server\(")
    files = [path for path in (ROOT / "gda").rglob("*.py") if servers.search(path.read_text())]
    assert {path.parent.name for path in files} == {"transport", "exchange", "local_steps"}
    page = (ROOT / "SECURITY.md").read_text()
    assert "## The server of `gda.offer`" in page
    assert "## The servers of local steps" in page


def test_links_of_the_readme_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
