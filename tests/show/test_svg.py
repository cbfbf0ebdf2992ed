import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, holding

import gda
from gda import ShardGrid
from gda.layout.text import format_processes
from gda.show.drawing import svg_of
from gda.show.drawing.faces import COLORS, SHARED, folded
from gda.show.markup import html_of
from gda.show.subject import Subject, subject_of
from gda.testing.strategies import mesh_shapes, sharded_cases

SVG = "{http://www.w3.org/2000/svg}"
XY = {"x": 4, "y": 2}
KILOBYTE = 1000


def subject(
    shape: tuple[int, ...],
    mesh: dict[str, int],
    spec: Any,
    process_of: Any = None,
    dtype: str | None = "float32",
) -> Subject:
    grid = ShardGrid(shape, mesh, spec, process_of=process_of)
    return Subject(grid, dtype=None if dtype is None else np.dtype(dtype))


@dataclass(frozen=True)
class Block:
    """A drawn block: where it is, its colour and its hover text."""

    face: int
    box: tuple[float, float, float, float]
    color: str
    title: str

    @property
    def area(self) -> float:
        return self.box[2] * self.box[3]


def drawn_blocks(svg: str, kind: str = "blocks") -> list[Block]:
    """Return what is drawn from the front, or on the sides of boxes."""
    faces = [g for g in ElementTree.fromstring(svg).iter(f"{SVG}g") if g.get("class") == kind]
    return [block for face, group in enumerate(faces) for block in _blocks(face, group)]


def blocks_of(svg: str) -> list[Block]:
    return drawn_blocks(svg, "gda-blocks")


def _blocks(face: int, group: ElementTree.Element) -> Iterator[Block]:
    for rect in group.iter(f"{SVG}rect"):
        x, y, width, height = (float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
        title = rect.findtext(f"{SVG}title", "")
        yield Block(face, (x, y, width, height), rect.attrib["fill"], title)


def texts_of(svg: str) -> list[str]:
    return ["".join(e.itertext()) for e in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def labels_of(svg: str) -> list[str]:
    groups = ElementTree.fromstring(svg).iter(f"{SVG}g")
    labels = next((g for g in groups if g.get("class") == "gda-labels"), ())
    return [label.text or "" for label in labels]


def facts_of(page: str) -> dict[str, str]:
    return dict(re.findall(r"<th scope=\"row\">(.*?)</th><td>(.*?)</td>", page))


def expected_titles(subject: Subject) -> list[str]:
    """Return the hover text of every block, put together device by device."""
    grid, process_of = subject.grid, subject.grid.process_of
    holders: dict[str, list[int]] = defaultdict(list)
    for device, index in enumerate(grid.indices()):
        slices = [":" if s.start is None else f"{s.start}:{s.stop}" for s in index]
        holders[f"[{', '.join(slices) or '()'}]"].append(device)
    titles = []
    for index, devices in holders.items():
        lines = [index]
        if len(devices) == 1:
            lines.append(f"device {devices[0]}")
        else:
            lines.append(", ".join(f"device {d} (replica {r})" for r, d in enumerate(devices)))
        if process_of is not None:
            lines.append(format_processes({int(process_of[d]) for d in devices}))
        if subject.dtype is not None:
            nbytes = math.prod(grid.shard_shape) * subject.dtype.itemsize
            lines.append(f"{nbytes} B on each device")
        titles.append("\n".join(lines))
    return titles


# Usual cases.


def test_a_matrix_is_blocks_with_their_devices() -> None:
    matrix = subject((8, 2), XY, ("x", "y"), [0] * 4 + [1] * 4)
    blocks = blocks_of(svg_of(matrix))
    assert [block.title for block in blocks] == expected_titles(matrix)
    assert blocks[3].title == "[2:4, 1:2]\ndevice 3\nprocess 0\n8 B on each device"
    assert blocks[3].box == (38, 75, 38, 75)


def test_colors_are_of_processes() -> None:
    blocks = blocks_of(svg_of(subject((8, 2), XY, ("x", "y"), [0, 1] * 4)))
    first, second = COLORS[:2]
    assert [block.color for block in blocks] == [first, second] * 4
    svg = svg_of(subject((8, 2), XY, ("x", "y")))
    assert all(block.color == COLORS[0] for block in blocks_of(svg))
    assert "process" not in svg


def test_replicas_are_counted_and_named() -> None:
    svg = svg_of(subject((8, 2), XY, ("x",)))
    assert labels_of(svg)[:2] == ["0, 1", "\xd72"]
    assert blocks_of(svg)[1].title.split("\n")[1] == "device 2 (replica 0), device 3 (replica 1)"
    assert "4 blocks of (2, 2), each on 2 devices" in texts_of(svg)
    many = svg_of(subject((4,), {"x": 64}, (), [0] * 32 + [1] * 32))
    assert labels_of(many) == ["0-63", "\xd764"]
    assert blocks_of(many)[0].title.split("\n")[1:3] == [
        "64 devices: device 0 (replica 0), device 1 (replica 1), …, device 63 (replica 63)",
        "processes 0, 1",
    ]


def test_blocks_of_several_processes_are_grey() -> None:
    grey = "grey: held by several processes"
    svg = svg_of(subject((64, 64), XY, ("y",), [0, 0, 0, 0, 1, 1, 2, 2]))
    assert {block.color for block in blocks_of(svg)} == {SHARED}
    assert grey in texts_of(svg)
    cells = svg_of(subject((8192,), {"x": 1024}, ("x",), np.arange(1024) // 4))
    assert {block.color for block in blocks_of(cells)} == {SHARED}  # each stands for 8 blocks
    alone = svg_of(subject((8192,), {"x": 1024}, ("x",), np.arange(1024) // 8))
    assert [block.color for block in blocks_of(alone)][:2] == [*COLORS[:2]]
    assert grey not in texts_of(alone)


def test_devices_have_the_names_of_the_mesh(auto_mesh: Mesh) -> None:
    g = cut(batch(8, 2), auto_mesh, P("x", "y"))
    svg = svg_of(subject_of(g))
    assert labels_of(svg) == [f"CPU {d.id}" for d in auto_mesh.devices.flat]
    assert blocks_of(svg)[0].title.split("\n")[1] == f"CPU {auto_mesh.devices.flat[0].id}"


def test_hover_texts_of_several_blocks_have_the_names_of_the_mesh() -> None:
    grid = ShardGrid((8192,), {"x": 1024}, ("x",))
    svg = svg_of(Subject(grid, device_kind="TPU", device_ids=1023 - np.arange(1024)))
    assert blocks_of(svg)[0].title == "[0:64], 8 blocks\nTPU 1016-1023"


def test_sides_name_their_size_and_axes() -> None:
    texts = texts_of(svg_of(subject((24, 7, 10), XY, (("y", "x"), None, None))))
    assert {"dimension 0: 24y, x: 8 \xd7 3", "7", "10"} <= {*texts}
    long = "tensor_parallel_axis"
    assert "8tensor_parallel…: 4 \xd7 2" in texts_of(svg_of(subject((8,), {long: 4}, (long,))))


def test_sides_out_of_proportion_are_said_to_be() -> None:
    assert "sides not to scale" in texts_of(svg_of(subject((10**6, 8), XY, ("x", "y"))))
    assert "sides not to scale" not in texts_of(svg_of(subject((8, 16), XY, ("x", "y"))))


def test_layers_are_boxes_of_their_own() -> None:
    cube = subject((4, 4, 4), {"x": 2, "y": 2, "z": 2}, ("x", "y", "z"))
    svg = svg_of(cube)
    assert [block.face for block in blocks_of(svg)] == [0] * 4 + [1] * 4
    assert [block.title for block in blocks_of(svg)] == expected_titles(cube)
    # Above and on the right of each there are two blocks.
    faces = [block.face for block in drawn_blocks(svg, "gda-side")]
    assert faces == sorted([*range(4)] * 2)
    assert {"[0:2, …]", "[2:4, …]", "dimension 0: 4x: 2 \xd7 2"} <= {*texts_of(svg)}


def test_padding_is_told() -> None:
    svg = svg_of(Subject(ShardGrid((5, 3), XY, ("x", "y"), pad=True)))
    assert {"with padding", "5 + 3", "3 + 1y: 2 \xd7 2"} <= {*texts_of(svg)}
    titles = [block.title for block in blocks_of(svg)]
    assert titles[1] == "[0:2, 2:3]\ndevice 1\n2 of 4 elements are padding"
    assert titles[6] == "[5:5, 0:2]\ndevice 6\n4 of 4 elements are padding"
    assert "padding" not in titles[0]


def test_of_many_boxes_some_are_left_out() -> None:
    texts = texts_of(svg_of(subject((64, 64, 8, 8), {"x": 64, "y": 32}, ("x", "y"))))
    assert "… 2,033 more" in texts
    assert "2,048 blocks of (1, 2, 8, 8)" in texts


def test_a_scalar_and_a_size_beyond_int64() -> None:
    svg = svg_of(subject((), XY, (), dtype="int8"))
    assert [block.title.split("\n")[0] for block in blocks_of(svg)] == ["[()]"]
    assert "1 block, on each of 8 devices" in texts_of(svg)
    huge = svg_of(subject((2**70, 3), XY, ("x",)))
    assert blocks_of(huge)[1].title.startswith(f"[{2**68}:{2**69}, :]\n")


# The page.


def test_the_table() -> None:
    page = html_of(subject((8, 2), XY, ("x",), [0] * 4 + [3] * 4))
    assert facts_of(page) == {
        "shape": "(8, 2)",
        "dtype": "float32",
        "mesh": "x=4,y=2: 8 devices, 2 processes",
        "spec": "P(&#x27;x&#x27;)",
        "blocks": "4 of (2, 2), each on 2 devices",
        "bytes": "16 B per device, 128 B in all, 64 B without replicas",
    }
    assert re.findall(r"\w+://[^\"]*", page) == ["http://www.w3.org/2000/svg"]
    assert 'role="img" aria-label="ShardGrid (8, 2) float32; mesh x=4,y=2: 8 devices, ' in page
    assert not re.search(r"<script|@import|url\(|<link|<img|\bid=|\bon\w+=", page)
    unknown = facts_of(html_of(subject((8, 2), XY, ("x",), dtype=None)))
    assert {*unknown} == {"shape", "mesh", "spec", "blocks"}


@pytest.mark.parametrize("name", ["<b>&\"'", "</svg><script>alert(1)</script>", "\x00\x1b\ud800"])
def test_names_are_escaped(name: str) -> None:
    page = html_of(subject((8, 2), {name: 4}, (name,)))
    assert name not in page
    assert "<script" not in page
    svg = page[page.index("<svg") : page.index("</svg>") + 6]
    ElementTree.fromstring(svg)
    page.encode()


# In a notebook.


def test_the_last_expression_of_a_cell_is_a_picture(mesh: Mesh) -> None:
    g = cut(batch(8, 2), mesh, P("x"))
    assert g._repr_html_() == html_of(subject_of(g))
    assert g.grid._repr_html_() == html_of(subject_of(g.grid))
    assert facts_of(g._repr_html_() or "")["bytes"].endswith("64 B without replicas")
    keys = jax.random.split(jax.random.key(0), 8)
    g = gda.GlobalArray.from_array(jax.device_put(keys, NamedSharding(mesh, P("x"))))
    assert facts_of(g._repr_html_() or "")["dtype"] == "key&lt;fry&gt;"


def test_text_is_shown_without_a_picture() -> None:
    for array in (holding(x) for x in (None, object())):
        assert array._repr_html_() is None
        repr(array)


# Large arrays. What they may take is in bytes of markup: it is kept in notebooks.


@pytest.mark.parametrize(
    ("shape", "mesh", "spec"),
    [
        ((10**6, 10**6), {"a": 1000, "b": 1000}, ("a", "b")),
        ((1 << 20, 4), {"a": 65536}, ("a",)),
        ((64, 64, 64), {"a": 64, "b": 64, "c": 4}, ("a", "b", "c")),
        ((64, 64, 64, 64), {"a": 8, "b": 64, "c": 8, "d": 16}, ("a", "b", "c", "d")),
        ((64, 64), {"a": 32, "b": 16, "c": 8}, ("a", "b")),
    ],
)
def test_pictures_stay_small(shape: tuple[int, ...], mesh: dict[str, int], spec: Any) -> None:
    num_devices = math.prod(mesh.values())
    svg = svg_of(subject(shape, mesh, spec, np.arange(num_devices) // 8))
    assert len(svg.encode()) < 220 * KILOBYTE
    grid = ShardGrid(shape, mesh, spec)
    assert any(text.startswith(f"{grid.num_shards:,} blocks of ") for text in texts_of(svg))


def test_a_folded_picture_has_the_blocks_of_each_cell() -> None:
    svg = svg_of(subject((256, 256), {"a": 256, "b": 256}, ("a", "b"), np.arange(65536) // 8))
    blocks = blocks_of(svg)
    assert sum(num_blocks(block) for block in blocks) == 65536
    assert blocks[0].title.split("\n")[:3] == [
        "[0:16, 0:16], 256 blocks",
        "devices 0-15, 256-271, … 3840-3855",
        "processes 0-1, 32-33, … 480-481",
    ]
    assert "each cell stands for 16 \xd7 16 of them" in texts_of(svg)


def num_blocks(block: Block) -> int:
    found = re.search(r"\], ([\d,]+) blocks\n", block.title)
    return int(found[1].replace(",", "")) if found else 1


# Properties.


@st.composite
def subjects(draw: st.DrawFn) -> Subject:
    """Grids of up to five dimensions, with processes in any order or without."""
    meshes = mesh_shapes(max_devices=64, axis_names=("x", "y", "z", "w"))
    case = draw(sharded_cases(meshes, max_dims=5))
    grid = case.grid
    process_of = None
    if draw(st.booleans()):
        number = st.integers(0, draw(st.sampled_from([1, 3, 40])))
        process_of = draw(st.lists(number, min_size=grid.num_devices, max_size=grid.num_devices))
    dtype = draw(st.sampled_from([None, "int8", "float32"]))
    return subject(case.global_shape, case.mesh_shape, case.spec, process_of, dtype)


@given(subjects())
def test_every_block_is_drawn_once_as_large_as_the_others_and_with_a_title(
    subject: Subject,
) -> None:
    page = html_of(subject)
    style = page[page.index("<style>") : page.index("</style>") + 8]
    root = ElementTree.fromstring(page.replace(style, "", 1))
    assert root.tag == "div"
    assert root.find(SVG + "svg") is not None
    svg = page[page.index("<svg") : page.index("</svg>") + 6]
    blocks = blocks_of(svg)
    titles = [block.title for block in blocks]
    if any(text.startswith("… ") for text in texts_of(svg)):
        # Some boxes or layers are left out, or only processes of the legend.
        assert len({*titles}) == len(titles) <= subject.grid.num_shards
    elif subject.grid.num_replicas <= 4:
        assert sorted(titles) == sorted(expected_titles(subject))
    else:
        first_lines = [title.split("\n")[0] for title in expected_titles(subject)]
        assert sorted(title.split("\n")[0] for title in titles) == sorted(first_lines)
    areas = [block.area for block in blocks]
    assert max(areas) - min(areas) <= 0.02 * max(areas)
    for face in {block.face for block in blocks}:
        boxes = [block.box for block in blocks if block.face == face]
        right, bottom = max(x + w for x, _, w, _ in boxes), max(y + h for _, y, _, h in boxes)
        assert sum(w * h for _, _, w, h in boxes) == pytest.approx(right * bottom, rel=1e-4)
        # Equally large and together as large as the face: so none covers another if all begin at
        # different places of one grid.
        assert len({(x, y) for x, y, _, _ in boxes}) == len(boxes)


@given(st.integers(1, 5000), st.integers(1, 100))
def test_folding_leaves_nothing_out(parts: int, most: int) -> None:
    edges = folded(parts, most)
    assert edges[0] == 0
    assert edges[-1] == parts
    assert len(edges) - 1 <= most
    sizes = np.diff(edges)
    assert (sizes[:-1] == sizes[0]).all()
    assert 0 < sizes[-1] <= sizes[0]
