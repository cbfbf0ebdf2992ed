"""The command ``gda rehearse``: a program is compiled for devices that are not here.

The document of ``--json`` is that of ``Rehearsal.to_dict``, with ``topology``, ``num_slices``,
``mesh`` and ``error``: null, or the reason for a mesh without a rehearsal. Several meshes are a
list, sorted as the table is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from gda.cli.commands import (
    OK,
    WRONG,
    add_command,
    price,
    read_option,
    terminal_width,
)
from gda.cli.functions import file_and_function
from gda.cli.notation.mesh_and_spec import parse_mesh, parse_spec
from gda.cli.notation.mistakes import MistakesError
from gda.cli.notation.numbers import parse_number
from gda.compiled.devices.device_kinds import mesh_sizes_of, num_devices_of
from gda.layout.tables import table
from gda.layout.text import format_bytes, format_mesh

if TYPE_CHECKING:
    from gda.cli.rehearsal_processes import RehearsalReport, RehearsalRequest
    from gda.compiled.rehearsal import Rehearsal

_DOES_NOT_FIT = 1

_EPILOG = """\
the function:
  FUNCTION(mesh) returns the function to compile and a tuple of its arguments,
  and perhaps a dict of keyword arguments:

    def rehearsal(mesh):
        ...
        return step, (params, batch)

  Shapes of gda.abstract stand for arrays, so that nothing is allocated.

topologies:
  v5e:16x16 and the like need libtpu (the extra rehearse), h100:4x8, which is 4
  hosts with 8 GPUs each, JAX's plugin for CUDA (the extra rehearse-gpu).
  cpu:8 is 8 virtual devices of this machine, to try a file.

several meshes:
  Those that fit come first, by estimated time. A time such as ">= 28 ms" lacks
  work that gda cannot count; such meshes come last of these, with the reason.

examples:
  gda rehearse train.py:rehearsal --topology v5e:16x16 --mesh data=64,model=4
  gda rehearse train.py:rehearsal --topology v5e:4x4 --mesh data=16 \\
           --trace step.json
  gda rehearse train.py:rehearsal --topology v5e:4x4 --mesh data,model --search
  gda rehearse train.py:rehearsal --topology h100:8 \\
           --mesh 'data=8; data=4,model=2'

exit code:
  0 if it fits, or if the memory of the devices is unknown, as for cpu:8; 1 if
  it does not fit; 2 for a wrong command, and for a program that raises. Of
  several meshes, the least code counts. 130 after Ctrl-C.
"""


def add_rehearse(commands: Any) -> None:
    description = "Show the memory, communication and time of a program on devices not here."
    parser = add_command(commands, rehearse, description, epilog=_EPILOG)
    parser.add_argument(
        "program", metavar="FILE.py:FUNCTION", help="a function that returns the program"
    )
    parser.add_argument(
        "--topology", metavar="NAME", required=True, help="such as v5e:16x16, h100:4x8 or cpu:8"
    )
    parser.add_argument(
        "--mesh",
        metavar="MESH",
        required=True,
        help="a mesh over them, such as data=64,model=4; several with ; between them",
    )
    parser.add_argument("--num-slices", metavar="N", default="1", help="slices of this topology")
    parser.add_argument(
        "--target-config", metavar="FILE", help="describes a kind of GPU that gda does not know"
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="all meshes of the axes of --mesh, which has names only: --mesh data,model",
    )
    parser.add_argument("--examples", metavar="N", help="examples, or tokens, of a call")
    parser.add_argument("--price", metavar="P", type=price, help="of a device for one hour")
    parser.add_argument(
        "--trace", metavar="FILE.json", help="of one mesh: a picture of the step, for Perfetto"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def rehearse(options: argparse.Namespace) -> int:
    from gda.cli.rehearsal_processes import RehearsalRequest, reports_of

    file, function = file_and_function(options.program, "train.py:rehearsal")
    num_slices = read_option("--num-slices", options.num_slices, parse_number)
    config, examples = options.target_config, options.examples
    if config is not None and not os.path.isfile(config):
        raise MistakesError(f"--target-config: there is no file {config!r} here")
    if examples is not None:
        examples = read_option("--examples", examples, parse_number)
    requests = [
        RehearsalRequest(
            file=file,
            function=function,
            topology=options.topology,
            num_slices=num_slices,
            target_config=config,
            mesh=mesh,
            examples=examples,
            price=options.price,
        )
        for mesh in _meshes(options, num_slices)
    ]
    if options.trace is not None and (options.search or len(requests) > 1):
        raise MistakesError("--trace draws one mesh; give one with --mesh, without --search")
    results = sorted(map(_Result, requests, reports_of(requests)), key=_Result.order)
    first, *others = results
    is_one = not (others or options.search)
    if is_one and first.rehearsal is None:
        raise MistakesError(*first.report.lines)
    if options.json:
        documents = [each.document() for each in results]
        print(json.dumps(documents[0] if is_one else documents, indent=1, allow_nan=False))
    elif is_one and first.rehearsal:
        print(*filter(None, (first.rehearsal, first.rehearsal.collectives)), sep="\n\n")
    else:
        print(*_lines(results), sep="\n")
    if options.trace is not None and first.rehearsal:
        try:
            first.rehearsal.save_trace(options.trace)
        except (ValueError, OSError) as error:
            raise MistakesError(f"--trace: {error}") from None
    return first.code


def _meshes(options: argparse.Namespace, num_slices: int) -> list[dict[str, int]]:
    if not options.search:
        return [read_option("--mesh", text, parse_mesh) for text in options.mesh.split(";")]
    names = [] if "=" in options.mesh else read_option("--mesh", options.mesh, parse_spec)
    if not names or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise MistakesError(
            "--search finds the sizes of the axes; give their names alone: --mesh data,model"
        )
    try:
        return mesh_sizes_of([*map(str, names)], num_devices_of(options.topology) * num_slices)
    except ValueError as error:
        raise MistakesError(f"--topology: {error}") from None


# The results.


class _Result(NamedTuple):
    request: RehearsalRequest
    report: RehearsalReport

    @property
    def mesh(self) -> str:
        return format_mesh(self.request.mesh)

    @property
    def rehearsal(self) -> Rehearsal | None:
        return self.report.rehearsal

    @property
    def code(self) -> int:
        if self.rehearsal is None:
            return WRONG
        return _DOES_NOT_FIT if self.rehearsal.fits is False else OK

    def order(self) -> tuple[float, ...]:
        rehearsal = self.rehearsal
        if rehearsal is None:
            return (self.code,)
        nbytes, slow = (_bytes_sent(rehearsal, name) for name in ("nbytes", "nbytes_slow"))
        # Without speeds, work that devices repeat counts before bytes.
        seconds = rehearsal.seconds
        known = [math.inf if each is None else each for each in (seconds.estimate, rehearsal.flops)]
        peak = rehearsal.peak_bytes or math.inf
        is_unknown = seconds.is_bound or nbytes is None
        return (self.code, is_unknown, *known, slow or 0, nbytes or 0, peak)

    def document(self) -> dict[str, Any]:
        request = self.request
        return {
            "topology": request.topology,
            "num_slices": request.num_slices,
            "mesh": request.mesh,
            "error": self.report.reason or None,
            **(self.rehearsal.to_dict() if self.rehearsal else {}),
        }


def _bytes_sent(rehearsal: Rehearsal, name: str) -> int | None:
    """Return the sum of ``nbytes`` or ``nbytes_slow`` over all axes; None if one is unknown."""
    from gda.compiled.hlo import summed

    return summed(getattr(each, name) for each in rehearsal.traffic)


def _lines(results: Sequence[_Result]) -> list[str]:
    """Return the table of several meshes, and the reasons of those without a rehearsal."""
    from gda.compiled.report.rehearsal_text import distance_of, omissions_of, repetition_of

    rehearsed = [(each.mesh, each.rehearsal) for each in results if each.rehearsal]
    parts = [_table(results[0].request, rehearsed)] if rehearsed else []
    if rehearsed and (words := distance_of(rehearsed[0][1])):
        parts.append([f"{rehearsed[0][0]} is the fastest of these: {words}"])
    repeated = ((mesh, repetition_of(rehearsal)) for mesh, rehearsal in rehearsed)
    parts.append([f"{mesh}: {words}" for mesh, words in repeated if words])
    bounds = [(mesh, omissions_of(each)) for mesh, each in rehearsed if each.seconds.is_bound]
    parts.append([f"{mesh}: {words}" for mesh, words in bounds])
    if failed := [[each.mesh, each.report.reason] for each in results if not each.rehearsal]:
        lines = table([["no rehearsal", "reason"], *failed], width=terminal_width())
        parts.append([*lines, f"for a traceback: --mesh {failed[0][0]} alone"])
    return [*chain(*(["", *part] for part in parts if part))][1:]


def _table(request: RehearsalRequest, rehearsed: Sequence[tuple[str, Rehearsal]]) -> list[str]:
    from gda.compiled.hlo import format_axes, format_size

    _, first = rehearsed[0]
    axes = {each.axes for _, rehearsal in rehearsed for each in rehearsal.traffic}
    ordered = sorted(axes, key=lambda key: (key is None, len(key or ()), key or ()))
    has_slow = any(_bytes_sent(rehearsal, "nbytes_slow") for _, rehearsal in rehearsed)
    has_seconds = any(each.seconds.estimate is not None for _, each in rehearsed)
    header = ["mesh", "fits", "peak", *(f"over {format_axes(each)}" for each in ordered)]
    header += ["over slow links"] * has_slow + ["about"] * has_seconds
    rows = []
    for mesh, rehearsal in rehearsed:
        nbytes_over = {each.axes: each.nbytes for each in rehearsal.traffic}
        cells = [format_size(nbytes_over.get(key, 0)) for key in ordered]
        cells += [format_size(_bytes_sent(rehearsal, "nbytes_slow"))] * has_slow
        cells += [str(rehearsal.seconds)] * has_seconds
        cells = [""] * len(cells) if rehearsal.fits is False else cells
        fits = {True: "yes", False: "no", None: "?"}[rehearsal.fits]
        rows.append([mesh, fits, format_size(rehearsal.peak_bytes), *cells])
    capacity = first.capacity_bytes
    each_with = "" if capacity is None else f" with {format_bytes(capacity)} each"
    on = f"{first.num_devices:,} x {first.device_kind}{each_with}"
    heading = f"{request.file}:{request.function} on {on}; bytes are those of one device"
    return [heading, "", *table([header, *rows], right={*header[2:]}, width=terminal_width())]
