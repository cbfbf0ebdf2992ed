"""The report of ``gda plan --tree FILE``: the bytes of a whole model on each device.

``gda/planning/notation/model_file.py`` describes the file, ``gda/planning/model.py`` and
``gda/planning/memory.py`` the document of ``--json``.
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Mapping, Sequence

from gda.cli.commands import OK, print_json, read_given
from gda.cli.tables import facts, held_and_distinct, left_out, two_tables
from gda.layout.padding import format_padding
from gda.layout.spec import format_spec
from gda.layout.text import counted, format_bytes, format_mesh, in_processes, listed
from gda.planning.device_kinds import DeviceKind, kind_named
from gda.planning.memory import ModelMemory
from gda.planning.model import ModelPlan, Row
from gda.planning.notation.layouts import parse_mesh
from gda.planning.notation.mistakes import MistakesError
from gda.planning.notation.model_file import ModelText, read_model, text_of
from gda.planning.notation.numbers import parse_number
from gda.planning.planned_array import check_devices_per_process, format_shape

_OF_ONE_ARRAY = ("shape", "dtype", "spec", "process", "locate")
_ROWS_SHOWN = 10


def plan_tree(options: argparse.Namespace) -> int:
    """Run ``gda plan --tree``."""
    kind = _read_kind(options)
    model = _read(options)
    memory = kind and ModelMemory(model, kind, options.optimizer, options.pad)
    if options.json:
        print_json({**model.describe(), **({"memory": memory.describe()} if memory else {})})
        return OK
    print(*_summary(model), sep="\n")
    if memory:
        print("", *_memory(memory), sep="\n")
    if model.rows:
        print("", *_rows(model), sep="\n")
    if model.savings:
        print("", *_savings(model), sep="\n")
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


def _read(options: argparse.Namespace) -> ModelPlan:
    refuse_options(options, _OF_ONE_ARRAY)
    mesh = read_given(options, "mesh", parse_mesh)
    devices = read_given(options, "devices-per-process", parse_number)
    return plan_model(read_text("--tree", options.tree), mesh, devices, pad=options.pad)


def refuse_options(options: argparse.Namespace, of_one_array: Sequence[str]) -> None:
    """Check that the options of one array are not given with ``--tree``.

    Raises:
      MistakesError: some are.
    """
    names = [name for name in of_one_array if getattr(options, name) not in (None, [])]
    given = [f"--{name.replace('_', '-')}" for name in names]
    if given:
        raise MistakesError(
            f"{listed(given)} cannot be used with --tree, which plans a model; omit either"
        )


def read_text(option: str, path: str) -> ModelText:
    """Return the text of the file of an option; ``-`` is stdin.

    Raises:
      MistakesError: the file cannot be read.
    """
    if not path:
        raise MistakesError(f"{option}: the path of a file was expected, or - for stdin")
    if path == "-" and sys.stdin is None:  # stdin is closed
        raise MistakesError(f"{option}: stdin is closed; give the path of a file instead of -")
    try:
        if path == "-":
            return text_of("stdin", sys.stdin.buffer)
        with open(path, "rb") as file:
            return text_of(path, file)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise  # the command line shortens it
        raise MistakesError(f"{path} cannot be read: {error.strerror or error}") from None


def plan_model(
    file: ModelText,
    mesh: Mapping[str, int] | None,
    devices_per_process: int | None,
    *,
    pad: bool,
    option: str = "--mesh",
) -> ModelPlan:
    """Return the plan of the model in a file; the arguments are those of ``read_model``.

    Raises:
      MistakesError: the file has mistakes, or the model does not fit the processes.
    """
    sizes, parameters = read_model(file, mesh, pad=pad, option=option)
    model = ModelPlan(sizes, check_devices_per_process(devices_per_process, sizes), parameters)
    if model.bytes_per_device * model.num_devices >= 2**63:
        raise MistakesError(f"{file.path} has more than 2**63 bytes in all; check its sizes")
    return model


# For people.


def _summary(model: ModelPlan) -> list[str]:
    devices = in_processes(model.num_devices, model.devices_per_process)
    everywhere = model.bytes_per_device * model.num_devices
    in_process = model.bytes_per_device * model.devices_per_process
    times = f": {everywhere / model.nbytes:.4g} times the model" if model.nbytes else ""
    parameters = counted(len(model.parameters), "parameter")
    elements = counted(model.num_elements, "element")
    return facts(
        [
            ("model", f"{parameters} of {elements}, {format_bytes(model.nbytes)}"),
            ("mesh", f"{format_mesh(model.mesh)}: {devices}"),
            *(("note", note) for note in model.notes),
            ("", ""),
            ("per device", format_bytes(model.bytes_per_device)),
            ("per process", held_and_distinct(in_process, model.distinct_bytes)),
            ("all devices", f"{format_bytes(everywhere)}{times}"),
            *(("padding", padding) for padding in _padding(model)),
        ]
    )


def _padding(model: ModelPlan) -> list[str]:
    count = sum(parameter.grid.is_padded for parameter in model.parameters)
    words = f"{format_padding(model.padding)} more, in {counted(count, 'parameter')}"
    return [words] if count else []


def _memory(memory: ModelMemory) -> list[str]:
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
    return facts(
        [
            *rows,
            ("fits", f"no: {missing} too much; without replicas it needs at least {least}"),
            ("suggestion", _suggestion(memory)),
        ]
    )


def _suggestion(memory: ModelMemory) -> str:
    suggestion = memory.suggestion
    if suggestion is None:
        return "none found with one axis of the mesh larger"
    changes = []
    if suggestion.mesh != memory.model.mesh:
        devices = counted(suggestion.num_devices, "device")
        changes.append(f"--mesh {format_mesh(suggestion.mesh)}: {devices}")
    if suggestion.rows:
        first, *others = suggestion.rows
        more = f" and {counted(len(others), 'more row')} of --json" if others else ""
        changes.append(f"{format_spec(first.better_spec)} for {_name(first)}{more}")
    left = format_bytes(suggestion.bytes_left)
    return f"{', with '.join(changes)}; leaves {left} for gradients and activations"


def _rows(model: ModelPlan) -> list[str]:
    header = ["per device", "parameter", "array", "spec", "shard shape", "replicas"]
    rows = [
        [
            format_bytes(row.bytes_per_device),
            _name(row),
            row.parameter.title,
            format_spec(row.parameter.grid.spec),
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


def _savings(model: ModelPlan) -> list[str]:
    total = format_bytes(sum(row.bytes_saved_per_device for row in model.savings))
    header = ["per device", "parameter", "spec", "better spec"]
    rows = [
        [
            format_bytes(row.bytes_saved_per_device),
            _name(row),
            format_spec(row.parameter.grid.spec),
            format_spec(row.better_spec),
        ]
        for row in model.savings[:_ROWS_SHOWN]
    ]
    lines = two_tables(header, rows, first=2, right={"per device"})
    head = f"Replicated, but could be sharded: this would save {total} per device."
    return [head, "", *lines, *left_out(len(rows), len(model.savings), "row")]


def _name(row: Row) -> str:
    return f"{row.name} (x{row.count})" if row.count > 1 else row.name
