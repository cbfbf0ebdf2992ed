"""Reports: one list of lines and tables, as text and as HTML."""

from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

import gda
from gda.show.report import Report, Table


class Example(Report):
    def _parts(self) -> list[str | Table]:
        rows = [["name", "size"], ["<b>\x1b[2J", "1"], ["w", "16"]]
        return ["<head>", "", Table(rows, {"size"}), Table([["a:", "x"]], has_names=False)]


def test_text_and_page_have_the_same_parts() -> None:
    assert str(Example()).splitlines() == [
        *("<head>", "", "name        size", r"<b>\x1b[2J     1", "w             16", "a:  x")
    ]
    page = ElementTree.fromstring(Example()._repr_html_())
    assert [each.text for each in page.iter("p")] == ["<head>"]
    names, values = page.findall(".//th"), page.findall(".//td")
    assert [each.text for each in names] == ["name", "size"]
    assert [each.text for each in values] == ["<b>\ufffd[2J", "1", "w", "16", "a:", "x"]
    right = [each.text for each in (*names, *values) if each.get("class") == "gda-right"]
    assert right == ["size", "1", "16"]


@pytest.mark.parametrize("name", ["inspect", "diff", "memory", "rehearse", "layouts"])
def test_a_notebook_shows_every_report_with_its_tables(name: str, tmp_path: Path) -> None:
    tree = {"w": jax.numpy.ones((2, 3)), "step": 7}
    gda.checkpoint.save(tmp_path, tree)
    made: Any = {
        "inspect": lambda: gda.checkpoint.inspect(tmp_path),
        "diff": lambda: gda.checkpoint.diff(tmp_path, {"w": np.ones((2, 3)), "<step>": 8}),
        "memory": lambda: gda.memory(tree=tree),
        "rehearse": lambda: gda.rehearse(lambda x: x @ x.T, tree["w"]),
        "layouts": lambda: gda.layouts(tree),
    }
    report = made[name]()
    page = report._repr_html_()
    root = ElementTree.fromstring(page)
    assert root.findall(".//table")
    assert "http" not in page
    # Each word of the text, in order.
    shown = " ".join(t for each in root.findall("./div") for t in each.itertext())
    assert unescape(" ".join(shown.split())).split() == str(report).split()
