"""The command ``gda reshard``: the moves that change the layout of an array or of a model.

``gda/planning/moves.py`` describes the documents of ``--json``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gda.cli.commands import CALCULATION_ERRORS, OK, add_command, print_json, read_given
from gda.cli.facts import (
    facts,
    left_out,
    picture_lines,
    table_of_some,
    terminal_width,
    two_tables,
)
from gda.cli.layout_options import add_layout_options, read_array, read_text, refuse_options
from gda.layout.padding import format_padding
from gda.layout.spec import format_layout, format_spec
from gda.layout.tables import table
from gda.layout.text import (
    counted,
    format_bytes,
    format_mesh,
    format_shape,
)
from gda.planning.notation.mesh_and_spec import parse_mesh, parse_spec
from gda.planning.notation.mistakes import MistakesError
from gda.planning.notation.numbers import parse_number
from gda.planning.planned_array import PlannedArray, padding_words, plan_array

if TYPE_CHECKING:
    from gda.layout.reshard.plan import ReshardPlan
    from gda.planning.model import ModelPlan
    from gda.planning.moves import ListedMoves, ModelMoves, MovesRow

_LINKS_SHOWN = 5
_PROCESSES_SHOWN = 8
_ROWS_SHOWN = 10
_OF_ONE_ARRAY = ("shape", "dtype", "spec", "to_spec")
_NEEDED = (
    "give --shape, --dtype, --mesh and --spec, and --to-mesh, --to-spec or both; "
    "or --tree FILE for a model"
)

_PIECES = "A piece is the part of a new block that one device sends or keeps."

_EPILOG = """\
Device 3 of one mesh is device 3 of the other. Each piece comes from the nearest
device that has it: the same one, one of the same process, or any.
`gda plan --help` describes specs and the file of a model.

examples:
  gda reshard --shape 65536x8192 --dtype bf16 --mesh data=64,model=16 \\
              --spec data,model --to-spec model,data --devices-per-process 8
  gda reshard --shape 24x8 --dtype f32 --mesh x=8 --spec x --to-mesh x=6
  gda reshard --tree model.json --to-mesh data=6,model=8 --devices-per-process 8
"""


def add_reshard(commands: Any) -> None:
    description = "Show the bytes that move when a layout changes; no device is needed."
    parser = add_command(commands, reshard, description, epilog=_EPILOG, errors=CALCULATION_ERRORS)
    add_layout_options(parser)
    parser.add_argument("--to-mesh", metavar="MESH", help="the new mesh; by default the same")
    parser.add_argument("--to-spec", metavar="SPEC", help="the new spec; by default the same")
    parser.add_argument(
        "--to-devices-per-process", metavar="M", help="devices of each in the new mesh"
    )
    parser.add_argument(
        "--to-tree",
        metavar="FILE",
        help="the model with its new mesh and specs; by default the same",
    )


def reshard(options: argparse.Namespace) -> int:
    if options.tree is not None:
        return _reshard_tree(options)
    from gda.layout.reshard.plan import ReshardPlan
    from gda.planning.moves import ListedMoves

    if options.to_tree is not None:
        raise MistakesError("--to-tree is for a model; give --tree too")
    if options.to_mesh is None and options.to_spec is None:
        raise MistakesError("--to-mesh and --to-spec are missing; give one or both")
    source = read_array(options, _NEEDED)
    target = _read_target(options, source)
    plan = ReshardPlan(source.grid, target.grid, itemsize=source.dtype.itemsize)
    moves = ListedMoves(plan, plan.num_moves)
    if options.json:
        print_json({"source": source.document(), "target": target.document(), **moves.document()})
        return OK
    print(*_summary(source, target, plan), "", _PIECES, "", *_load_lines(moves), sep="\n")
    print("", *_link_lines(moves), sep="\n")
    if not options.no_picture:
        print("", "before", *picture_lines(source), "", "after", *picture_lines(target), sep="\n")
    return OK


def _read_target(options: argparse.Namespace, source: PlannedArray) -> PlannedArray:
    grid = source.grid
    mesh = read_given(options, "to-mesh", parse_mesh) or grid.mesh_shape
    spec = read_given(options, "to-spec", parse_spec)
    devices = read_given(options, "to-devices-per-process", parse_number)
    if devices is None and options.devices_per_process is not None:
        devices = source.devices_per_process
    if spec is None:
        spec = grid.spec
    with _mistakes_after():
        return plan_array(grid.global_shape, source.dtype, mesh, spec, devices, pad=options.pad)


@contextmanager
def _mistakes_after() -> Iterator[None]:
    """Mark the mistakes that the block raises as mistakes of the new layout."""
    try:
        yield
    except MistakesError as error:
        first, *more = error.lines
        raise MistakesError(f"after the reshard, {first}", *more) from None


# For people.


def _summary(source: PlannedArray, target: PlannedArray, plan: ReshardPlan) -> list[str]:
    return facts(
        [
            ("array", f"{source.title}, {format_bytes(source.nbytes)}"),
            *_layout("from", source),
            *_layout("to", target),
            *(("note", note) for note in dict.fromkeys([*source.notes, *target.notes])),
            ("", ""),
            *_totals(plan),
            ("extra memory", f"{format_bytes(plan.nbytes_peak_extra):>10}  at most on a device"),
        ]
    )


def _totals(plan: ReshardPlan | ModelMoves) -> list[tuple[str, str]]:
    """Return the facts about the bytes that stay and move."""
    total = plan.nbytes_total

    def share(nbytes: int) -> str:
        return f"{format_bytes(nbytes):>10}  {100 * nbytes / total if total else 0:5.1f} %"

    pieces = counted(plan.num_moves, "piece")
    if plan.num_moves > 1:
        pieces += f" of {format_bytes(round(total / plan.num_moves))} on average"
    return [
        ("kept", f"{share(plan.nbytes_kept)}  on its device already"),
        ("moved", f"{share(plan.nbytes_within_processes)}  within processes"),
        ("", f"{share(plan.nbytes_between_processes)}  between processes"),
        ("all blocks", f"{share(total)}  in {pieces}"),
    ]


def _layout(label: str, array: PlannedArray) -> list[tuple[str, str]]:
    blocks = f"blocks of {format_shape(array.grid.shard_shape)}"
    return [
        (label, format_layout(array.grid.spec, array.grid.mesh_shape)),
        ("", f"{array.devices_and_processes}, {blocks}"),
        *(("", f"padded {padding}") for padding in padding_words(array)),
    ]


def _load_lines(moves: ListedMoves) -> list[str]:
    of_processes = moves.moves.source.num_processes > 1 or moves.moves.target.num_processes > 1
    rows = []
    for each in ["device", *(["process"] if of_processes else [])]:
        label = each
        for does, name in [("sends", "sent"), ("receives", "received")]:
            loads = moves.loads(f"{name}_by_{each}")
            if loads is not None:
                is_named = each == "device" and loads.largest > loads.mean
                which = f"device {loads.position}" if is_named else ""
                nbytes = [format_bytes(round(loads.mean)), format_bytes(loads.largest)]
                rows.append([label, does, *nbytes, which])
                label = ""
    header = ["each", "", "on average", "at most", ""]
    right = {"at most", "on average"}
    return table([header, *rows], right=right, width=terminal_width())


def _link_lines(moves: ListedMoves) -> list[str]:
    """Return the table of the busiest links."""
    links = moves.links
    if links is None:
        return facts(("note", note) for note in moves.notes)
    if not links:
        return facts([("links", "none: no process sends to another")])
    rows = [
        [f"process {link.source_process} to {link.target_process}", format_bytes(link.nbytes)]
        for link in links[:_LINKS_SHOWN]
    ]
    return table_of_some(["busiest links", "bytes"], rows, len(links), "link", right={"bytes"})


# A model.


def _reshard_tree(options: argparse.Namespace) -> int:
    from gda.planning.moves import ListedMoves, ModelMoves

    moves = ModelMoves(*_read_models(options))
    listed_moves = ListedMoves(moves, moves.num_listed)
    if options.json:
        print_json(moves.document(listed_moves))
        return OK
    processes = moves.processes(knows_senders=listed_moves.knows_senders)
    print(*_model_summary(moves), sep="\n")
    if len(processes) > 1:
        print("", *_process_lines(processes), sep="\n")
    print("", *_link_lines(listed_moves), sep="\n")
    if padded := [row for row in moves.rows if row.is_padded]:
        print("", *_padding_lines(padded, is_asked=options.pad), sep="\n")
    return OK


def _read_models(options: argparse.Namespace) -> tuple[ModelPlan, ModelPlan]:
    from gda.planning.model import in_order_of, plan_model

    refuse_options(options, _OF_ONE_ARRAY)
    if options.to_mesh is None and options.to_tree is None:
        raise MistakesError("--to-mesh and --to-tree are missing; give one or both")

    mesh, to_mesh = (read_given(options, name, parse_mesh) for name in ("mesh", "to-mesh"))
    devices = read_given(options, "devices-per-process", parse_number)
    to_devices = read_given(options, "to-devices-per-process", parse_number)
    if to_devices is None:
        to_devices = devices
    file = read_text("--tree", options.tree)
    source = plan_model(file, mesh, devices, pad=True)
    if options.to_tree is not None:
        file = read_text("--to-tree", options.to_tree)
    with _mistakes_after():
        target = plan_model(file, to_mesh, to_devices, pad=True, option="--to-mesh")
    if options.to_tree is not None:
        target = in_order_of(source, target, file.path)
    return source, target


def _model_summary(moves: ModelMoves) -> list[str]:
    source, target = moves.source, moves.target
    parameters = counted(len(source.parameters), "parameter")
    before, after = (format_bytes(model.bytes_per_device) for model in (source, target))
    rows = [
        ("model", f"{parameters}, {format_bytes(source.nbytes)}"),
        ("from", _mesh(source)),
        ("to", _mesh(target)),
        *(("note", note) for note in source.notes),
        ("", ""),
        *_totals(moves),
        ("", ""),
        ("per device", f"{before} before, {after} after"),
        *zip(("held twice", ""), _held_twice(moves), strict=False),
    ]
    if any(row.is_padded for row in moves.rows):
        before, after = (format_padding(model.padding) for model in (source, target))
        rows.append(("padding", f"{before} before; {after} after; on all devices"))
    return facts(rows)


def _mesh(model: ModelPlan) -> str:
    return f"{format_mesh(model.mesh)}: {model.devices_and_processes}"


def _held_twice(moves: ModelMoves) -> list[str]:
    extra = moves.nbytes_peak_extra
    if not extra:
        return [format_bytes(extra)]
    peak, one_by_one = map(
        format_bytes, (moves.nbytes_peak_per_device, moves.nbytes_peak_one_by_one)
    )
    of_process = format_bytes(moves.nbytes_peak_per_process)
    return [
        f"{format_bytes(extra)} per device: {peak} at peak, {of_process} per process",
        f"{one_by_one} at peak if each parameter is freed once it has moved",
    ]


def _process_lines(processes: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = {
        "keeps": "nbytes_kept",
        "moves within": "nbytes_within",
        "receives": "nbytes_received",
    }
    if processes[0]["nbytes_sent"] is not None:
        columns["sends"] = "nbytes_sent"
    busiest = sorted(
        processes, key=lambda each: -each["nbytes_received"] - (each["nbytes_sent"] or 0)
    )
    shown = sorted(busiest[:_PROCESSES_SHOWN], key=lambda each: each["process"])
    rows = [
        [str(each["process"]), *(format_bytes(each[key]) for key in columns.values())]
        for each in shown
    ]
    header = ["process", *columns]
    return table_of_some(header, rows, len(processes), "process", right={*header})


def _padding_lines(rows: Sequence[MovesRow], *, is_asked: bool) -> list[str]:
    parameters = counted(sum(len(row.alike.names) for row in rows), "parameter")
    head = ("do not divide", f"{parameters}; gda.PaddedArray takes such sizes, padded as below")
    if is_asked:
        head = ("padded", parameters)
    rows = sorted(rows, key=lambda row: -row.alike.padding(row.plan.target).nbytes)
    header = ["padding after", "parameter", "array", "spec", "before", "after"]
    cells = [
        [
            format_padding(row.alike.padding(row.plan.target)),
            row.title,
            row.alike.before.title,
            " to ".join(dict.fromkeys(map(format_spec, (old.spec, new.spec)))),
            *(
                format_shape(grid.padded_shape) if grid.is_padded else "divides"
                for grid in (old, new)
            ),
        ]
        for row in rows[:_ROWS_SHOWN]
        for old, new in [(row.plan.source, row.plan.target)]
    ]
    return [
        *facts([head]),
        "",
        *two_tables(header, cells, first=2, right={"padding after"}),
        *left_out(len(cells), len(rows), "row"),
    ]
