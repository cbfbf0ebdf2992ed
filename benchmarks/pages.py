"""Pages and pictures that users read, of the results alone.

They are six pictures, the table of the README, the losses of docs/benchmarks.md, RESULTS.md, and
the accelerators on which gda has run.

In a page, what is written here stands between two comments, such as ``<!-- runs -->`` and
``<!-- end -->``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import accelerator
from benchmarks.less import is_less
from benchmarks.pairs import LEAST_ROUNDS
from benchmarks.report import (
    amount,
    comparison,
    fastest_rival,
    render,
    render_accelerator,
    table,
)
from benchmarks.results import ON_ACCELERATOR, Results, load, machines_of
from benchmarks.work import Work
from gda.show.drawing.faces import COLORS
from gda.show.drawing.sheet import Sheet, number, text_width

ROOT = Path(__file__).parents[1]
GUIDE, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
# A line for each accelerator on which the tests for it ran, as benchmarks/accelerator.sh writes it.
RAN, PLATFORMS = ROOT / "benchmarks" / "accelerators.txt", ROOT / "docs" / "limits.md"

# Not in the pictures: it informs those who know the function.
_HIDDEN = ("devices_indices_map of a new NamedSharding, no replica ids", "gda, without a base")

# Measured to choose between ways of building gda, not to compare it.
_INSIDE = ("lists", "make_array_from_callback")

_SHORTER = [
    (", (same callback|the same), which keeps each block in a dictionary", " and a dictionary"),
    (" of blocks that a pool of .*", " and a pool of threads"),
    ("(, same callback)?(, sharding made before)?$| of blocks that .*|, make_array.*", ""),
    ("make_array_from_callback, callback reads with ([\\w.]*).*", r"JAX by \1"),
    ("^make_array", "jax.make_array"),
    ("_to_global_array", "\N{HORIZONTAL ELLIPSIS}"),
    (" of a new NamedSharding, equal indices counted as quickly .*", " and a quick loop"),
    (" of a new NamedSharding, equal indices counted as JAX does", ", JAX's count"),
]

_OTHER = "512 MiB, 2 arrays onto another layout"
_SMALL = "1,000 arrays of 64 x 64"
_ALIGNED = (
    "from_callback, 4 replicas of each of 16 blocks, callback reads 1 MiB from a file into memory "
    "that is aligned"
)
_FILES = _ALIGNED.replace("is aligned", "is not aligned")  # as NumPy's is, mostly
_INDICES = "all indices and replica ids, cold, 1,024 devices"
_JITTED = "a jitted call with 100 GlobalArrays as input, one device"
_CALLBACK = "from_callback, a fresh 64 KiB block per device, aligned, 8 devices"

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
        _FILES: "16 blocks of 1 MiB from files into memory of NumPy, each on 4 devices",
        _ALIGNED: "16 blocks of 1 MiB from files into aligned memory, each on 4 devices",
        "into=True, 8 MiB blocks from files, 8 own blocks": "8 blocks of 8 MiB, with into=True",
        _INDICES: "Indices and replica ids of 1,024 devices",
    },
    "step": {
        _JITTED: "A jitted call with 100 containers",
        "gda.jit: GlobalArray in and out, one device": "A call of gda.jit with one container",
        "from_process_local of a batch of 8 leaves, a step, 4 processes": (
            "A batch of 8 arrays, in 4 processes"
        ),
        _CALLBACK: "New blocks of 64 KiB for 8 devices, from a callback",
    },
}
"""The works of each picture, and their titles."""

_TITLES = {work: title for works in PICTURES.values() for work, title in works.items()}
# The rows of RESULTS.md that a person reads first, and those of the README.
_ANEW = "{} in a fresh process"
_LOADS = [
    _ANEW.format(f"load 256 MiB of {layout} from safetensors{where}")
    for where in ("", " on a disk")
    for layout in ("rows", "rows and columns", "columns")
]
_CALLS = [
    _ANEW.format(call)
    for call in ("restore 256 MiB, 4 arrays onto another layout", "save 256 MiB, 4 arrays")
]
_TUNED = "save 1 GiB of frozen arrays and 10 MiB that changed"
_FIRST = {
    **{work: work[:1].upper() + work[1:] for work in [*_LOADS, *_CALLS]},
    **_TITLES,
    _TUNED: "Save 1 GiB of which 10 MiB changed",
    "load an Orbax run, 256 MiB, 4 arrays, onto another layout": "Restore a run of Orbax, 256 MiB",
    "a step of 20 ms with 15 ms of loading by NumPy": "A step of 20 ms with batches from NumPy",
    "save_safetensors of 512 MiB of float32 in 4 processes: rows": (
        "Save 512 MiB as safetensors, 4 processes"
    ),
    "pull of 1024 MiB of float32 from 4 processes to 2, rows to columns": (
        "Pull 1 GiB from 4 processes to 2"
    ),
    "reshard of 1 GiB of float32 in 4 processes: rows to columns on the same 8 devices": (
        "Reshard 1 GiB, 4 processes, rows to columns"
    ),
    "replicas compared: 64 MiB of float32 on each of 8 devices": "Compare replicas of 64 MiB",
}
_ROWS = [
    *(*_LOADS[:3], *_CALLS),
    *(_TUNED, "save 512 MiB, 2 arrays", f"save {_SMALL}"),
    *(_CALLBACK, _INDICES, _JITTED),
]


def _is_measured(results: Results, work: Work) -> bool:
    return work.name in results and work.ours in results[work.name].ways


def ordered_ways(results: Results, work: Work) -> list[str]:
    """Return gda, its rivals from the fastest on, and then what does less."""
    ways = results[work.name].ways
    rivals = (way for way in ways if way not in (work.ours, *_HIDDEN))
    return [work.ours, *sorted(rivals, key=lambda way: (is_less(way), ways[way].median))]


def _compared(
    results: Results, work: Work, way: str, *, with_quartiles: bool = False
) -> tuple[str, str, str]:
    """Return the short name of a way, its figure, and in words how gda compares with it."""
    ours, figures = results[work.name].ways[work.ours], results[work.name].ways[way]
    name = way
    for long, short in _SHORTER:
        name = re.sub(long, short, name)
    words = "" if way == work.ours else comparison(work.unit, ours, figures)
    return name, amount(figures, work.unit, with_quartiles=with_quartiles), words


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
            fill = f'fill="{COLORS[0]}"' if is_ours else 'fill-opacity=".4"'
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
    texts[ROOT / "benchmarks" / "RESULTS.md"] = render(
        results, sections, _summary(results, works), quick=False
    ) + render_accelerator(load(ON_ACCELERATOR), accelerator.works())
    machines = "\n".join(f"- {machine}" for machine in machines_of(results))
    guide = with_losses(GUIDE.read_text("utf-8"), results, works.values())
    texts[GUIDE] = _with_block(guide, "runs", f"\n{machines}\n")
    lines = first_rows(results, [works[name] for name in _ROWS], always_with_quartiles=False)
    measured = {name: results[name] for name in _ROWS if name in results}
    where = [*map(_in_short, machines_of(measured)), ""]
    lines = ["", *where, *lines, ""]
    readme = _with_block(README.read_text("utf-8"), "speed:begin", "\n".join(lines))
    ran = RAN.read_text("utf-8").splitlines() if RAN.exists() else []
    texts[README] = _with_block(readme, "ran:begin", ran_in_words(ran))
    table_of_runs = _with_block(PLATFORMS.read_text("utf-8"), "ran:begin", ran_in_a_table(ran))
    texts[PLATFORMS] = table_of_runs
    return texts


def _in_short(machine: str) -> str:
    """Return day, processor, Python and JAX of a machine."""
    return f"{machine.partition(', jaxlib')[0].replace('; ', ', ')}:"


_NOWHERE = "None yet."


def ran_in_words(lines: Sequence[str]) -> str:
    """Return the accelerators on which the tests for them ran, for a cell of a table."""
    runs = [line.split(" | ") for line in lines]
    said = [f"{kind} ({passed} tests passed, {versions})" for kind, versions, _, passed in runs]
    return "; ".join(said) or _NOWHERE


def ran_in_a_table(lines: Sequence[str]) -> str:
    """Return the table of the accelerators on which the tests for them ran."""
    if not lines:
        return f"\n{_NOWHERE}\n"
    head = ["accelerator", "versions", "date", "tests that passed"]
    return "\n".join(["", "", *table(head, (line.split(" | ") for line in lines)), ""])


def _summary(results: Results, works: Mapping[str, Work]) -> str:
    """Return the first table of RESULTS.md, and the pictures."""
    slower = sum(1 for _ in losses(results, works.values()))
    lines = [
        *["", *first_rows(results, [works[name] for name in _FIRST], always_with_quartiles=True)],
        f"\nIn {slower} of {len(works)} works a rival is faster, or needs less memory: "
        "[benchmarks.md](../docs/benchmarks.md#slower-than-a-rival) says in which, and why.\n",
    ]
    pictures = [
        f"![{'; '.join(titles.values())}](../docs/pictures/bench-{name}.svg)\n"
        for name, titles in PICTURES.items()
    ]
    return "\n".join([*lines, *pictures]).rstrip("\n")


def first_rows(
    results: Results, works: Iterable[Work], *, always_with_quartiles: bool
) -> Iterator[str]:
    """Yield a table of gda and the fastest rival; the quartiles stand by a median of few rounds."""
    rows = []
    for work in works:
        if _is_measured(results, work):
            ours, fastest, *_ = ordered_ways(results, work)
            shown = always_with_quartiles or results[work.name].rounds < LEAST_ROUNDS
            _, figure, _ = _compared(results, work, ours, with_quartiles=shown)
            name, other, words = _compared(results, work, fastest, with_quartiles=shown)
            rows.append([_FIRST[work.name], figure, f"{other}, {name}", words])
    return table(["work", "gda", "fastest rival", "in comparison"], rows)


def _with_block(page: str, name: str, block: str) -> str:
    """Return the page with this block between its comment and the next one."""
    before, begin, rest = page.partition(f"<!-- {name} -->")
    return f"{before}{begin}{block}{rest[rest.index('<!-- ') :]}"


def losses(results: Results, works: Iterable[Work]) -> Iterator[tuple[Work, str]]:
    """Yield each work in which a way that does the same is faster than gda, and that way."""
    for work in works:
        if _is_measured(results, work) and work.ours not in _INSIDE:
            ways = results[work.name].ways
            rival = fastest_rival(work, results[work.name])
            if rival and ways[rival].median < ways[work.ours].median:
                yield work, rival


def with_losses(page: str, results: Results, works: Iterable[Work]) -> str:
    """Return the page with the largest loss after each comment ``<!-- slower: beginning -->``.

    A comment is for the works whose names begin so, and ``others`` for all that have none.
    """
    kinds: dict[str, tuple[float, str]] = dict.fromkeys(
        re.findall("<!-- slower: (.*?) -->", page), (0.0, "none now")
    )
    others = []
    for work, way in losses(results, works):
        kind = next((each for each in kinds if work.name.startswith(each)), None)
        (_, ours, _), (name, figure, words) = (
            _compared(results, work, each) for each in (work.ours, way)
        )
        ways = results[work.name].ways
        said = f"{work.name}, {ours}; {name}, {figure}; {words}"
        if kind is None:
            others.append(said)
        else:
            kinds[kind] = max(kinds[kind], (ways[work.ours].median / ways[way].median, said))
    if others:
        kinds["others"] = (0.0, "*\n  *".join(others))
    for kind, (_, said) in kinds.items():
        page = _with_block(page, f"slower: {kind}", f"\n  *{said}* ")
    return page
