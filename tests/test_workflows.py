"""The workflows and hooks in .github and .pre-commit-config.yaml run commands that exist."""

import ast
import re
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.docs
ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs_of(workflow: Path) -> list[dict[str, Any]]:
    return [*yaml.safe_load(workflow.read_text())["jobs"].values()]


def commands() -> Iterator[str]:
    for workflow in WORKFLOWS:
        for job in jobs_of(workflow):
            for step in job["steps"]:
                if command := step.get("run"):
                    for session in job.get("strategy", {}).get("matrix", {}).get("session", [""]):
                        yield command.replace('"$SESSION"', session)


def sessions() -> set[str]:
    """Return the names of the sessions of nox, with the ids of the parametrized ones."""
    names = set()
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and "nox.session" in ast.unparse(
            node.decorator_list[0]
        ):
            ids = re.findall(r"id='(\w+)'", " ".join(map(ast.unparse, node.decorator_list)))
            names |= {node.name, *(f"{node.name}({each})" for each in ids)}
    return names


def test_each_command_exists() -> None:
    found = [*commands()]
    for command in found:
        words = command.split()
        assert words[0] in ("python", "gh", "test"), command
        if words[0] == "python":
            assert words[1] == "-m", command
            assert words[2] in ("pip", "nox") or find_spec(words[2]), command
        if words[1:3] == ["-m", "nox"]:
            assert words[4] in sessions(), command
    run = {command.split()[4] for command in found if " nox -s " in command}
    # The parts of .ci/run, and the suite on each version of JAX.
    parts = set(re.findall(r"nox\" -s '?([\w()]+)", (ROOT / ".ci" / "run").read_text()))
    assert parts | {each for each in sessions() if each.startswith("tests(")} <= run


def test_supported_pythons_are_installed() -> None:
    (job,) = jobs_of(ROOT / ".github" / "workflows" / "ci.yml")
    (versions,) = [each["with"]["python-version"] for each in job["steps"] if "setup" in str(each)]
    classified = [re.search(r"3\.\d+$", each) for each in PROJECT["classifiers"]]
    assert versions.split() == [each[0] for each in classified if each]


def test_each_hook_runs_a_tool_of_the_extra_dev() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    tools = [re.split("[=>[]", each)[0] for each in PROJECT["optional-dependencies"]["dev"]]
    programs = {"lint-imports": "import-linter", "python": "nox"}
    for hook in local["hooks"]:
        program = Path(hook["entry"].split()[0]).name
        assert programs.get(program, program) in tools
