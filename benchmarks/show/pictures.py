"""Pictures of layouts, and ``gda show`` from its start to its end."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import PartitionSpec

import gda
from benchmarks.layout.index_math import mesh_of, unseen_shape
from benchmarks.pairs import Side
from benchmarks.work import Faster, Within, WithinMiB, Work
from gda import show
from gda.layout.spec import format_spec

P = PartitionSpec
DEVICES = 64
MIB = 2**20

_PLAN = (
    *("show", "--shape", "65536x8192", "--dtype", "bfloat16", "--mesh", "data=64,model=16"),
    *("--spec", "data,model", "--devices-per-process", "8"),
)


def _command(*programs: str) -> list[Side]:
    """Return the installed command, and Python that runs a line."""
    gda_plan = [str(Path(sys.executable).with_name("gda")), *_PLAN]
    assert "(1024, 512)" in _output_of(gda_plan)
    others = [[sys.executable, "-c", program] for program in programs]
    return [Side(partial(_output_of, command)) for command in (gda_plan, *others)]


def _output_of(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _text(spec: PartitionSpec) -> list[Side]:
    """Return the pictures of a new array in text; both sides print where nobody looks."""
    mesh = mesh_of((8, 8))

    def fresh() -> tuple[jax.Array]:
        shape = unseen_shape((DEVICES, 8))  # which every spec fits
        built = gda.GlobalArray.from_callback(
            shape, mesh, spec, lambda index: np.zeros(_block(shape, index), np.float32)
        )
        return (built.array,)

    def printed(draw: Callable[[jax.Array], object], array: jax.Array) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            draw(array)
        return out.getvalue()

    sides = [gda.show, jax.debug.visualize_array_sharding]
    for draw in sides:
        assert "63" in printed(draw, *fresh())
    return [Side(partial(printed, draw), fresh) for draw in sides]


def _block(shape: tuple[int, ...], index: gda.Index) -> list[int]:
    return [len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True)]


def _grid_of_4096() -> gda.ShardGrid:
    shape = unseen_shape((64, 64))
    process_of = np.arange(4096) // 8
    return gda.ShardGrid(shape, {"x": 64, "y": 64}, P("x", "y"), process_of=process_of)


def _svg() -> list[Side]:
    assert show.svg(_grid_of_4096()).startswith("<svg")
    return [Side(show.svg, lambda: (_grid_of_4096(),))]


def _svg_size() -> list[Side]:
    def mebibytes(grid: gda.ShardGrid) -> float:
        return len(show.svg(grid).encode()) / MIB

    return [Side(mebibytes, lambda: (_grid_of_4096(),), times_itself=True)]


_SVG = "SVG of 4,096 blocks over 4,096 devices of 512 processes"

WORKS = [
    Work(
        "gda show of 1,024 devices, from start to end of the process",
        partial(_command, "import jax", "import numpy"),
        {
            "python -c 'import jax', what any answer with JAX costs": None,
            "python -c 'import numpy'": None,
        },
        Within(300),
    ),
    *[
        Work(
            f"picture in text of an array on (8, 8) devices, {format_spec(spec)}",
            partial(_text, spec),
            {"jax.debug.visualize_array_sharding": Faster(5)},
            devices=DEVICES,
        )
        for spec in [P("x", "y"), P(("x", "y")), P("x")]
    ],
    Work(_SVG, _svg, limit=Within(100)),
    # 200 KB are 0.19 MiB.
    Work(f"{_SVG}, its size", _svg_size, limit=WithinMiB(0.19), seconds=0, unit="MiB"),
]
