"""Pictures in Chromium: positions and legibility."""

import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import measure

from gda import ShardGrid
from gda.show.drawing import svg_of
from gda.show.markup import html_of, html_table, report
from gda.show.subject import Subject

pytestmark = [pytest.mark.docs, pytest.mark.no_jax]

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

# Of each picture: its blocks by face, its texts, and of every text its contrast with what is
# behind it, by the formula of WCAG 2.
MEASURE = """
const rect = (e) => {
  const {left, top, right, bottom} = e.getBoundingClientRect();
  return {left, top, right, bottom};
};
const channels = (color) => {
  const found = color.match(/[\\d.]+/g).map(Number);
  return {rgb: found.slice(0, 3), alpha: found.length > 3 ? found[3] : 1};
};
const light = (rgb) => rgb
  .map((c) => c / 255)
  .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const contrast = (text, opacity, behind) => {
  const seen = text.rgb.map((c, i) => c * opacity + behind[i] * (1 - opacity));
  const [low, high] = [light(seen), light(behind)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
};
const page = channels(getComputedStyle(document.body).backgroundColor).rgb;
const behindLabel = (label) => {
  label.scrollIntoView();
  const seen = rect(label);
  const fills = document.elementsFromPoint((seen.left + seen.right) / 2,
    (seen.top + seen.bottom) / 2).map((e) => getComputedStyle(e).fill);
  return channels(fills.find((fill) => fill.startsWith("rgb"))).rgb;
};
const contrastOfSvg = (text) => {
  const inBlock = text.closest(".gda-labels");
  const parts = text.querySelectorAll("tspan").length ? text.querySelectorAll("tspan") : [text];
  const behind = inBlock ? behindLabel(text) : page;
  return Math.min(...[...parts].map((part) => {
    const style = getComputedStyle(part);
    return contrast(channels(style.fill), Number(style.fillOpacity), behind);
  }));
};
const contrastOfCell = (cell) => {
  const style = getComputedStyle(cell);
  return contrast(channels(style.color), Number(style.opacity), page);
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
    cells: [...section.querySelectorAll("th, td, caption")].map(rect),
  };
}
const contrasts = {};
for (const section of document.querySelectorAll("section")) {
  contrasts[section.id] = [
    ...[...section.querySelectorAll("svg text")].map(contrastOfSvg),
    ...[...section.querySelectorAll("th, td, caption")].map(contrastOfCell),
  ];
}
return {
  pictures: answer,
  contrasts,
  page,
  isDark: matchMedia("(prefers-color-scheme: dark)").matches,
};
"""


def section_of(name: str) -> str:
    return f'<section id="{name}">{html_of(LAYOUTS[name])}</section>'


def gallery() -> str:
    return "".join(map(section_of, LAYOUTS))


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measure(gallery(), MEASURE, tmp_path_factory.mktemp("light"))


@pytest.fixture(scope="module")
def dark(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measure(gallery(), MEASURE, tmp_path_factory.mktemp("dark"), is_dark=True)


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


def test_each_label_is_inside_a_block_of_its_own(light: dict[str, Any], name: str) -> None:
    picture = light["pictures"][name]
    blocks = [block for face in picture["faces"] for block in face["blocks"]]
    for label in picture["labels"]:
        assert sum(is_inside(label, block) for block in blocks) == 1, label
    for one, other in itertools.combinations(picture["labels"], 2):
        assert overlap(one, other) < 0.5


@pytest.mark.parametrize("name", ["rectangle", "wide", "replicated", "box", "layers", "boxes"])
def test_blocks_with_room_have_labels(light: dict[str, Any], name: str) -> None:
    lines = 1 if LAYOUTS[name].grid.num_replicas == 1 else 2
    assert len(light["pictures"][name]["labels"]) == lines * LAYOUTS[name].grid.num_shards


def test_no_texts_overlap(light: dict[str, Any], name: str) -> None:
    picture = light["pictures"][name]
    for one, other in itertools.combinations(picture["texts"], 2):
        # Of line boxes, which are higher than the letters in them.
        assert overlap(one, other) < 4, (one, other)
    inside = {tuple(label.values()) for label in picture["labels"]}
    outer = [text for text in picture["texts"] if tuple(list(text.values())[:4]) not in inside]
    drawn = [face["outline"] for face in picture["faces"]] + picture["keys"]
    for text, thing in itertools.product(outer, drawn):
        assert overlap(text, thing) < 3, (text, thing)


def test_nothing_sticks_out_of_the_drawing(light: dict[str, Any], name: str) -> None:
    picture = light["pictures"][name]
    outlines = [face["outline"] for face in picture["faces"]]
    for thing in [*picture["texts"], *picture["keys"], *picture["sides"], *outlines]:
        assert is_inside(thing, picture["svg"]), thing


def test_the_table_is_beside_the_drawing(light: dict[str, Any], name: str) -> None:
    svg, table = light["pictures"][name]["svg"], light["pictures"][name]["table"]
    assert table["left"] >= svg["right"]
    assert abs(table["top"] - svg["top"]) < 20
    assert table["right"] < 1200


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(request: pytest.FixtureRequest, scheme: str, name: str) -> None:
    page = request.getfixturevalue(scheme)
    assert page["isDark"] == (scheme == "dark")
    assert (sum(page["page"]) < 150) == page["isDark"]
    assert min(page["contrasts"][name]) >= 4.5


STYLES = """
return Object.fromEntries([...document.querySelectorAll("section")].map((section) => [
  section.id, [...section.querySelectorAll("svg, svg *, table, table *")].map((element) => {
    const style = getComputedStyle(element);
    const {width, height} = element.getBoundingClientRect();
    const sides = [width, height].map((side) => side.toFixed(1));
    return [element.tagName, ...sides, style.fill, style.color, style.fontSize,
      style.backgroundColor, style.textAlign, style.borderTop].join();
  })]));
"""


# The style of JupyterLab for every table in an output.
JUPYTERLAB = """<style>
.jp-RenderedHTMLCommon table {border-collapse: collapse; border-spacing: 0; border: none;
  color: #d00; font-size: 5px; table-layout: fixed; margin-left: auto; margin-right: auto;
  margin-bottom: 1em}
.jp-RenderedHTMLCommon td, .jp-RenderedHTMLCommon th {text-align: right; padding: 40px;
  max-width: none; border: 3px solid red}
.jp-RenderedHTMLCommon tbody tr:nth-child(odd) {background: #333}
</style>"""


def test_the_rules_of_a_notebook_do_not_change_the_table(tmp_path: Path) -> None:
    plain = section_of("wide")
    notebook = plain.replace('id="wide"', 'id="notebook"')
    page = f'{JUPYTERLAB}{plain}<div class="jp-RenderedHTMLCommon">{notebook}</div>'
    styles = measure(page, STYLES, tmp_path)
    assert styles["notebook"] == styles["wide"]


TABLES = (
    MEASURE.partition("const answer")[0]
    + """
return {
  page,
  contrasts: [...document.querySelectorAll("th, td, p")].map(contrastOfCell),
  table: rect(document.querySelector("table")),
};
"""
)


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_a_table_can_be_read_in_400_pixels(tmp_path: Path, is_dark: bool) -> None:
    name = "model.layers.0.post_attention_layernorm.weight"
    rows = [[name, "bfloat16[4096,4096]", "P('data', 'model')", "1", "256.0 KiB"]] * 3
    header = ["array", "", "layout", "replicas", "per device"]
    page = f'<div style="width:384px">{report(["3 arrays"], [html_table(header, rows)])}</div>'
    found = measure(page, TABLES, tmp_path, is_dark=is_dark)
    assert (sum(found["page"]) < 150) == is_dark
    assert min(found["contrasts"]) >= 4.5
    assert found["table"]["right"] <= 392


ALONE = """
const image = document.querySelector("img");
return {width: image.naturalWidth, height: image.naturalHeight};
"""


def test_a_drawing_is_an_image_of_its_own(tmp_path: Path) -> None:
    drawing = svg_of(LAYOUTS["layers"])
    (tmp_path / "drawing.svg").write_text(drawing, encoding="utf-8")
    size = measure('<img src="drawing.svg">', ALONE, tmp_path)
    sides = re.search(r' width="([\d.]+)" height="([\d.]+)"', drawing)
    assert sides is not None
    assert size == {"width": round(float(sides[1])), "height": round(float(sides[2]))}
