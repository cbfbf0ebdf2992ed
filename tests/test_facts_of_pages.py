"""Checks of pages: their lists are complete."""

import re
import subprocess
from pathlib import Path

import gda.cli
import gda.launch.__main__

ROOT = Path(__file__).parents[1]
PUBLIC = (ROOT / "tests" / "public_api.txt").read_text()


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def test_every_public_error_is_explained() -> None:
    errors = re.findall(r"^class (\S+) < .*\bException\b", PUBLIC, re.M)
    assert errors
    assert [
        name for name in [*errors, "gda.LayoutUnknownError"] if name not in page("errors")
    ] == []


def test_every_strategy_is_on_the_page_of_testing() -> None:
    names = re.findall(r"^def gda\.testing\.strategies\.(\w+)\(", PUBLIC, re.M)
    assert names
    assert [name for name in names if f"| `{name}(" not in page("testing")] == []


def test_every_option_of_the_launcher_is_on_the_page_of_many_hosts() -> None:
    options = {name for name, *_ in gda.launch.__main__._OPTIONS}
    assert {name for name in options if f"| `{name} " not in page("many-hosts")} == set()


def test_bash_completes_every_command() -> None:
    (lines,) = re.findall(r"```bash\n(commands=.*?)```", page("planning"), re.S)
    names = [re.sub("^add_", "", add.__name__) for add in gda.cli._COMMANDS]
    for typed, expected in [("", names), ("ro", ["rollback"])]:
        # The words that the line gives, as bash completes them.
        script = f"{lines}eval set -- $(complete -p gda)\n" + f'compgen -W "$5" -- "{typed}"'
        shell = ["bash", "--norc", "-c", script]
        found = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
        assert found.split() == expected


def test_every_page_that_the_code_names_exists() -> None:
    named = {
        (str(path.relative_to(ROOT)), name)
        for path in (ROOT / "gda").rglob("*.py")
        for name in re.findall(r"[\w./-]+\.md\b", path.read_text())
    }
    assert "docs/limits.md" in {name for _, name in named}
    assert [(path, name) for path, name in sorted(named) if not (ROOT / name).exists()] == []
