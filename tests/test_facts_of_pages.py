"""Checks of pages: their lists are complete, and their figures were measured."""

import re
from pathlib import Path

import pytest
from measured import figures_of, is_in

import gda.launch.__main__

ROOT = Path(__file__).parents[1]
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text()
PUBLIC = (ROOT / "tests" / "public_api.txt").read_text()

pytestmark = pytest.mark.no_jax


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def test_every_figure_of_the_benchmarks_was_measured() -> None:
    figures = figures_of(page("benchmarks"))
    assert figures
    assert [figure for figure in figures if not is_in(figure, RESULTS)] == []


def test_the_benchmarks_have_every_line_that_misses_its_target() -> None:
    missed = [line.split("|") for line in RESULTS.splitlines() if line.endswith("| **no** |")]
    ratios = [cells[5].split()[0] for cells in missed]
    assert ratios
    text = page("benchmarks")
    assert [each for each in ratios if not re.search(rf"(?<![\d.,]){each}(?!\d)", text)] == []


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
