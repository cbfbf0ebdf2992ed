"""Pages and pictures that users read, of the results alone: six pictures, two tables, RESULTS.md.

In a page, what is written here stands between two comments, such as ``<!-- speed:begin -->``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import amount, comparison, render, table
from benchmarks.results import Results, Stats
from benchmarks.work import Work
from gda.show.drawing.colors import colors_of
from gda.show.drawing.sheet import Sheet, number, text_width

ROOT = Path(__file__).parents[1]

# Ways that do less than the work that they stand beside; each name is one, or begins like one.
_LESS = (
    *("raw read", "raw write", "memcpy", "CRC-32C", "one copy of", "loopback", "json.loads"),
    *("devices_indices_map of a new NamedSharding, no replica ids", "8 tuples of slices"),
    *("op_sharding_to_indices over an AbstractMesh (private), no", "64 objects", "s.data of"),
    *("each block read once", "the step alone", "their bytes", "their paths", "python -c"),
    *("a shape that divides", "GlobalArray", "import jax"),
)

_NAMES = {
    "Orbax's StandardCheckpointer": "Orbax",
    "Orbax's StandardCheckpointer, no OCDBT": "Orbax, no OCDBT",
    "Orbax v1, no OCDBT, no compression": "Orbax v1, no OCDBT, raw",
    "JAX's pytree_serialization": "JAX pytree_serialization",
    "TensorStore, zarr v3 with CRC-32C": "TensorStore by hand",
    "safetensors, safe_open and get_slice": "safetensors",
    "numpy.load with mmap_mode, a copy of each block": "NumPy, memory-mapped",
    "numpy.fromfile of raw files, and placement": "NumPy, raw files",
    "make_array_from_callback, same callback": "JAX make_array_from_callback",
    "each block read once into aligned memory, make_array_from_callback": "the least: reads once",
    "make_array_from_callback, same callback, sharding made before": "JAX make_array_from_callback",
    "make_array_from_callback, callback reads with numpy.fromfile, aligned by chance": (
        "JAX, numpy.fromfile"
    ),
    "make_array_from_callback, callback reads with readinto memory that is not aligned": (
        "JAX, readinto"
    ),
    "devices_indices_map of a new NamedSharding, equal indices counted as JAX does": (
        "JAX, devices_indices_map"
    ),
    "devices_indices_map of a new NamedSharding, equal indices counted as quickly as Python can": (
        "JAX and a loop of Python"
    ),
    "jax.jit of the raw array": "jax.jit, raw array",
    "raw read into fresh memory": "raw read, nothing placed",
    "raw write and fsync": "raw write and fsync",
    "multihost_utils.host_local_array_to_global_array": "JAX multihost_utils",
    "make_array_from_callback of blocks that are known": "JAX make_array_from_callback",
    "jax.make_array_from_process_local_data": "JAX from_process_local_data",
}
_HIDDEN = (
    *("memcpy into fresh memory", "CRC-32C"),
    "devices_indices_map of a new NamedSharding, no replica ids",
)

_OTHER = "512 MiB, 2 arrays onto another layout"
_SMALL = "1,000 arrays of 64 x 64"
_FILES = (
    "from_callback, 4 replicas of each of 16 blocks, callback reads 1 MiB from a file into memory "
    "that is aligned"
)
_INDICES = "all indices and replica ids, cold, 1,024 devices"
_FRESH = "from_callback, a fresh 64 KiB block per device, aligned, 8 devices"
_JITTED = "a jitted call with 100 GlobalArrays as input, one device"
_BATCH = "from_process_local of a batch of 8 leaves, a step, 4 processes"

PICTURES = {
    "restore": {f"restore {_OTHER}": "Restore 512 MiB onto another layout"},
    "memory": {
        f"memory beyond the arrays, restore {_OTHER}": "Host memory beyond the arrays, to restore",
        "memory beyond the arrays, save 512 MiB, 2 arrays": "Host memory beyond them, to save",
    },
    "save": {"save 512 MiB, 2 arrays": "Save 512 MiB until it is durable"},
    "small": {
        f"restore {_SMALL} onto the layout it had": "Restore 1,000 small arrays",
        f"save {_SMALL}": "Save 1,000 small arrays until they are durable",
    },
    "build": {
        _FILES: "Build from files: 16 blocks of 1 MiB, each on 4 devices",
        "into=True, 8 MiB blocks from files, 8 own blocks": "The same with into=True: 8 of 8 MiB",
        _INDICES: "Indices and replica ids of 1,024 devices",
    },
    "step": {
        _JITTED: "A jitted call with 100 containers",
        "gda.jit: GlobalArray in and out, one device": "A call of gda.jit, one container",
        _BATCH: "A batch of 8 arrays, in 4 processes",
        _FRESH: "A new block of 64 KiB for each of 8 devices",
    },
}
"""The works of each picture, and what it calls them."""

_ROWS = {
    f"restore {_OTHER}": "restore 512 MiB onto another layout",
    f"memory beyond the arrays, restore {_OTHER}": "host memory that this takes",
    f"restore {_SMALL} onto the layout it had": "restore 1,000 small arrays",
    "save 512 MiB, 2 arrays": "save 512 MiB, with checksums and fingerprints",
    _FILES: "16 blocks of 1 MiB from files, each on 4 devices",
    _INDICES: "indices and replica ids of 1,024 devices",
    _JITTED: "a jitted call with 100 containers",
}
"""The rows of the README."""

_LOSSES = {
    "save ": "A save computes a CRC-32C and a fingerprint of every byte.",
    "restore 1,000": "gda keeps a piece of a file for each block; safetensors keeps one file, "
    "without checksums, and only one process can write it.",
    "restore 512": "gda computes the CRC-32C of every byte.",
    "how long the caller": "gda copies the blocks before it returns, so that a step may donate "
    "them; on CPU the rivals read them later from where they are.",
    "memory beyond the arrays, save": "gda packs blocks before it writes them. On CPU the "
    "rival writes from the memory of the arrays, which it cannot on an accelerator.",
    "from_callback, a fresh": "gda looks at each block before JAX gets it: whether other code can "
    "still write to it. It disappears beside the read of a file.",
    "a jitted call": "JAX flattens each container as a node of a tree.",
    "gda.jit": "Each output is wrapped in a container.",
    "from_process_local": "JAX's function trusts its caller. gda checks the layout, and copies "
    "blocks that the caller could write to.",
    "host_local_array": "The same.",
    "the same, first time": "The first call for a mesh and a spec builds tables for the next ones.",
    "replicas compared": "gda computes fingerprints on each device, as it would on accelerators. "
    "The rival compares memory on one host.",
    "reshard of": "gda hands the move to JAX, after all processes have agreed on it.",
}
"""The works in which a rival is faster, by the beginning of their names, and the reason."""


# Pictures.


@dataclass(frozen=True)
class Bar:
    """A bar of a chart: a way, in a few words, and how gda compares with it."""

    name: str
    stats: Stats
    unit: str
    note: str = ""
    does_less: bool = False

    @property
    def amount(self) -> str:
        return amount(self.stats, self.unit, with_quartiles=False)


def is_less(way: str) -> bool:
    """Return whether a way does less than the work beside which it was measured."""
    return way.startswith(_LESS)


def _bars(results: Results, work: Work) -> list[Bar]:
    """Return gda, its rivals from the fastest on, and then what does less."""
    ways = results.works[work.name].ways
    ours = ways[work.ours]
    rivals = sorted(
        (way for way in ways if way not in (work.ours, *_HIDDEN)),
        key=lambda way: (is_less(way), ways[way].median),
    )
    return [Bar("gda", ours, work.unit)] + [
        Bar(
            _NAMES.get(way, way),
            ways[way],
            work.unit,
            f"gda: {comparison(work.unit, ours, ways[way])}",
            is_less(way),
        )
        for way in rivals
    ]


_WIDTH, _THICKNESS, _PITCH, _GAP = 260, 14, 21, 10


def picture_of(groups: Mapping[str, Sequence[Bar]]) -> str:
    """Return bars as SVG; in each group, the longest has the whole width."""
    sheet = Sheet()
    bars = [bar for group in groups.values() for bar in group]
    left = max(text_width(bar.name, 12) for bar in bars) + _GAP
    (color,) = colors_of(1)
    y = 0.0
    for title, group in groups.items():
        sheet.text(0, y, title, size=14, is_bold=True)
        longest = max(bar.stats.median for bar in group)
        for bar in group:
            y += _PITCH
            fill = f'fill="{color}"' if bar.name == "gda" else 'fill-opacity=".4"'
            if bar.does_less:
                fill = 'fill="none" stroke="currentColor" stroke-opacity=".6"'
            width = max(_WIDTH * bar.stats.median / longest, 1)
            sheet.text(left - _GAP, y, bar.name, anchor="end", is_bold=bar.name == "gda")
            sheet.add(
                f'<rect x="{number(left)}" y="{number(y - 11)}" width="{number(width)}" '
                f'height="{_THICKNESS}" rx="2" {fill}/>'
            )
            sheet.text(left + width + _GAP, y, bar.amount, detail=bar.note)
        y += 2 * _PITCH
    return sheet.document(". ".join(f"{title}: {_said(group)}" for title, group in groups.items()))


def _said(group: Iterable[Bar]) -> str:
    return "; ".join(f"{bar.name} {bar.amount}" for bar in group)


# Pages.


def pages(results: Results, sections: Mapping[str, Sequence[Work]]) -> dict[Path, str]:
    """Return the text of each file that the results decide."""
    works = {work.name: work for each in sections.values() for work in each}
    named = {
        name: {title: _bars(results, works[work]) for work, title in groups.items()}
        for name, groups in PICTURES.items()
    }
    folder = ROOT / "docs" / "pictures"
    drawn = {folder / f"bench-{name}.svg": f"{picture_of(each)}\n" for name, each in named.items()}
    images = "".join(
        f"![{'; '.join(groups)}](../docs/pictures/bench-{name}.svg)\n\n"
        for name, groups in named.items()
    )
    blocks = {
        "README.md": ("speed", _readme_table(results, works)),
        "docs/benchmarks.md": ("slower", _losses(results, works)),
    }
    return {
        **drawn,
        ROOT / "benchmarks" / "RESULTS.md": render(results, sections, images, quick=False),
        **{ROOT / path: _with_block(ROOT / path, *block) for path, block in blocks.items()},
    }


def _with_block(page: Path, name: str, block: str) -> str:
    """Return the page with this block between its comments."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    return f"{before}{begin}{block}{end}{rest.partition(end)[2]}"


def _readme_table(results: Results, works: Mapping[str, Work]) -> str:
    rows = []
    for name, title in _ROWS.items():
        ours, fastest, *_ = _bars(results, works[name])
        note = fastest.note.removeprefix("gda: ")
        rows.append([title, ours.amount, f"{fastest.amount}, {fastest.name}", note])
    lines = table(["work", "gda", "the fastest rival", "gda is"], rows)
    return "\n".join(
        [
            "Measured side by side with everything else that does the same work, on 2 cores with",
            "virtual CPU devices. [Benchmarks](docs/benchmarks.md) has pictures and all losses.\n",
            *lines,
            "",
        ]
    )


def losses(results: Results, works: Iterable[Work]) -> Iterator[tuple[str, str]]:
    """Yield each work in which a way that does the same is faster than gda, and that way."""
    for work in works:
        ways = results.works[work.name].ways if work.name in results.works else {}
        same = [way for way in ways if way != work.ours and not is_less(way)]
        if same and work.ours == "gda":
            fastest = min(same, key=lambda way: ways[way].median)
            if ways[fastest].median < ways[work.ours].median:
                yield work.name, fastest


def _losses(results: Results, works: Mapping[str, Work]) -> str:
    """Return, for each kind, the work in which gda is slowest in comparison, with the reason."""
    worst: dict[str, tuple[float, str, str]] = {}
    for name, way in losses(results, works.values()):
        kinds = [kind for kind in _LOSSES if name.startswith(kind)]
        if not kinds:
            raise ValueError(
                f"a rival is faster, {way!r} in {name!r}: give the reason in pages._LOSSES"
            )
        ways = results.works[name].ways
        ratio = ways["gda"].median / ways[way].median
        worst[kinds[-1]] = max(worst.get(kinds[-1], (0.0, "", "")), (ratio, name, way))
    rows = [
        [
            name,
            amount(results.works[name].ways["gda"], works[name].unit, with_quartiles=False),
            f"{amount(results.works[name].ways[way], works[name].unit, with_quartiles=False)}, "
            f"{_NAMES.get(way, way)}",
            _LOSSES[kind],
        ]
        for kind, (_, name, way) in worst.items()
    ]
    return "\n".join([*table(["work", "gda", "faster", "reason"], rows), ""])
