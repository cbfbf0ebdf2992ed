"""The report of ``gda reshard --tree FILE``: the moves of a whole model to other devices.

``gda/planning/moves.py`` describes the document of ``--json``, ``gda/planning/suggestion.py``
finds another target that moves less.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gda.cli.commands import OK, print_json, read_given
from gda.cli.model_report import plan_model, read_text, refuse_options
from gda.cli.reshards import LINKS_LISTED, Answer, link_lines, mistakes_after, totals
from gda.cli.tables import facts, left_out, terminal_width, two_tables
from gda.layout.padding import format_padding, format_percent
from gda.layout.spec import format_spec
from gda.layout.tables import table
from gda.layout.text import counted, format_bytes, format_mesh, in_processes, listed
from gda.planning.model import ModelPlan
from gda.planning.moves import ModelMoves, Row, moves_of
from gda.planning.notation.layouts import parse_mesh
from gda.planning.notation.mistakes import MistakesError
from gda.planning.notation.model_file import Mistakes
from gda.planning.notation.numbers import parse_number
from gda.planning.planned_array import format_shape
from gda.planning.suggestion import Suggestion, suggestion_for

_OF_ONE_ARRAY = ("shape", "dtype", "spec", "to_spec")
_PROCESSES_SHOWN = 8
_PROCESSES_NAMED = 32
_ROWS_SHOWN = 10


def reshard_tree(options: argparse.Namespace) -> int:
    """Run ``gda reshard --tree``."""
    source, target = _read(options)
    moves = moves_of(source, target)
    answer = Answer(moves, moves.num_listed)
    suggestion = suggestion_for(moves)
    processes = moves.processes(knows_senders=answer.knows_senders)
    if options.json:
        print_json(_document(moves, answer, processes, suggestion))
        return OK
    print(*_summary(moves), sep="\n")
    if len(processes) > 1:
        print("", *_process_lines(processes), sep="\n")
    print("", *link_lines(answer), sep="\n")
    if padded := [row for row in moves.rows if row.is_padded]:
        print("", *_padding_lines(padded, is_asked=options.pad), sep="\n")
    if suggestion is not None:
        print("", *_suggestion_lines(suggestion, moves), sep="\n")
    return OK


def _read(options: argparse.Namespace) -> tuple[ModelPlan, ModelPlan]:
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
    with mistakes_after():
        target = plan_model(file, to_mesh, to_devices, pad=True, option="--to-mesh")
    if options.to_tree is not None:
        target = _in_order_of(source, target, file.path)
    return source, target


def _in_order_of(source: ModelPlan, target: ModelPlan, path: str) -> ModelPlan:
    """Return the target with its parameters in the order of the source.

    Raises:
      MistakesError: they have other names, shapes or dtypes.
    """
    known = {parameter.name: parameter for parameter in target.parameters}
    mistakes = Mistakes(path)
    for old in source.parameters:
        new = known.pop(old.name, None)
        if new is None:
            mistakes.add("it is missing; --tree has this parameter", old.name)
        elif new.title != old.title:
            mistakes.add(
                f"{new.title} here, {old.title} in --tree; a move keeps shape and dtype", old.name
            )
    for name in known:
        mistakes.add("--tree does not have this parameter", name)
    mistakes.check()
    by_name = {parameter.name: parameter for parameter in target.parameters}
    return replace(target, parameters=[by_name[old.name] for old in source.parameters])


# For people.


def _summary(moves: ModelMoves) -> list[str]:
    source, target = moves.source, moves.target
    parameters = counted(len(source.parameters), "parameter")
    before, after = (format_bytes(model.bytes_per_device) for model in (source, target))
    rows = [
        ("model", f"{parameters}, {format_bytes(source.nbytes)}"),
        ("from", _mesh(source)),
        ("to", _mesh(target)),
        *(("note", note) for note in source.notes),
        ("", ""),
        *totals(moves),
        ("", ""),
        ("per device", f"{before} before, {after} after"),
        *zip(("held twice", ""), _held_twice(moves), strict=False),
    ]
    if any(row.is_padded for row in moves.rows):
        before, after = (format_padding(model.padding) for model in (source, target))
        rows.append(("padding", f"{before} before; {after} after; on all devices"))
    return facts(rows)


def _mesh(model: ModelPlan) -> str:
    return (
        f"{format_mesh(model.mesh)}: {in_processes(model.num_devices, model.devices_per_process)}"
    )


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


def _process_lines(processes: Sequence[dict[str, Any]]) -> list[str]:
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
    return [
        *table([header, *rows], right={*header}, width=terminal_width()),
        *left_out(len(rows), len(processes), "process", LINKS_LISTED),
    ]


def _padding_lines(rows: Sequence[Row], *, is_asked: bool) -> list[str]:
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


def _suggestion_lines(suggestion: Suggestion, moves: ModelMoves) -> list[str]:
    says = []
    if suggestion.mesh is not None:
        says.append(f"--to-mesh {format_mesh(suggestion.mesh)}")
    if suggestion.process_order is not None:
        order = ", ".join(map(str, suggestion.process_order[:_PROCESSES_NAMED]))
        if len(suggestion.process_order) > _PROCESSES_NAMED:
            order += ", … (--json lists all)"
        says.append(f"the processes in the order {order} in the new mesh")
    now, then, between = moves.nbytes_moved, suggestion.nbytes_moved, ""
    if moves.nbytes_between_processes:
        now, then = moves.nbytes_between_processes, suggestion.nbytes_between_processes
        between = " between processes"
    saved = format_percent(100 * (now - then) / now)
    return facts(
        [("suggestion", f"{listed(says)}: then {format_bytes(then)} move{between}, {saved} less")]
    )


# For programs.


def _document(
    moves: ModelMoves,
    answer: Answer,
    processes: Sequence[dict[str, Any]],
    suggestion: Suggestion | None,
) -> dict[str, Any]:
    return {
        "source": moves.source.describe_totals(),
        "target": moves.target.describe_totals(),
        **answer.describe(),
        "nbytes_peak_per_device": moves.nbytes_peak_per_device,
        "nbytes_peak_per_process": moves.nbytes_peak_per_process,
        "nbytes_peak_one_by_one": moves.nbytes_peak_one_by_one,
        "processes": processes[:LINKS_LISTED],
        "parameters": [row.describe() for row in moves.rows],
        "suggestion": None if suggestion is None else suggestion.describe(),
    }
