"""The command ``gda rehearse``: a program is compiled for devices that are not here.

The document of ``--json`` is that of ``Rehearsal.to_dict``, with ``topology``, ``num_slices``,
``mesh`` (axis sizes by name) and ``error``, which is null. With ``--vary`` or ``--search`` it is a
list of them, sorted as the table is. A mesh without a rehearsal has the reason as ``error``, and
none of the keys of ``Rehearsal.to_dict``. With ``--compare`` it is ``RehearsalComparison.changes``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gda.cli.commands import (
    ERRORS,
    OK,
    add_command,
    print_json,
    read_given,
    read_option,
    shows_progress,
)
from gda.cli.facts import terminal_width, two_tables
from gda.cli.functions import file_and_function
from gda.launch.arguments import WRONG
from gda.layout.strict_json import parse_json
from gda.layout.tables import table
from gda.layout.text import counted, format_bytes, format_mesh
from gda.planning.device_kinds import meshes_of, num_devices_of
from gda.planning.notation.layouts import parse_mesh, parse_spec
from gda.planning.notation.mistakes import MistakesError
from gda.planning.notation.numbers import parse_number

if TYPE_CHECKING:
    from gda.cli.rehearsal_processes import Report, Request
    from gda.compiled.rehearsal import Rehearsal

_DOES_NOT_FIT = 1

_EPILOG = """\
the function:
  FUNCTION(mesh) returns the function to compile and a tuple of its arguments:

    def rehearsal(mesh):
        ...
        return step, (params, batch)

  A dict of keyword arguments may be third. Shapes of gda.abstract stand for
  arrays, so that nothing is allocated. Other processes import the file once, as a
  module and not as __main__. With one mesh, the program prints to stderr.

topologies:
  v5e:16x16 and the like need libtpu (the extra rehearse) and no TPU.
  h100:4x8 is 4 hosts with 8 GPUs each and needs JAX's plugin for CUDA (the
  extra rehearse-gpu) and no GPU; so do a100, a100-40, h100-pcie, h200, b200,
  gb200. cpu:8 is 8 virtual devices of this machine, to try a file.

several meshes:
  Meshes that fit come first, those with the fewest bytes over slow links before
  others, then those with the fewest bytes. As many compile beside each other as
  there are cores and 4 GiB of free memory for each. A mesh is not compiled if the
  arguments alone do not fit; its peak is then a lower bound, as in >= 90.0 GiB.

two rehearsals side by side:
  --compare A B takes two meshes, or, without FILE.py:FUNCTION and --topology,
  two files that --json has written. With --json it prints what changes.

examples:
  gda rehearse train.py:rehearsal --topology v5e:16x16 --mesh data=64,model=4
  gda rehearse train.py:rehearsal --topology v5e:16x16 \\
           --vary 'data=64,model=4;data=32,model=8'
  gda rehearse train.py:rehearsal --topology v5e:16x16 --mesh data,model --search
  gda rehearse --compare before.json after.json --html compared.html

exit code:
  0 if it fits, or if the memory of the devices is unknown, as for cpu:8; 1 if
  it does not fit; 2 for a wrong command, and for a program that raises. Of
  several meshes, the least code counts. 130 after Ctrl-C.
"""


def add_rehearse(commands: Any) -> None:
    says = "Show the memory and the communication of a program on devices that are not here."
    parser = add_command(commands, rehearse, says, epilog=_EPILOG, errors=ERRORS)
    parser.add_argument(
        "program",
        metavar="FILE.py:FUNCTION",
        nargs="?",
        help="a function that returns the program",
    )
    parser.add_argument("--topology", metavar="NAME", help="such as v5e:16x16, h100:4x8 or cpu:8")
    parser.add_argument("--mesh", metavar="MESH", help="a mesh over them, such as data=64,model=4")
    parser.add_argument("--num-slices", metavar="N", default="1", help="slices of this topology")
    parser.add_argument(
        "--target-config", metavar="FILE", help="describes a kind of GPU that gda does not know"
    )
    several = parser.add_mutually_exclusive_group()
    several.add_argument("--vary", metavar="MESHES", help="more meshes, with ; between them")
    several.add_argument(
        "--search",
        action="store_true",
        help="all meshes of the axes of --mesh, which has names only: --mesh data,model",
    )
    several.add_argument(
        "--compare", metavar=("A", "B"), nargs=2, help="two meshes or files, side by side"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="FILE", help="write a picture of each rehearsal")


def rehearse(options: argparse.Namespace) -> int:
    if options.compare:
        return _compare(options)
    is_one = not (options.search or options.vary)
    results = sorted(_results(options, _meshes(options)), key=_Result.order)
    if is_one and not results[0].report.rehearsal:
        raise MistakesError(*results[0].report.lines)
    _write_pictures(options, (each.rehearsal for each in results if each.report.rehearsal))
    if options.json:
        documents = [result.document() for result in results]
        print_json(documents[0] if is_one else documents)
    elif is_one:
        rehearsal = results[0].rehearsal
        print(rehearsal, *([rehearsal.collectives] if rehearsal.collectives else []), sep="\n\n")
    else:
        print(*_lines(results), sep="\n")
    return min(result.code for result in results)


def _compare(options: argparse.Namespace) -> int:
    from gda.compiled.comparison import compare_rehearsals

    if options.mesh:
        raise MistakesError("--compare has the meshes; omit --mesh")
    if options.program is None:
        rehearsals = [*map(_of_file, options.compare)]
    else:
        meshes = [read_option("--compare", text, parse_mesh) for text in options.compare]
        results = _results(options, meshes)
        if failed := next((each for each in results if not each.report.rehearsal), None):
            raise MistakesError(*failed.report.lines)
        rehearsals = [each.rehearsal for each in results]
    compared = compare_rehearsals(*rehearsals)
    _write_pictures(options, rehearsals)
    if options.json:
        print_json(compared.changes)
    else:
        print(compared)
    return min(_DOES_NOT_FIT if each.fits is False else OK for each in rehearsals)


def _of_file(path: str) -> Rehearsal:
    from gda.compiled.rehearsal import Rehearsal

    try:
        document = parse_json(Path(path).read_text(encoding="utf-8"))
        return Rehearsal.from_dict(document)
    except FileNotFoundError:
        raise MistakesError(
            f"there is no file {path!r} here; to compare meshes, give FILE.py:FUNCTION and "
            "--topology"
        ) from None
    except ValueError as error:
        raise MistakesError(f"{path} is no file of gda rehearse --mesh … --json: {error}") from None


def _write_pictures(options: argparse.Namespace, rehearsals: Iterable[Rehearsal]) -> None:
    if options.html:
        from gda.compiled.report.rehearsal_page import page_of

        Path(options.html).write_text(page_of(rehearsals), encoding="utf-8")


# The meshes to try.


def _results(options: argparse.Namespace, meshes: Iterable[dict[str, int]]) -> list[_Result]:
    """Return the results of the program over some meshes."""
    from gda.cli.rehearsal_processes import Request, reports_of
    from gda.storage.progress import shown

    file, function = file_and_function(options.program or "", "train.py:rehearsal")
    about = file, function, _topology(options), _num_slices(options), options.target_config
    may_skip = bool(options.search or options.vary)
    requests = [Request(*about, mesh, may_skip) for mesh in meshes]
    is_silent = len(requests) > 1
    with shown(is_silent and shows_progress(), "rehearse", in_bytes=False) as show_progress:
        reports = reports_of(requests, show_progress, is_silent=is_silent)
    return [*map(_Result, requests, reports)]


def _topology(options: argparse.Namespace) -> str:
    if options.topology is None:
        raise MistakesError("no topology was given; give --topology v5e:16x16, say")
    return options.topology


def _num_slices(options: argparse.Namespace) -> int:
    return read_option("--num-slices", options.num_slices, parse_number)


def _meshes(options: argparse.Namespace) -> list[dict[str, int]]:
    if options.search:
        names = _names(options.mesh or "")
        try:
            return meshes_of(names, num_devices_of(_topology(options)) * _num_slices(options))
        except ValueError as error:
            raise MistakesError(f"--topology: {error}") from None
    meshes = [read_given(options, "mesh", parse_mesh)]
    for text in (options.vary or "").split(";"):
        meshes.append(read_option("--vary", text, parse_mesh) if text.strip() else None)
    given = [mesh for n, mesh in enumerate(meshes) if mesh and mesh not in meshes[:n]]
    if not given:
        raise MistakesError("no mesh was given; give --mesh data=64,model=4, say")
    return given


def _names(text: str) -> list[str]:
    names = [] if "=" in text else read_option("--mesh", text, parse_spec)
    if not names or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise MistakesError(
            "--search finds the sizes of the axes; give their names alone: --mesh data,model"
        )
    return [*map(str, names)]


# The results.


class _Result(NamedTuple):
    """A mesh and its report."""

    request: Request
    report: Report

    @property
    def code(self) -> int:
        if self.report.rehearsal is None:
            return WRONG
        return _DOES_NOT_FIT if self.report.rehearsal["fits"] is False else OK

    @property
    def rehearsal(self) -> Rehearsal:
        """The rehearsal, if there is one."""
        from gda.compiled.rehearsal import Rehearsal

        return Rehearsal.from_dict(self.report.rehearsal or {})

    @property
    def facts(self) -> dict[str, Any]:
        """``Rehearsal.to_dict()``, or the little that is known without a rehearsal."""
        return self.report.rehearsal or {"fits": None, "peak_bytes": None, "traffic": ()}

    @property
    def nbytes_of(self) -> dict[tuple[str, ...] | None, int | None]:
        """The bytes over each set of axes; the key None is for groups that no axes form."""
        return {
            each["axes"] and tuple(each["axes"]): each["nbytes"] for each in self.facts["traffic"]
        }

    def total(self, key: str) -> int | None:
        """Return the sum of a number over all axes; None if one of them is unknown."""
        numbers = [each[key] for each in self.facts["traffic"]]
        return None if None in numbers else sum(numbers)

    def order(self) -> tuple[float, ...]:
        nbytes, slow = self.total("nbytes"), self.total("nbytes_slow")
        peak = self.facts["peak_bytes"] or math.inf
        return (self.code, nbytes is None, slow or 0, nbytes or 0, peak)

    def document(self) -> dict[str, Any]:
        request = self.request
        return {
            "topology": request.topology,
            "num_slices": request.num_slices,
            "mesh": request.mesh,
            "error": self.report.reason or None,
            **(self.report.rehearsal or {}),
        }


def _lines(results: Sequence[_Result]) -> list[str]:
    """Return the table of several meshes, and the reasons of those without a rehearsal."""
    found = [result for result in results if result.report.rehearsal]
    failed = [result for result in results if not result.report.rehearsal]
    lines = _table(found) if found else []
    if failed:
        reasons = [[format_mesh(each.request.mesh), each.report.reason] for each in failed]
        header = ["no rehearsal", "reason"]
        lines += ["", *table([header, *reasons], width=terminal_width())]
        lines.append(f"for a traceback: --mesh {format_mesh(failed[0].request.mesh)} alone")
    if skipped := [each for each in found if not each.facts["is_compiled"]]:
        meshes = counted(len(skipped), "mesh", "meshes")
        lines += [
            "",
            f"not compiled because the arguments alone do not fit: {meshes}; for details of one:",
            f"--mesh {format_mesh(skipped[0].request.mesh)} alone",
        ]
    return lines if found else lines[1:]


def _table(results: Sequence[_Result]) -> list[str]:
    from gda.compiled.hlo import format_axes, format_size

    facts, request = results[0].facts, results[0].request
    found = {key for each in results for key in each.nbytes_of}
    axes = sorted(found, key=lambda key: (key is None, len(key or ()), key or ()))
    over = [f"over {format_axes(each)}" for each in axes]
    has_slow = any(each.total("nbytes_slow") for each in results)
    header = ["mesh", "fits", "peak", *over, *(["over slow links"] if has_slow else [])]
    rows = []
    for each in results:
        fits, peak = each.facts["fits"], each.facts["peak_bytes"]
        sent = [each.nbytes_of.get(key, 0) for key in axes]
        sent += [each.total("nbytes_slow")] if has_slow else []
        answers = {True: "yes", False: "no", None: "?"}
        cells = ["" if fits is False else format_size(nbytes) for nbytes in sent]
        needed = format_size(peak)
        if not each.facts["is_compiled"]:
            needed = f">= {format_bytes(each.facts['argument_bytes'])}"
        rows.append([format_mesh(each.request.mesh), answers[fits], needed, *cells])
    capacity = facts["capacity_bytes"]
    of = "" if capacity is None else f" with {format_bytes(capacity)} each"
    devices = f"{facts['num_devices']:,} x {facts['device_kind']}{of}"
    heading = f"{request.file}:{request.function} on {devices}; bytes are those of one device"
    return [heading, "", *two_tables(header, rows, 3, right={*header[2:]})]
