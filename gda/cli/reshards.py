"""The command ``gda reshard``: the moves that change the layout of an array, without devices.

``--json`` prints one document:

- ``source`` and ``target``: the two layouts, as ``gda plan`` describes an array;
  ``notes``: what this document omits, in words;
- ``nbytes_kept``, ``nbytes_within_processes``, ``nbytes_between_processes``: the bytes of
  target blocks that their device has already, that come from another device of its process, and
  that come from another process. ``nbytes_moved`` is the sum of the last two; ``num_moves`` counts
  pieces, kept ones included;
- ``received_by_device``, ``sent_by_device``: ``{"largest", "mean"}`` bytes to and from other
  devices; ``received_by_process``, ``sent_by_process``: the same between processes;
- ``largest_sender``, ``largest_receiver``: ``{"device", "nbytes"}``, the first of equals. Bytes
  sent are null if they need too many moves;
- ``nbytes_peak_extra``: the most bytes that a device needs beside its source block;
- ``num_links``: pairs of processes that communicate; ``links``: ``{"source_process",
  "target_process", "nbytes"}`` of each, busiest first, at most 16,384. Both are null if they need
  too many moves.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gda.cli.array_options import add_array_options, read_array
from gda.cli.commands import CALCULATION_ERRORS, OK, add_command, print_json, read_given
from gda.cli.tables import facts, left_out, terminal_width
from gda.layout.spec import format_spec
from gda.layout.tables import table
from gda.layout.text import counted, format_bytes, format_mesh
from gda.planning.notation.layouts import parse_mesh, parse_spec
from gda.planning.notation.mistakes import MistakesError
from gda.planning.notation.numbers import parse_number
from gda.planning.planned_array import PlannedArray, format_shape, padding_words, plan_array

if TYPE_CHECKING:
    from gda.layout.reshard.plan import ReshardPlan
    from gda.planning.moves import ModelMoves

# Some answers list every move, about 10 million in a second.
MOST_MOVES = 5_000_000
LINKS_LISTED = 16_384
_LINKS_SHOWN = 5
_NEEDED = (
    "give --shape, --dtype, --mesh and --spec, and --to-mesh, --to-spec or both; "
    "or --tree FILE for a model"
)

_PIECES = "A piece is the part of a new block that one device sends or keeps."

_EPILOG = """\
Device 3 of one mesh is device 3 of the other. Each piece comes from the nearest
device that has it: the same one, one of the same process, or any.
`gda plan --help` describes specs.

examples:
  gda reshard --shape 65536x8192 --dtype bf16 --mesh data=64,model=16 \\
              --spec data,model --to-spec model,data --devices-per-process 8
  gda reshard --shape 24x8 --dtype f32 --mesh x=8 --spec x --to-mesh x=6
  gda reshard --tree model.json --to-mesh data=6,model=8 --devices-per-process 8
"""


def add_reshard(commands: Any) -> None:
    says = "Show the bytes that move when a layout changes; no device is needed."
    parser = add_command(commands, reshard, says, epilog=_EPILOG, errors=CALCULATION_ERRORS)
    add_array_options(parser)
    parser.add_argument("--to-mesh", metavar="MESH", help="the new mesh; by default the same")
    parser.add_argument("--to-spec", metavar="SPEC", help="the new spec; by default the same")
    parser.add_argument(
        "--to-devices-per-process", metavar="M", help="devices of each in the new mesh"
    )
    parser.add_argument(
        "--tree",
        metavar="FILE",
        help="move the model that this JSON file describes; see `gda plan --help`",
    )
    parser.add_argument(
        "--to-tree",
        metavar="FILE",
        help="the model with its new mesh and specs; by default the same",
    )
    parser.add_argument("--no-picture", action="store_true", help="print no picture")
    parser.add_argument("--json", action="store_true", help="print JSON")


def reshard(options: argparse.Namespace) -> int:
    if options.tree is not None:
        from gda.cli.model_reshard import reshard_tree

        return reshard_tree(options)
    from gda.layout.reshard.plan import ReshardPlan

    if options.to_tree is not None:
        raise MistakesError("--to-tree is for a model; give --tree too")
    if options.to_mesh is None and options.to_spec is None:
        raise MistakesError("--to-mesh and --to-spec are missing; give one or both")
    source = read_array(options, _NEEDED)
    target = _read_target(options, source)
    plan = ReshardPlan(source.grid, target.grid, itemsize=source.dtype.itemsize)
    answer = Answer(plan, plan.num_moves)
    if options.json:
        print_json({"source": source.describe(), "target": target.describe(), **answer.describe()})
        return OK
    print(*_summary(source, target, plan), "", _PIECES, "", *_loads(answer), sep="\n")
    print("", *link_lines(answer), sep="\n")
    if not options.no_picture:
        from gda.cli.pictures import before_and_after

        print("", *before_and_after(source, target), sep="\n")
    return OK


class Answer:
    """The moves of an array or a model and their numbers, without those that need too many moves.

    Attributes:
      plan: the moves.
      links: bytes from process to process; None if omitted.
      knows_senders: the bytes that each device and process sends are known.
      notes: the omissions, in words.
    """

    def __init__(self, plan: ReshardPlan | ModelMoves, num_listed: int) -> None:
        is_long = num_listed > MOST_MOVES
        self.plan = plan
        self.links = None if is_long else plan.links()
        self.knows_senders = not (is_long and plan.lists_moves)
        what = "links are" if self.knows_senders else "links and bytes sent are"
        self.notes = (
            [f"{what} omitted: {num_listed:,} pieces are too many to list"] if is_long else []
        )

    def describe(self) -> dict[str, Any]:
        """Return its part of the document of ``--json``."""
        plan, links, is_known = self.plan, self.links, self.knows_senders
        return {
            "notes": self.notes,
            "nbytes_kept": plan.nbytes_kept,
            "nbytes_within_processes": plan.nbytes_within_processes,
            "nbytes_between_processes": plan.nbytes_between_processes,
            "nbytes_moved": plan.nbytes_moved,
            "num_moves": plan.num_moves,
            "received_by_device": _load(plan.received_by_device),
            "sent_by_device": _load(plan.sent_by_device) if is_known else None,
            "received_by_process": _load(plan.received_by_process.values()),
            "sent_by_process": _load(plan.sent_by_process.values()) if is_known else None,
            "largest_sender": _largest(plan.sent_by_device) if is_known else None,
            "largest_receiver": _largest(plan.received_by_device),
            "nbytes_peak_extra": plan.nbytes_peak_extra,
            "num_links": None if links is None else len(links),
            "links": None if links is None else [link._asdict() for link in links[:LINKS_LISTED]],
        }


def _read_target(options: argparse.Namespace, source: PlannedArray) -> PlannedArray:
    grid = source.grid
    mesh = read_given(options, "to-mesh", parse_mesh) or grid.mesh_shape
    spec = read_given(options, "to-spec", parse_spec)
    devices = read_given(options, "to-devices-per-process", parse_number)
    if devices is None and options.devices_per_process is not None:
        devices = source.devices_per_process
    if spec is None:
        spec = grid.spec
    with mistakes_after():
        return plan_array(grid.global_shape, source.dtype, mesh, spec, devices, pad=options.pad)


@contextmanager
def mistakes_after() -> Iterator[None]:
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
            *totals(plan),
            ("extra memory", f"{format_bytes(plan.nbytes_peak_extra):>10}  at most on a device"),
        ]
    )


def totals(plan: ReshardPlan | ModelMoves) -> list[tuple[str, str]]:
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
    spec, mesh = format_spec(array.grid.spec), format_mesh(array.grid.mesh_shape)
    blocks = f"blocks of {format_shape(array.grid.shard_shape)}"
    return [
        (label, f"{spec} on {mesh}"),
        ("", f"{array.devices_and_processes}, {blocks}"),
        *(("", f"padded {padding}") for padding in padding_words(array)),
    ]


def _loads(answer: Answer) -> list[str]:
    plan = answer.plan
    loads = {"device": [_load_row("receives", plan.received_by_device, names="device")]}
    if plan.source.num_processes > 1 or plan.target.num_processes > 1:
        loads["process"] = [_load_row("receives", plan.received_by_process.values())]
    if answer.knows_senders:
        loads["device"][:0] = [_load_row("sends", plan.sent_by_device, names="device")]
        if "process" in loads:
            loads["process"][:0] = [_load_row("sends", plan.sent_by_process.values())]
    rows = [
        [who if number == 0 else "", *row]
        for who, group in loads.items()
        for number, row in enumerate(group)
    ]
    header = ["each", "", "on average", "at most", ""]
    right = {"at most", "on average"}
    return table([header, *rows], right=right, width=terminal_width())


def _load_row(does: str, loads: Iterable[int], names: str = "") -> list[str]:
    values = [*loads]
    load, top = _load(values), _largest(values)
    which = f"{names} {top['device']}" if names and load["largest"] > load["mean"] else ""
    return [does, format_bytes(round(load["mean"])), format_bytes(load["largest"]), which]


def _load(loads: Iterable[int]) -> dict[str, Any]:
    values = list(map(int, loads))
    return {"largest": max(values), "mean": sum(values) / len(values)}


def link_lines(answer: Answer) -> list[str]:
    """Return the table of the busiest links."""
    links = answer.links
    if links is None:
        return facts(("note", note) for note in answer.notes)
    if not links:
        return facts([("links", "none: no process sends to another")])
    rows = [
        [f"process {link.source_process} to {link.target_process}", format_bytes(link.nbytes)]
        for link in links[:_LINKS_SHOWN]
    ]
    more = left_out(len(rows), len(links), "link", LINKS_LISTED)
    rows = [["busiest links", "bytes"], *rows]
    return [*table(rows, right={"bytes"}, width=terminal_width()), *more]


def _largest(loads: Iterable[int]) -> dict[str, int]:
    values = list(map(int, loads))
    return {"device": values.index(max(values)), "nbytes": max(values)}
