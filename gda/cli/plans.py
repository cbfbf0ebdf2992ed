"""The command ``gda plan``: the layout of an array or a model on devices that need not exist."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gda.cli.commands import (
    CALCULATION_ERRORS,
    OK,
    add_command,
    read_given,
    read_option,
    terminal_width,
)
from gda.layout.dtype_names import packed_nbytes
from gda.layout.padding import format_padding
from gda.layout.spec import format_spec
from gda.layout.tables import table, wrap
from gda.layout.text import (
    counted,
    format_bytes,
    format_mesh,
    format_more,
    format_shape,
    in_processes,
    printable,
)
from gda.planning.notation.mesh_and_spec import parse_mesh, parse_spec
from gda.planning.notation.mistakes import MistakesError
from gda.planning.notation.numbers import parse_dtype, parse_number, parse_shape
from gda.planning.planned_array import (
    PlannedArray,
    check_devices_per_process,
    distinct_of,
    planned_grid,
)

if TYPE_CHECKING:
    from gda.planning.model import ModelPlan, Parameter

_LABEL = 14  # wide enough for all labels, so that the answers below each other are aligned
_NARROWEST = 8
_NARROWEST_PICTURE = 20
_ROWS_SHOWN = 10

_EPILOG = """\
specs:
  One entry for each dimension, between commas: an axis of the mesh (data),
  several that shard one dimension together (data+model), or _ for not sharded.
  Dimensions that are omitted at the end are not sharded. P('data', None) of
  Python can be pasted.

the file of a model, for --tree:
  {"mesh": {"data": 16, "model": 4}, "dtype": "bfloat16", "parameters": {
   "up.weight": {"shape": [11008, 4096], "spec": ["model", "data"]}}}
  A parameter may have its own dtype. gda.layouts(tree).to_json() is such a
  file.

examples:
  gda plan --shape 65536x8192 --dtype bf16 --mesh data=64,model=16 \\
           --spec data,model --devices-per-process 8
  gda plan --shape 32x4096x128 --dtype f32 --mesh x=4,y=2 --spec _,x+y
  gda plan --tree model.json --mesh data=16,model=4 --devices-per-process 8
"""


def add_plan(commands: Any) -> None:
    description = "Show the blocks and bytes of each device of a mesh; no device is needed."
    parser = add_command(commands, plan, description, epilog=_EPILOG, errors=CALCULATION_ERRORS)
    parser.add_argument("--shape", metavar="SHAPE", help="such as 65536x8192; () for a scalar")
    parser.add_argument("--dtype", metavar="DTYPE", help="such as float32, bfloat16 or bf16")
    parser.add_argument("--mesh", metavar="MESH", help="axes and sizes, such as data=64,model=16")
    parser.add_argument(
        "--spec", metavar="SPEC", help="the axes that shard each dimension, such as data,model"
    )
    parser.add_argument(
        "--pad", action="store_true", help="pad the sizes that do not divide; show the cost"
    )
    parser.add_argument(
        "--devices-per-process",
        metavar="N",
        help="devices of each process; by default one has all",
    )
    parser.add_argument(
        "--tree", metavar="FILE", help="take the model that this JSON file describes"
    )
    parser.add_argument("--no-picture", action="store_true", help="print no picture")


def plan(options: argparse.Namespace) -> int:
    is_array = [getattr(options, name) is not None for name in ("shape", "dtype", "spec")]
    is_complete = all(is_array) and options.mesh is not None
    if any(is_array) if options.tree else not is_complete:
        raise MistakesError(
            "give --shape, --dtype, --mesh and --spec for one array, or --tree FILE for a model"
        )
    mesh = read_given(options, "mesh", parse_mesh)
    devices = read_given(options, "devices-per-process", parse_number)
    if options.tree:
        print(*_of_model(options, mesh, devices), sep="\n")
        return OK
    assert mesh is not None
    devices = check_devices_per_process(devices, mesh)
    shape = read_option("--shape", options.shape, parse_shape)
    dtype = read_option("--dtype", options.dtype, parse_dtype)
    spec = read_option("--spec", options.spec, parse_spec)
    grid = planned_grid(*(shape, dtype, mesh, spec), pad=options.pad, devices_per_process=devices)
    array = PlannedArray(grid, dtype)
    print(*_summary(array, devices), sep="\n")
    if not options.no_picture:
        from gda import show

        width = max(terminal_width(), _NARROWEST_PICTURE)
        print("", show.text(grid, dtype=dtype, width=width, header=False), sep="\n")
    return OK


def _facts(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return lines of labels and values that fit the terminal."""
    width = max(terminal_width() - _LABEL, _NARROWEST)
    lines = []
    for label, value in rows:
        for part in wrap(printable(value), width):
            lines.append(f"{label:{_LABEL}}{part}".rstrip())
            label = ""
    return lines


def _summary(array: PlannedArray, devices_per_process: int) -> list[str]:
    grid, replicas = array.grid, array.grid.num_replicas
    times = "the array once" if replicas == 1 else f"the array {replicas:,} times"
    times += ", and padding" * array.grid.is_padded
    return _facts(
        [
            ("array", f"{array.title}, {format_bytes(array.nbytes)}"),
            ("mesh", _mesh(grid.mesh_shape, devices_per_process)),
            ("spec", format_spec(grid.spec)),
            ("", ""),
            ("shard shape", format_shape(grid.shard_shape)),
            *(("padding", padding) for padding in _padding(array)),
            ("blocks", f"{grid.num_shards:,} distinct, each on {counted(replicas, 'device')}"),
            ("per device", format_bytes(array.block_bytes)),
            ("per process", _bytes_of_a_process(array, devices_per_process)),
            ("all devices", f"{format_bytes(array.block_bytes * grid.num_devices)}: {times}"),
        ]
    )


def _mesh(mesh: Mapping[str, int], devices_per_process: int) -> str:
    return f"{format_mesh(mesh)}: {in_processes(math.prod(mesh.values()), devices_per_process)}"


def _padding(array: PlannedArray) -> list[str]:
    shape = format_shape(array.grid.padded_shape)
    words = f"to {shape}: {format_padding(array.padding)} more on all devices"
    return [words] if array.grid.is_padded else []


def _bytes_of_a_process(array: PlannedArray, devices: int) -> str:
    held = array.block_bytes * devices
    blocks, elements = distinct_of(array.grid, devices)
    least, most = int(blocks.min()), int(blocks.max())
    if least == devices and not array.grid.is_padded:
        return f"{format_bytes(held)} in {counted(most, 'block')}"
    number = counted(most, "block") if least == most else f"{least:,} to {most:,} blocks"
    distinct = (packed_nbytes(int(n), array.dtype) for n in (elements.min(), elements.max()))
    least_and_most = [*dict.fromkeys(map(format_bytes, distinct))]
    if least_and_most == [format_bytes(held)]:
        return f"{format_bytes(held)} ({number})"
    return f"{format_bytes(held)}; {' to '.join(least_and_most)} of it distinct ({number})"


# A model.


def _of_model(
    options: argparse.Namespace, mesh: Mapping[str, int] | None, devices: int | None
) -> list[str]:
    from gda.planning.model import plan_model

    model = plan_model(Path(options.tree), mesh, devices, pad=options.pad)
    parts = [_model_summary(model)]
    parts += [_row_lines(model)] * bool(model.rows) + [_saving_lines(model)] * bool(model.savings)
    return [*chain(*(["", *part] for part in parts))][1:]


def _model_summary(model: ModelPlan) -> list[str]:
    everywhere = model.bytes_per_device * model.num_devices
    in_process = model.bytes_per_device * model.devices_per_process
    times = f": {everywhere / model.nbytes:.4g} times the model" if model.nbytes else ""
    arrays = counted(len(model.parameters), "array")
    elements = counted(model.num_elements, "element")
    return _facts(
        [
            ("model", f"{arrays} of {elements}, {format_bytes(model.nbytes)}"),
            ("mesh", _mesh(model.mesh, model.devices_per_process)),
            ("", ""),
            ("per device", format_bytes(model.bytes_per_device)),
            *([("on its host", format_bytes(model.bytes_on_host))] if model.bytes_on_host else []),
            ("per process", format_bytes(in_process)),
            ("all devices", f"{format_bytes(everywhere)}{times}"),
            *(("padding", padding) for padding in _model_padding(model)),
        ]
    )


def _model_padding(model: ModelPlan) -> list[str]:
    count = sum(parameter.grid.is_padded for parameter in model.parameters)
    words = f"{format_padding(model.padding)} more, in {counted(count, 'parameter')}"
    return [words] if count else []


def _placed(parameter: Parameter) -> str:
    spec, kind = format_spec(parameter.grid.spec), parameter.memory_kind
    return spec if kind is None else f"{spec}, {kind}"


def _row_lines(model: ModelPlan) -> list[str]:
    header = ["per device", "parameter", "array and spec", "replicas"]
    rows = [
        [
            format_bytes(row.bytes_per_device),
            row.title,
            f"{row.parameter.title} {_placed(row.parameter)}",
            str(row.parameter.grid.num_replicas),
        ]
        for row in model.rows
    ]
    if model.padding.nbytes:
        header.insert(1, "padding")
        for row, cells in zip(model.rows, rows, strict=True):
            cells.insert(1, format_padding(row.padding) if row.padding.nbytes else "")
    right = {"per device", "padding", "replicas"}
    return table([header, *rows], right=right, width=terminal_width())


def _saving_lines(model: ModelPlan) -> list[str]:
    total = format_bytes(sum(row.bytes_saved_per_device for row in model.savings))
    header = ["per device", "parameter", "spec", "better spec"]
    rows = [
        [
            format_bytes(row.bytes_saved_per_device),
            row.title,
            format_spec(row.parameter.grid.spec),
            format_spec(row.better_spec),
        ]
        for row in model.savings[:_ROWS_SHOWN]
    ]
    lines = table([header, *rows], right={"per device"}, width=terminal_width())
    head = f"Replicated, but could be sharded: this would save {total} per device."
    more = len(model.savings) - len(rows)
    return [head, "", *lines, *([format_more(more)] if more else [])]
