"""Trials of a fault: a sample in the usual suite, all of them in tests marked ``torture``.

A test that fails shows the seed of its sample, and the variable ``GDA_SEED`` repeats it. With
``--figures PAGE`` the run writes the results of all trials into that page.
"""

import datetime
import os
import platform
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings

import gda

Case = TypeVar("Case")

SEED = int(os.environ.get("GDA_SEED", random.SystemRandom().randrange(2**32)))

TRIALS = "trials"  # the name under which a report has the outcomes
FUZZED = "a manifest that Hypothesis wrote or changed"
PROPERTIES = "any valid input: a property that must hold (Hypothesis)"
FIGURES = re.compile(r"(?<=<!-- figures -->\n).*(?=<!-- end of figures -->)", re.DOTALL)


class Trials:
    """The trials of one test.

    Attributes:
      most: the number of trials that the test may make.
      chance: a source of random numbers that ``SEED`` and the name of the test determine.
      outcomes: how often each outcome was counted.
    """

    def __init__(self, most: int, name: str) -> None:
        self.most = most
        self.chance = random.Random(f"{SEED} {name}")
        self.outcomes: dict[str, int] = {}

    def of(self, cases: Sequence[Case]) -> Sequence[Case]:
        """Return the cases in their order: all of them, or a sample."""
        if len(cases) <= self.most:
            return cases
        return [cases[i] for i in sorted(self.chance.sample(range(len(cases)), self.most))]

    def count(self, outcome: str) -> None:
        """Count a trial by its outcome."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1


def tried(fault: str, sample: int, full: int = sys.maxsize) -> pytest.MarkDecorator:
    """Parametrize a test over its fixture ``trials``: a sample, and all trials for ``torture``."""
    every = pytest.param((fault, full), id="all", marks=pytest.mark.torture)
    params = [pytest.param((fault, sample), id="sample"), every]
    return pytest.mark.parametrize("trials", params, indirect=True)


@pytest.fixture
def trials(request: pytest.FixtureRequest) -> Trials:
    fault, most = request.param
    trials = Trials(most, request.node.name)
    request.node.user_properties.append((TRIALS, (fault, trials.outcomes)))
    print(f"GDA_SEED={SEED}")  # which pytest shows if the test fails
    return trials


def rarely(times: int) -> settings:
    """Give a property with slow examples a fraction of the examples of the profile."""
    return settings(max_examples=max(settings().max_examples // times, 5))


def often(most: int) -> settings:
    """Give a property with quick examples ``most`` of them under the torture profile."""
    usual = settings.get_profile("gda").max_examples
    return settings(max_examples=usual if settings().max_examples == usual else most)


# The page.


def add_figures(parser: pytest.Parser) -> None:
    parser.addoption("--figures", type=Path, help="the page that the figures of trials go into")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Count the examples of a property before its report is made."""
    if call.when == "call" and (said := getattr(item, "hypothesis_statistics", None)):
        fault = FUZZED if "fuzzed" in item.name else PROPERTIES
        held = sum(map(int, re.findall(r"(\d+) passing", said)))
        item.user_properties.append((TRIALS, (fault, {"held": held})))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    page = config.getoption("--figures")
    if page is None or config.pluginmanager.hasplugin("gda-process"):  # which ends beside others
        return
    outcomes: dict[str, Counter[str]] = {}
    failed: Counter[str] = Counter()
    for kind in ("passed", "failed"):
        for report in terminalreporter.getreports(kind):
            for fault, counts in [
                value for name, value in report.user_properties if name == TRIALS
            ]:
                outcomes.setdefault(fault, Counter()).update(counts)
                failed[fault] += kind == "failed"
    page.write_text(FIGURES.sub(lambda _: _table(outcomes, failed), page.read_text()))


def _table(outcomes: dict[str, Counter[str]], failed: Counter[str]) -> str:
    lines = [
        f"{datetime.date.today()}, gda {gda.__version__}, JAX {version('jax')}, Python "
        f"{platform.python_version()}, {platform.system()} {platform.machine()} with "
        f"{os.cpu_count()} cores.\n",
        "| fault | trials | outcomes | failed tests |",
        "|---|---|---|---|",
    ]
    for fault, counts in sorted(outcomes.items()):
        said = ", ".join(f"{outcome} {count:,}" for outcome, count in counts.most_common())
        lines.append(f"| {fault} | {counts.total():,} | {said} | {failed[fault]} |")
    return "\n".join(lines) + "\n"
