"""Pictures in Chromium: positions."""

import contextlib
import html
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gda import ShardGrid
from gda.show.markup import html_of
from gda.show.subject import Subject

pytestmark = pytest.mark.docs

Rect = dict[str, float]


def subject(
    shape: tuple[int, ...], mesh: dict[str, int], spec: tuple[Any, ...], devices_per_process: int
) -> Subject:
    num_devices = math.prod(mesh.values())
    process_of = np.arange(num_devices) // devices_per_process
    grid = ShardGrid(shape, mesh, spec, pad=True, process_of=process_of)
    ids = np.arange(num_devices)
    return Subject(
        grid, dtype=np.dtype("float32"), device_kind="TPU", device_ids=ids, kind="GlobalArray"
    )


XY = {"x": 4, "y": 2}
LAYOUTS = {
    "rectangle": subject((8, 2), XY, ("x", "y"), 8),
    "wide": subject((4096, 16384), {"data": 4, "model": 8}, ("data", "model"), 8),
    "long_names": subject((8, 8), {"w" * 40: 2, "m" * 40: 4}, ("w" * 40, "m" * 40), 4),
    "replicated": subject((8, 2), XY, ("x",), 4),
    "in_several_processes": subject((512, 512), {"x": 4, "y": 4}, ("y",), 4),
    "padded": subject((50, 3), XY, ("x", "y"), 4),
    "box": subject((8, 16, 32), XY, (None, "y", "x"), 2),
    "layers": subject((8, 16, 32), {"x": 2, "y": 2, "z": 2}, ("x", "y", "z"), 4),
    "boxes": subject((4, 8, 128, 64), XY, ("x", None, "y"), 2),
    "boxes_and_layers": subject((32, 16, 1024, 64), {"x": 8, "y": 4}, ("x", "y"), 4),
    "many_processes": subject((64, 64), {"x": 16, "y": 2}, ("x", "y"), 1),
    "true_4096": subject((65536, 8192), {"x": 64, "y": 64}, ("x", "y"), 8),
    "all_folded": subject((64,) * 4, {"x": 16, "y": 64, "z": 16}, ("x", "y", "z"), 8),
}

# Of each picture: its blocks by face, and its texts.
MEASURE = """
const rect = (e) => {
  const {left, top, right, bottom} = e.getBoundingClientRect();
  return {left, top, right, bottom};
};
const answer = {};
for (const section of document.querySelectorAll("section")) {
  const svg = section.querySelector("svg");
  answer[section.id] = {
    svg: rect(svg),
    table: rect(section.querySelector("table")),
    faces: [...svg.querySelectorAll(".gda-blocks")].map((face) => ({
      outline: rect(face.parentNode.querySelector(".gda-outline")),
      blocks: [...face.querySelectorAll("title")].map((title) => rect(title.parentNode)),
    })),
    sides: [...svg.querySelectorAll(".gda-side")].map(rect),
    labels: [...svg.querySelectorAll(".gda-labels text")].map(rect),
    texts: [...svg.querySelectorAll("text")].map(
      (text) => ({...rect(text), text: text.textContent})),
    keys: [...svg.querySelectorAll(".gda-key")].map(rect),
  };
}
return answer;
"""


PAGE = """<!doctype html><html><head><meta charset="utf-8"></head>
<body>{body}<script type="application/json" id="measured"></script>
<script>addEventListener("load", () => {{
  const answer = (() => {{ {script} }})();
  document.getElementById("measured").textContent = JSON.stringify(answer);
}})</script></body></html>"""

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--virtual-time-budget=20000", "--dump-dom", "--window-size=1200,900"),
)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The places of all parts of the pictures, as headless Chromium lays them out."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        reason = f"no browser to render in: none of {', '.join(BROWSERS)} is installed"
        if os.environ.get("GDA_BROWSER") == "required":
            pytest.fail(f"{reason}, and GDA_BROWSER=required")
        pytest.skip(reason)
    sections = [f'<section id="{name}">{html_of(each)}</section>' for name, each in LAYOUTS.items()]
    folder: Path = tmp_path_factory.mktemp("page")
    page = folder / "page.html"
    page.write_text(PAGE.format(body="".join(sections), script=MEASURE), encoding="utf-8")
    # Chromium is several processes, which all end with their session.
    with subprocess.Popen(
        [browser, *OPTIONS, f"--user-data-dir={folder / 'profile'}", page.as_uri()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    found = re.search(r'id="measured">(.+?)</script>', output.decode(), re.DOTALL)
    assert found is not None, f"the browser rendered nothing: {errors.decode()[-2000:]}"
    return json.loads(html.unescape(found[1]))


@pytest.fixture(params=LAYOUTS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def overlap(one: Rect, other: Rect) -> float:
    """Return how far two rectangles reach into each other, in pixels; 0 if they do not."""
    across = min(one["right"], other["right"]) - max(one["left"], other["left"])
    down = min(one["bottom"], other["bottom"]) - max(one["top"], other["top"])
    return max(min(across, down), 0)


def is_inside(inner: Rect, outer: Rect, slack: float = 0.1) -> bool:
    return (
        inner["left"] >= outer["left"] - slack
        and inner["top"] >= outer["top"] - slack
        and inner["right"] <= outer["right"] + slack
        and inner["bottom"] <= outer["bottom"] + slack
    )


def test_each_label_is_inside_a_block_of_its_own(pictures: dict[str, Any], name: str) -> None:
    picture = pictures[name]
    blocks = [block for face in picture["faces"] for block in face["blocks"]]
    for label in picture["labels"]:
        assert sum(is_inside(label, block) for block in blocks) == 1, label
    for one, other in itertools.combinations(picture["labels"], 2):
        assert overlap(one, other) < 0.5


@pytest.mark.parametrize("name", ["rectangle", "wide", "replicated", "box", "layers", "boxes"])
def test_blocks_with_room_have_labels(pictures: dict[str, Any], name: str) -> None:
    lines = 1 if LAYOUTS[name].grid.num_replicas == 1 else 2
    assert len(pictures[name]["labels"]) == lines * LAYOUTS[name].grid.num_shards


def test_no_texts_overlap(pictures: dict[str, Any], name: str) -> None:
    picture = pictures[name]
    for one, other in itertools.combinations(picture["texts"], 2):
        # Of line boxes, which are higher than the letters in them.
        assert overlap(one, other) < 4, (one, other)
    inside = {tuple(label.values()) for label in picture["labels"]}
    outer = [text for text in picture["texts"] if tuple(list(text.values())[:4]) not in inside]
    drawn = [face["outline"] for face in picture["faces"]] + picture["keys"]
    for text, thing in itertools.product(outer, drawn):
        assert overlap(text, thing) < 3, (text, thing)


def test_nothing_sticks_out_of_the_drawing(pictures: dict[str, Any], name: str) -> None:
    picture = pictures[name]
    outlines = [face["outline"] for face in picture["faces"]]
    for thing in [*picture["texts"], *picture["keys"], *picture["sides"], *outlines]:
        assert is_inside(thing, picture["svg"]), thing


def test_the_table_is_beside_the_drawing(pictures: dict[str, Any], name: str) -> None:
    svg, table = pictures[name]["svg"], pictures[name]["table"]
    assert table["left"] >= svg["right"]
    assert abs(table["top"] - svg["top"]) < 20
    assert table["right"] < 1200
