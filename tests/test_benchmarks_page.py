"""The page of benchmarks has measured figures, and every line that misses its target."""

import re
from pathlib import Path

from test_readme import figures_of, is_in

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text()


def test_every_figure_of_the_page_was_measured() -> None:
    assert figures_of(PAGE)
    assert [figure for figure in figures_of(PAGE) if not is_in(figure, RESULTS)] == []


def test_the_page_has_every_line_that_misses_its_target() -> None:
    missed = [line.split("|") for line in RESULTS.splitlines() if line.endswith("| **no** |")]
    ratios = [cells[5].split()[0] for cells in missed]
    assert ratios
    assert [each for each in ratios if not re.search(rf"(?<![\d.,]){each}(?!\d)", PAGE)] == []
