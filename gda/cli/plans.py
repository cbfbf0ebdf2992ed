"""The command ``gda plan``: the layout of an array or a model on devices that need not exist.

``PlannedArray.document`` tells that of ``--json`` for an array, ``gda/planning/model.py`` that of
``--tree``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gda.cli.commands import (
    CALCULATION_ERRORS,
    OK,
    add_command,
    print_json,
    read_given,
)
from gda.cli.facts import (
    facts,
    held_and_distinct,
    left_out,
    picture_lines,
    two_tables,
)
from gda.cli.layout_options import add_layout_options, read_array, read_text, refuse_options
from gda.layout.dtype_names import packed_nbytes
from gda.layout.padding import format_padding
from gda.layout.spec import format_spec
from gda.layout.text import (
    counted,
    format_bytes,
    format_mesh,
    format_shape,
    in_processes,
)
from gda.planning.device_kinds import DeviceKind, kind_named
from gda.planning.notation.mesh_and_spec import parse_mesh
from gda.planning.notation.mistakes import MistakesError
from gda.planning.notation.numbers import parse_number

if TYPE_CHECKING:
    from gda.planning.memory import ModelMemory
    from gda.planning.model import ModelPlan
    from gda.planning.notation.model_file import Parameter
    from gda.planning.planned_array import PlannedArray

_ROWS_SHOWN = 10
_OF_ONE_ARRAY = ("shape", "dtype", "spec")
_NEEDED = "give --shape, --dtype, --mesh and --spec for one array, or --tree FILE for a model"

_EPILOG = """\
specs:
  One entry for each dimension, between commas: an axis of the mesh (data),
  several that shard one dimension together (data+model), or _ for not sharded.
  Dimensions that are omitted at the end are not sharded. P('data', None) of
  Python can be pasted.

the file of a model, for --tree:
  {"mesh": {"data": 16, "model": 4}, "dtype": "bfloat16", "parameters": {
   "up.weight": {"shape": [11008, 4096], "spec": ["model", "data"]}}}
  A parameter may have its own dtype. A "spec" at the top is for all parameters
  without their own. A spec is a list, or a text as above. In Python,
  gda.layouts(tree).to_json() is such a file.

examples:
  gda plan --shape 65536x8192 --dtype bf16 --mesh data=64,model=16 \\
           --spec data,model --devices-per-process 8
  gda plan --shape 32x4096x128 --dtype f32 --mesh x=4,y=2 --spec _,x+y --json
  gda plan --tree model.json --mesh data=16,model=4 --devices-per-process 8
  gda plan --tree model.json --device v5e --optimizer adam
"""


def add_plan(commands: Any) -> None:
    description = "Show the blocks and bytes of each device of a mesh; no device is needed."
    parser = add_command(commands, plan, description, epilog=_EPILOG, errors=CALCULATION_ERRORS)
    add_layout_options(parser)
    parser.add_argument(
        "--device",
        metavar="KIND",
        help="with --tree, say if the model fits into a device such as v5e or h100",
    )
    parser.add_argument(
        "--optimizer",
        choices=["adam", "adamw"],
        help="with --device, count the state of this optimizer",
    )


def plan(options: argparse.Namespace) -> int:
    if options.tree is not None:
        return _plan_tree(options)
    if options.device is not None or options.optimizer is not None:
        raise MistakesError("--device and --optimizer are for a model; give --tree FILE")
    array = read_array(options, _NEEDED)
    if options.json:
        print_json(array.document())
        return OK
    print(*_summary(array), sep="\n")
    if not options.no_picture:
        print("", *picture_lines(array), sep="\n")
    return OK


def _summary(array: PlannedArray) -> list[str]:
    grid, replicas = array.grid, array.grid.num_replicas
    times = "the array once" if replicas == 1 else f"the array {replicas:,} times"
    times += ", and padding" * array.grid.is_padded
    return facts(
        [
            ("array", f"{array.title}, {format_bytes(array.nbytes)}"),
            ("mesh", _mesh(grid.mesh_shape, array.devices_per_process)),
            ("spec", format_spec(grid.spec)),
            *(("note", note) for note in array.notes),
            ("", ""),
            ("shard shape", format_shape(grid.shard_shape)),
            *(("padding", padding) for padding in _padding(array)),
            ("blocks", f"{grid.num_shards:,} distinct, each on {counted(replicas, 'device')}"),
            ("per device", format_bytes(array.block_bytes)),
            ("per process", _bytes_of_a_process(array)),
            ("all devices", f"{format_bytes(array.block_bytes * grid.num_devices)}: {times}"),
        ]
    )


def _mesh(mesh: Mapping[str, int], devices_per_process: int) -> str:
    return f"{format_mesh(mesh)}: {in_processes(math.prod(mesh.values()), devices_per_process)}"


def _padding(array: PlannedArray) -> list[str]:
    shape = format_shape(array.grid.padded_shape)
    words = f"to {shape}: {format_padding(array.padding)} more on all devices"
    return [words] if array.grid.is_padded else []


def _bytes_of_a_process(array: PlannedArray) -> str:
    from gda.planning.planned_array import distinct_of

    held = array.block_bytes * array.devices_per_process
    blocks, elements = distinct_of(array.grid, array.devices_per_process)
    least, most = int(blocks.min()), int(blocks.max())
    if least == array.devices_per_process and not array.grid.is_padded:
        return f"{format_bytes(held)} in {counted(most, 'block')}"
    number = counted(most, "block") if least == most else f"{least:,} to {most:,} blocks"
    distinct = (packed_nbytes(int(n), array.dtype) for n in (elements.min(), elements.max()))
    return f"{held_and_distinct(held, distinct)} ({number})"


# A model.


def _plan_tree(options: argparse.Namespace) -> int:
    from gda.planning.memory import ModelMemory

    kind = _read_kind(options)
    model = _read_model(options)
    memory = kind and ModelMemory(model, kind, options.optimizer)
    if options.json:
        print_json({**model.document(), **({"memory": memory.document()} if memory else {})})
        return OK
    print(*_model_summary(model), sep="\n")
    if memory:
        print("", *_memory_lines(memory), sep="\n")
    if model.rows:
        print("", *_row_lines(model), sep="\n")
    if model.savings:
        print("", *_saving_lines(model), sep="\n")
    return OK


def _read_kind(options: argparse.Namespace) -> DeviceKind | None:
    if options.device is None:
        if options.optimizer is not None:
            raise MistakesError(
                "--optimizer counts its state in the memory of a device; give --device, such as v5e"
            )
        return None
    try:
        return kind_named(options.device)
    except ValueError as error:
        raise MistakesError(f"--device: {error}") from None


def _read_model(options: argparse.Namespace) -> ModelPlan:
    from gda.planning.model import plan_model

    refuse_options(options, _OF_ONE_ARRAY)
    mesh = read_given(options, "mesh", parse_mesh)
    devices = read_given(options, "devices-per-process", parse_number)
    return plan_model(read_text("--tree", options.tree), mesh, devices, pad=options.pad)


def _model_summary(model: ModelPlan) -> list[str]:
    everywhere = model.bytes_per_device * model.num_devices
    in_process = model.bytes_per_device * model.devices_per_process
    times = f": {everywhere / model.nbytes:.4g} times the model" if model.nbytes else ""
    arrays = counted(len(model.parameters), "array")
    elements = counted(model.num_elements, "element")
    return facts(
        [
            ("model", f"{arrays} of {elements}, {format_bytes(model.nbytes)}"),
            ("mesh", _mesh(model.mesh, model.devices_per_process)),
            ("", ""),
            ("per device", format_bytes(model.bytes_per_device)),
            *([("on its host", format_bytes(model.bytes_on_host))] if model.bytes_on_host else []),
            ("per process", held_and_distinct(in_process, model.distinct_bytes)),
            ("all devices", f"{format_bytes(everywhere)}{times}"),
            *(("padding", padding) for padding in _model_padding(model)),
        ]
    )


def _model_padding(model: ModelPlan) -> list[str]:
    count = sum(parameter.grid.is_padded for parameter in model.parameters)
    words = f"{format_padding(model.padding)} more, in {counted(count, 'parameter')}"
    return [words] if count else []


def _memory_lines(memory: ModelMemory) -> list[str]:
    kind, needed = memory.kind, format_bytes(memory.kind.capacity_bytes - memory.bytes_left)
    parts = [f"parameters {format_bytes(memory.model.bytes_per_device)}"]
    if memory.optimizer:
        parts.append(f"{memory.optimizer} {format_bytes(memory.optimizer_bytes)}")
    rows = [
        ("device", f"{kind.name}: {format_bytes(kind.capacity_bytes)} for programs"),
        *([("note", kind.note)] if kind.note else []),
        ("needed", f"{needed}: {', '.join(parts)}"),
    ]
    if memory.fits:
        left = format_bytes(memory.bytes_left)
        return facts([*rows, ("fits", f"yes: {left} left for gradients and activations")])
    missing = format_bytes(-memory.bytes_left)
    least = counted(memory.least_devices, "device")
    answer = f"no: {missing} too much; without replicas it needs at least {least}"
    return facts([*rows, ("fits", answer)])


def _placed(parameter: Parameter) -> str:
    spec, kind = format_spec(parameter.grid.spec), parameter.memory_kind
    return spec if kind is None else f"{spec}, {kind}"


def _row_lines(model: ModelPlan) -> list[str]:
    header = ["per device", "parameter", "array", "spec", "shard shape", "replicas"]
    rows = [
        [
            format_bytes(row.bytes_per_device),
            row.title,
            row.parameter.title,
            _placed(row.parameter),
            format_shape(row.parameter.grid.shard_shape),
            str(row.parameter.grid.num_replicas),
        ]
        for row in model.rows
    ]
    if not model.padding.nbytes:
        return two_tables(header, rows, first=2, right={"per device", "replicas"})
    header.insert(1, "padding")
    for row, cells in zip(model.rows, rows, strict=True):
        cells.insert(1, format_padding(row.padding) if row.padding.nbytes else "")
    return two_tables(header, rows, first=3, right={"per device", "padding", "replicas"})


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
    lines = two_tables(header, rows, first=2, right={"per device"})
    head = f"Replicated, but could be sharded: this would save {total} per device."
    return [head, "", *lines, *left_out(len(rows), len(model.savings), "row")]
