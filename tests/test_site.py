"""The documentation site: every public name with an example, pictures, and nothing fetched."""

import doctest
import importlib
import inspect
import re
import sys
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from page_blocks import blocks_of
from public_api import MODULES, public_names

import gda

pytestmark = pytest.mark.docs

DOCS = Path(__file__).parents[1] / "docs"
CONFIGURATION = (DOCS.parent / "mkdocs.yml").read_text()
NAVIGATION = re.findall(r": ([\w/-]+\.md)$", CONFIGURATION, re.MULTILINE)
API = "\n".join((DOCS / page).read_text() for page in NAVIGATION if page.startswith("api/"))
_NAME = re.compile(r"^::: (\S+)$", re.MULTILINE)


def named(name: str) -> Any:
    """Return what a name of gda stands for."""
    return attrgetter(name.partition(".")[2])(gda) if "." in name else gda


PUBLIC = {
    f"{module}.{name}": getattr(named(module), name)
    for module in MODULES
    for name in public_names(named(module))
}


def hook(name: str) -> ModuleType:
    """Import a module of docs/hooks as mkdocs does."""
    sys.path.insert(0, str(DOCS / "hooks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


# The API reference.


def test_every_public_name_is_there_once_and_in_the_order_of_all() -> None:
    names = _NAME.findall(API)
    assert set(PUBLIC) - set(names) == set(), "these are missing in docs/api"
    assert set(names) - set(PUBLIC) == set(), "these are not public"
    for module in MODULES:
        of_module = [name for name in names if name.rpartition(".")[0] == module]
        assert of_module == [f"{module}.{name}" for name in public_names(named(module))]


def test_every_public_name_has_an_example() -> None:
    without = set()
    parts = _NAME.split(API)
    for name, below in zip(parts[1::2], parts[2::2], strict=True):
        # An alias has no docstring of its own, and a program of many processes cannot run in one.
        text = below if name == "gda.Index" else inspect.getdoc(PUBLIC[name]) or ""
        if not isinstance(PUBLIC[name], ModuleType) and not re.search(r">>> |::\n", text):
            without.add(name)
    assert without == set(), "these have no example"


def test_every_page_is_in_the_navigation() -> None:
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert pages <= set(NAVIGATION)


def test_the_front_page_finds_every_page_of_the_guide() -> None:
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "index.md").read_text()))
    guide = {page for page in NAVIGATION if "/" not in page} - {"index.md"}
    assert guide - listed == set()


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{page}" for page in NAVIGATION)])
def test_code_fits_its_column(page: str) -> None:
    # Of an output, a line that is longer is wrapped, because whitespace is normalised. A table of
    # gda that cannot be has the comment above it.
    lines = (DOCS.parent / page).read_text(encoding="utf-8").splitlines()
    offenders = []
    for language, text, first in blocks_of("\n".join(lines)):
        is_session = text.startswith(">>> ")
        for number, line in enumerate(text.splitlines(), start=first):
            is_output = not line.startswith((">>> ", "... ")) if is_session else language == "text"
            if len(line) > (80 if is_output else 76) and lines[first - 4] != "<!-- wide -->":
                offenders.append(f"{page}:{number}: {len(line)} characters")
    assert not offenders, "\n".join(["longer than 76, or 80 of an output:", *offenders])


# The pages as they are built.


def test_the_picture_of_the_front_page_is_one_that_gda_draws() -> None:
    quarters = [row // 2 * 2 + column // 2 for row in range(4) for column in range(4)]
    sizes = {"data": 4, "model": 4}
    grid = gda.ShardGrid((4096, 8192), sizes, ("data", "model"), process_of=quarters)
    picture = DOCS / "pictures" / "hosts.svg"
    assert picture.read_text() == gda.show.svg(grid, dtype="bfloat16") + "\n"


@pytest.mark.parametrize("name", ["doctests", "gallery", "llms", "offline"])
def test_examples_of_the_hooks_hold(name: str) -> None:
    if name in {"doctests", "llms"}:
        pytest.importorskip("griffe", reason="the extra docs is not installed")
    results = doctest.testmod(hook(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0
    assert results.attempted > 0


@pytest.mark.parametrize("name", MODULES)
def test_the_reference_does_not_guide_through_modules(name: str) -> None:
    pytest.importorskip("griffe", reason="the extra docs is not installed")
    assert "in this order" not in hook("doctests").markdown_of(inspect.getdoc(named(name)) or "")


def test_the_gallery_has_pictures_as_text_and_as_drawings_on_light_and_on_dark() -> None:
    page = (DOCS / "pictures.md").read_text(encoding="utf-8")
    gallery = hook("gallery")
    layouts = page.count("<!-- picture: ")
    assert layouts >= 12
    drawn = gallery.with_pictures(page)
    assert "<!-- picture" not in drawn
    assert drawn.count('<div class="gda-light"><svg') == layouts
    assert drawn.count('<div class="gda-dark"><svg') == layouts
    assert drawn.count('<pre class="gda-text">') == layouts
    as_text = gallery.with_pictures(page, gallery.as_text)
    assert "<svg" not in as_text.replace('"<svg"', "")
    assert as_text.count("```text\n") == layouts


@pytest.mark.parametrize(
    ("page", "loads"),
    [
        ('<script src="https://x.org/a.js"></script>', True),
        ('<link rel="stylesheet" href="//x.org/a.css">', True),
        ('<p style="background: url(https://x.org/a.png)">', True),
        ('<pre class="mermaid">graph</pre>', True),
        ('<script src="assets/a.js"></script>', False),
        ('<img src="data:image/png;base64,xyz//a">', False),
    ],
)
def test_a_page_that_loads_something_is_found(page: str, loads: bool) -> None:
    assert len(hook("offline").fetched_by_html(page)) == loads


def test_the_citation_is_of_this_version() -> None:
    citation = (DOCS.parent / "CITATION.cff").read_text()
    assert f"\nversion: {gda.__version__}\n" in citation
