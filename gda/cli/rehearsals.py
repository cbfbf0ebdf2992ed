"""The command ``gda rehearse``: a program is compiled for devices that are not here.

The document of ``--json`` is that of ``Rehearsal.to_dict``, with ``topology``, ``num_slices``,
``mesh``, ``keywords`` and ``error``: null, or for a mesh without a rehearsal the reason. Several
meshes are a list, sorted as the table is.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from gda.cli.commands import (
    OK,
    WRONG,
    add_command,
    read_option,
    terminal_width,
)
from gda.cli.functions import file_and_function
from gda.layout.tables import table
from gda.layout.text import format_bytes
from gda.planning.device_kinds import meshes_of, num_devices_of
from gda.planning.notation.mesh_and_spec import parse_mesh, parse_spec
from gda.planning.notation.mistakes import MistakesError
from gda.planning.notation.numbers import parse_number

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
  Those that fit come first, by estimated time or, with --price, by cost. A mesh
  of --vary may have another topology before it, and numbers after it, which are
  keywords of FUNCTION: 'v5e:4x4 data=16 batch=64; h100:8 data=8 batch=32'. With
  --search it has no mesh: all of the axes of --mesh are tried for each.

examples:
  gda rehearse train.py:rehearsal --topology v5e:16x16 --mesh data=64,model=4
  gda rehearse train.py:rehearsal --topology v5e:4x4 --mesh data,model --search
  gda rehearse train.py:rehearsal --mesh data,model --search \\
           --vary 'v5e:4x4; h100:8' --price v5e=1.2,h100=2.5 --examples 64

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
    parser.add_argument("--topology", metavar="NAME", help="such as v5e:16x16, h100:4x8 or cpu:8")
    parser.add_argument("--mesh", metavar="MESH", help="a mesh over them, such as data=64,model=4")
    parser.add_argument("--num-slices", metavar="N", default="1", help="slices of this topology")
    parser.add_argument(
        "--target-config", metavar="FILE", help="describes a kind of GPU that gda does not know"
    )
    parser.add_argument(
        "--vary",
        metavar="POINTS",
        help="more meshes, with ; between them, each as [TOPOLOGY] MESH [NAME=NUMBER …]",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="all meshes of the axes of --mesh, which has names only: --mesh data,model",
    )
    parser.add_argument(
        "--examples", metavar="N", help="examples of a call, or the NAME in --vary that has them"
    )
    parser.add_argument(
        "--price", metavar="P", help="of a device and hour: 2.5, or by kind v5e=1.2,h100=2.5"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def rehearse(options: argparse.Namespace) -> int:
    is_one = not (options.search or options.vary)
    results = sorted(_results(options, _points(options)), key=_Result.order)
    rehearsals = [each.rehearsal for each in results if each.rehearsal]
    failed = [each.report for each in results if not each.rehearsal]
    is_interrupted = any(report.is_interrupted for report in failed)
    if is_interrupted and not rehearsals:
        raise KeyboardInterrupt
    if failed and is_one:
        raise MistakesError(*failed[0].lines)
    if options.json:
        documents = [each.document() for each in results]
        print(json.dumps(documents[0] if is_one else documents, indent=1, allow_nan=False))
    elif is_one:
        (rehearsal,) = rehearsals
        print(*filter(None, (rehearsal, rehearsal.collectives)), sep="\n\n")
    else:
        print(*_lines(results), sep="\n")
    if is_interrupted:
        raise KeyboardInterrupt
    return min(result.code for result in results)


# The meshes to try.


class _Point(NamedTuple):
    """A rehearsal to make: a topology, a mesh over it, and keywords of the function."""

    topology: str
    mesh: dict[str, int]
    keywords: dict[str, int]


def _results(options: argparse.Namespace, points: Sequence[_Point]) -> list[_Result]:
    from gda.cli.rehearsal_processes import RehearsalRequest, reports_of

    file, function = file_and_function(options.program, "train.py:rehearsal")
    num_slices = _num_slices(options)
    requests = [
        RehearsalRequest(
            *(file, function, of.topology, num_slices, options.target_config, of.mesh),
            keywords=tuple(of.keywords.items()),
            examples=_examples(options.examples, of.keywords),
            price=_price(options.price, of.topology),
        )
        for of in points
    ]
    reports = reports_of(requests, is_silent=len(requests) > 1)
    return [*map(_Result, requests, reports)]


def _num_slices(options: argparse.Namespace) -> int:
    return read_option("--num-slices", options.num_slices, parse_number)


def _examples(text: str | None, keywords: Mapping[str, int]) -> float | None:
    if text is None or text in keywords:
        return None if text is None else float(keywords[text])
    return read_option("--examples", text, parse_number)


def _price(text: str | None, topology: str) -> float | None:
    """Return the price of a device and hour: one of all kinds, or ``v5e=1.2,h100=2.5``."""
    for each in (text or "").split(",") if text else ():
        kind, _, number = each.rpartition("=")
        if kind.strip() in ("", topology.partition(":")[0]):
            with suppress(ValueError):
                if 0 < (price := float(number)) < math.inf:
                    return price
            raise MistakesError(
                f"--price {text}: {number!r} is no price; give 2.5, or v5e=1.2,h100=2.5"
            )
    return None


def _points(options: argparse.Namespace) -> list[_Point]:
    names = _names(options.mesh or "") if options.search else []
    points = [] if options.search else [_point(options, options.mesh or "")]
    points += [_point(options, text) for text in (options.vary or "").split(";") if text.strip()]
    if options.search:
        points = points or [_Point(options.topology or "", {}, {})]
        points = [of._replace(mesh=mesh) for of in points for mesh in _searched(options, of, names)]
    points = [of for n, of in enumerate(points) if of.mesh and of not in points[:n]]
    if not points:
        raise MistakesError("no mesh was given; give --mesh data=64,model=4, say")
    if not all(of.topology for of in points):
        raise MistakesError("no topology was given; give --topology v5e:16x16, say")
    return points


def _point(options: argparse.Namespace, text: str) -> _Point:
    """Return the point of ``[TOPOLOGY] [MESH] [NAME=NUMBER …]``; a search has no mesh there."""
    words = re.sub(r"\s*,\s*", ",", text).split()
    topology = options.topology or ""
    if words and "=" not in words[0] and ":" in words[0] and (len(words) > 1 or options.search):
        topology = words.pop(0)
    name = "--mesh" if text == options.mesh else "--vary"
    mesh = {} if options.search or not words else read_option(name, words.pop(0), parse_mesh)
    keywords = read_option(name, ",".join(words), parse_mesh) if words else {}
    return _Point(topology, mesh, keywords)


def _searched(
    options: argparse.Namespace, of: _Point, names: Sequence[str]
) -> list[dict[str, int]]:
    num_slices = _num_slices(options)
    try:
        return meshes_of(names, num_devices_of(of.topology) * num_slices)
    except ValueError as error:
        raise MistakesError(f"--topology: {error}") from None


def _names(text: str) -> list[str]:
    names = [] if "=" in text else read_option("--mesh", text, parse_spec)
    if not names or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise MistakesError(
            "--search finds the sizes of the axes; give their names alone: --mesh data,model"
        )
    return [*map(str, names)]


# The results.


class _Result(NamedTuple):
    request: RehearsalRequest
    report: RehearsalReport

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
        costs = [_cost(rehearsal), rehearsal.seconds.estimate, rehearsal.flops]
        known = [math.inf if each is None else each for each in costs]
        peak = rehearsal.peak_bytes or math.inf
        return (self.code, nbytes is None, *known, slow or 0, nbytes or 0, peak)

    def document(self) -> dict[str, Any]:
        request = self.request
        return {
            "topology": request.topology,
            "num_slices": request.num_slices,
            "mesh": request.mesh,
            "keywords": dict(request.keywords),
            "error": self.report.reason or None,
            **(self.rehearsal.to_dict() if self.rehearsal else {}),
        }


def _cost(rehearsal: Rehearsal) -> float | None:
    """Return the cost of 1,000 examples, or of a call if their number is unknown."""
    cost, examples = rehearsal.cost, rehearsal.examples
    return cost * 1000 / examples if cost is not None and examples else cost


def _bytes_sent(rehearsal: Rehearsal, name: str) -> int | None:
    """Return the sum of ``nbytes`` or ``nbytes_slow`` over all axes; None if one is unknown."""
    from gda.compiled.hlo import summed

    return summed(getattr(each, name) for each in rehearsal.traffic)


def _lines(results: Sequence[_Result]) -> list[str]:
    """Return the table of several meshes, and the reasons of those without a rehearsal."""
    from gda.compiled.report.rehearsal_text import repetition_of

    are_several = len({each.request.topology for each in results}) > 1

    def label(of: _Result) -> str:
        return f"{of.request.topology} {of.request.point}" if are_several else of.request.point

    rehearsed = [(label(each), each.rehearsal) for each in results if each.rehearsal]
    parts = [_table(results[0].request, rehearsed, are_several)] if rehearsed else []
    repeated = ((mesh, repetition_of(rehearsal)) for mesh, rehearsal in rehearsed)
    parts.append([f"{mesh}: {words}" for mesh, words in repeated if words])
    if failed := [each for each in results if not each.rehearsal]:
        reasons = [[label(each), each.report.reason] for each in failed]
        lines = table([["no rehearsal", "reason"], *reasons], width=terminal_width())
        raised = [each for each in failed if not each.report.is_interrupted]
        alone = [f"for a traceback: --mesh {shlex.quote(label(of))} alone" for of in raised[:1]]
        parts.append([*lines, *alone])
    return [*chain(*(["", *part] for part in parts if part))][1:]


def _table(
    request: RehearsalRequest, rehearsed: Sequence[tuple[str, Rehearsal]], are_several: bool
) -> list[str]:
    from gda.compiled.hlo import format_axes, format_size
    from gda.compiled.report.rehearsal_text import format_seconds

    _, first = rehearsed[0]
    axes = {each.axes for _, rehearsal in rehearsed for each in rehearsal.traffic}
    ordered = sorted(axes, key=lambda key: (key is None, len(key or ()), key or ()))
    fitting = [rehearsal for _, rehearsal in rehearsed if rehearsal.fits is not False]
    has_slow = any(_bytes_sent(rehearsal, "nbytes_slow") for _, rehearsal in rehearsed)
    has_seconds = any(each.seconds.estimate is not None for each in fitting)
    has_cost = any(each.cost is not None for each in fitting)
    thing = "1,000 examples" if any(each.examples for each in fitting) else "a call"
    header = ["mesh", "fits", "peak", *(f"over {format_axes(each)}" for each in ordered)]
    header += ["over slow links"] * has_slow + ["about"] * has_seconds
    header += [f"cost of {thing}"] * has_cost
    rows = []
    for mesh, rehearsal in rehearsed:
        nbytes_over = {each.axes: each.nbytes for each in rehearsal.traffic}
        cells = [format_size(nbytes_over.get(key, 0)) for key in ordered]
        cells += [format_size(_bytes_sent(rehearsal, "nbytes_slow"))] * has_slow
        cells += [format_seconds(rehearsal.seconds.estimate)] * has_seconds
        cells += ["?" if (cost := _cost(rehearsal)) is None else f"{cost:.3g}"] * has_cost
        cells = [""] * len(cells) if rehearsal.fits is False else cells
        fits = {True: "yes", False: "no", None: "?"}[rehearsal.fits]
        rows.append([mesh, fits, format_size(rehearsal.peak_bytes), *cells])
    capacity = first.capacity_bytes
    each_with = "" if capacity is None else f" with {format_bytes(capacity)} each"
    on = "" if are_several else f" on {first.num_devices:,} x {first.device_kind}{each_with}"
    heading = f"{request.file}:{request.function}{on}; bytes are those of one device"
    return [heading, "", *table([header, *rows], right={*header[2:]}, width=terminal_width())]
