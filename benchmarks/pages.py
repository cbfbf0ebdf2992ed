"""Pages and pictures that users read, of the results alone: six pictures, two tables, RESULTS.md.

In a page, what is written here stands between two comments, such as ``<!-- runs -->`` and
``<!-- end -->``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.report import amount, comparison, render, table
from benchmarks.results import Results, machines_of
from benchmarks.work import Work
from gda.show.drawing.colors import colors_of
from gda.show.drawing.sheet import Sheet, number, text_width

ROOT = Path(__file__).parents[1]
GUIDE, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"

# Ways that do less than the work that they stand beside; each name is one, or begins like one.
_LESS = (
    *("raw read", "raw write", "memcpy", "CRC-32C", "one copy of", "loopback", "json.loads"),
    *("devices_indices_map of a new NamedSharding, no replica ids", "8 tuples of slices"),
    *("op_sharding_to_indices over an AbstractMesh (private), no", "64 objects", "s.data of"),
    *("each block read once", "the step alone", "their bytes", "their paths", "python -c"),
    *("a shape that divides", "GlobalArray", "import jax", "XOR of all bits", "views of"),
    *("the same collectives", "the same reads", "TensorStore, each chunk decoded", "plain sockets"),
)
_HIDDEN = (
    *("memcpy into fresh memory", "CRC-32C"),
    "devices_indices_map of a new NamedSharding, no replica ids",
)

# Measured to choose between ways of building gda, not to compare it.
_INSIDE = ("lists", "make_array_from_callback")

_SHORTER = [
    ("(, same callback)?(, sharding made before)?$| of blocks that .*|, make_array.*", ""),
    ("make_array_from_callback, callback reads with ([\\w.]*).*", r"JAX by \1"),
    ("^make_array", "jax.make_array"),
    ("_to_global_array", "\N{HORIZONTAL ELLIPSIS}"),
    (" of a new NamedSharding, equal indices counted as quickly .*", " and a quick loop"),
    (" of a new NamedSharding, equal indices counted as JAX does", ", JAX's count"),
]

_OTHER = "512 MiB, 2 arrays onto another layout"
_SMALL = "1,000 arrays of 64 x 64"
_FILES = (
    "from_callback, 4 replicas of each of 16 blocks, callback reads 1 MiB from a file into memory "
    "that is aligned"
)
_INDICES = "all indices and replica ids, cold, 1,024 devices"
_JITTED = "a jitted call with 100 GlobalArrays as input, one device"

PICTURES = {
    "restore": {f"restore {_OTHER}": "Restore 512 MiB onto another layout"},
    "memory": {
        f"memory beyond the arrays, restore {_OTHER}": "Host memory to restore 512 MiB",
        "memory beyond the arrays, save 512 MiB, 2 arrays": "Host memory to save 512 MiB",
    },
    "save": {"save 512 MiB, 2 arrays": "Save 512 MiB until it is durable"},
    "small": {
        f"restore {_SMALL} onto the layout it had": "Restore 1,000 small arrays",
        f"save {_SMALL}": "Save 1,000 small arrays until they are durable",
    },
    "build": {
        _FILES: "16 blocks of 1 MiB from files, each on 4 devices",
        "into=True, 8 MiB blocks from files, 8 own blocks": "8 blocks of 8 MiB, with into=True",
        _INDICES: "Indices and replica ids of 1,024 devices",
    },
    "step": {
        _JITTED: "A jitted call with 100 containers",
        "gda.jit: GlobalArray in and out, one device": "A call of gda.jit with one container",
        "from_process_local of a batch of 8 leaves, a step, 4 processes": (
            "A batch of 8 arrays, in 4 processes"
        ),
        "from_callback, a fresh 64 KiB block per device, aligned, 8 devices": (
            "New blocks of 64 KiB for 8 devices, from a callback"
        ),
    },
}
"""The works of each picture, and their titles."""

_TITLES = {work: title for works in PICTURES.values() for work, title in works.items()}
# The rows of the README.
_ROWS = [
    *(f"restore {_OTHER}", f"memory beyond the arrays, restore {_OTHER}"),
    *(f"restore {_SMALL} onto the layout it had", "save 512 MiB, 2 arrays"),
    *(_FILES, _INDICES, _JITTED),
]


def _is_measured(results: Results, work: Work) -> bool:
    return work.name in results and not results[work.name].reason


def is_less(way: str) -> bool:
    """Return whether a way does less than the work beside which it was measured."""
    return way.startswith(_LESS)


def ordered_ways(results: Results, work: Work) -> list[str]:
    """Return gda, its rivals from the fastest on, and then what does less."""
    ways = results[work.name].ways
    rivals = (way for way in ways if way not in (work.ours, *_HIDDEN))
    return [work.ours, *sorted(rivals, key=lambda way: (is_less(way), ways[way].median))]


def _compared(results: Results, work: Work, way: str) -> tuple[str, str, str]:
    """Return the short name of a way, its figure, and in words how gda compares with it."""
    ours, figures = results[work.name].ways[work.ours], results[work.name].ways[way]
    name = way
    for long, short in _SHORTER:
        name = re.sub(long, short, name)
    words = "" if way == work.ours else comparison(work.unit, ours, figures)
    return name, amount(figures, work.unit, with_quartiles=False), words


# Pictures.

_WIDTH, _THICKNESS, _PITCH, _GAP = 240, 14, 21, 10


def picture_of(results: Results, works: Sequence[Work], titles: Mapping[str, str]) -> str:
    """Return the ways of some works as bars; of each work, the longest has the whole width."""
    sheet, y, said = Sheet(), 0.0, []
    works = [work for work in works if _is_measured(results, work)]
    ways = {work: ordered_ways(results, work) for work in works}
    names = [_compared(results, work, way)[0] for work in works for way in ways[work]]
    left = max((text_width(name, 12) for name in names), default=0) + _GAP
    for work in works:
        sheet.text(0, y, titles[work.name], size=14, is_bold=True)
        medians = {way: results[work.name].ways[way].median for way in ways[work]}
        for way, median in medians.items():
            y += _PITCH
            name, figure, words = _compared(results, work, way)
            is_ours = way == work.ours
            fill = f'fill="{colors_of(1)[0]}"' if is_ours else 'fill-opacity=".4"'
            if is_less(way):
                fill = 'fill="none" stroke="currentColor" stroke-opacity=".6"'
            width = max(_WIDTH * median / max(medians.values()), 1)
            sheet.text(left - _GAP, y, name, anchor="end", is_bold=is_ours)
            sheet.add(
                f'<rect x="{number(left)}" y="{number(y - 11)}" width="{number(width)}" '
                f'height="{_THICKNESS}" rx="2" {fill}/>'
            )
            sheet.text(left + width + _GAP, y, figure, detail=words and f"gda: {words}")
            said.append(f"{titles[work.name]}, {name}: {figure}")
        y += 2 * _PITCH
    return sheet.document("; ".join(said))


# Pages.


def pages(results: Results, sections: Mapping[str, Sequence[Work]]) -> dict[Path, str]:
    """Return the text of each file that the results decide."""
    works = {work.name: work for each in sections.values() for work in each}
    texts = {
        ROOT / "docs" / "pictures" / f"bench-{name}.svg": (
            f"{picture_of(results, [works[each] for each in titles], titles)}\n"
        )
        for name, titles in PICTURES.items()
    }
    images = "".join(
        f"![{'; '.join(titles.values())}](../docs/pictures/bench-{name}.svg)\n\n"
        for name, titles in PICTURES.items()
    )
    texts[ROOT / "benchmarks" / "RESULTS.md"] = render(results, sections, images, quick=False)
    machines = "\n".join(f"- {machine}" for machine in machines_of(results))
    guide = with_losses(GUIDE.read_text("utf-8"), results, works.values())
    texts[GUIDE] = _with_block(guide, "runs", f"\n{machines}\n")
    rows = [_row(results, works[name]) for name in _ROWS if _is_measured(results, works[name])]
    lines = table(["work", "gda", "fastest rival", "in comparison"], rows)
    texts[README] = _with_block(
        README.read_text("utf-8"), "speed:begin", "\n".join(["", *lines, ""])
    )
    return texts


def _row(results: Results, work: Work) -> list[str]:
    ours, fastest, *_ = ordered_ways(results, work)
    name, figure, words = _compared(results, work, fastest)
    return [_TITLES[work.name], _compared(results, work, ours)[1], f"{figure}, {name}", words]


def _with_block(page: str, name: str, block: str) -> str:
    """Return the page with this block between its comment and the next one."""
    before, begin, rest = page.partition(f"<!-- {name} -->")
    return f"{before}{begin}{block}{rest[rest.index('<!-- ') :]}"


def losses(results: Results, works: Iterable[Work]) -> Iterator[tuple[Work, str]]:
    """Yield each work in which a way that does the same is faster than gda, and that way."""
    for work in works:
        if _is_measured(results, work) and work.ours not in _INSIDE:
            ways = results[work.name].ways
            same = (way for way in ways if not is_less(way))
            fastest = min(same, key=lambda way: ways[way].median)
            if fastest != work.ours:
                yield work, fastest


def with_losses(page: str, results: Results, works: Iterable[Work]) -> str:
    """Return the page with the largest loss after each comment ``<!-- slower: beginning -->``.

    A comment is for the works whose names begin so.

    Raises:
      ValueError: no comment is for a work in which a rival is faster.
    """
    kinds: dict[str, tuple[float, str]] = dict.fromkeys(
        re.findall("<!-- slower: (.*?) -->", page), (0.0, "none now")
    )
    for work, way in losses(results, works):
        kind = next((each for each in kinds if work.name.startswith(each)), None)
        if kind is None:
            raise ValueError(f"{way!r} is faster in {work.name!r}: docs/benchmarks.md omits it")
        (_, ours, _), (name, figure, words) = (
            _compared(results, work, each) for each in (work.ours, way)
        )
        ways = results[work.name].ways
        said = f"{work.name}, {ours}; {name}, {figure}; {words}"
        kinds[kind] = max(kinds[kind], (ways[work.ours].median / ways[way].median, said))
    for kind, (_, said) in kinds.items():
        page = _with_block(page, f"slower: {kind}", f"\n  *{said}* ")
    return page
