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
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from gda.cli.commands import INTERRUPTED, add_command, named_number, read_option
from gda.cli.functions import file_and_function
from gda.cli.notation.mesh_and_spec import parse_mesh, parse_spec
from gda.cli.notation.mistakes import MistakesError
from gda.cli.notation.numbers import parse_number
from gda.cli.rehearsal_processes import RehearsalRequest
from gda.cli.rehearsal_table import RehearsalResult, lines_of
from gda.compiled.devices.device_kinds import mesh_sizes_of, num_devices_of, topologies_of
from gda.layout.text import listed

_AUTO = ":auto"
_MOST_MESHES = 100

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
  cpu:8 is 8 virtual devices of this machine, to try a file. With --search,
  v5e:auto is the smallest topology of v5e on which a mesh fits.

several meshes:
  Those that fit come first, by the cost if there are prices, else by estimated
  time. A time such as ">= 28 ms" lacks work that gda cannot count; such meshes
  come last of these, with the reason. Ctrl-C prints the table of those done.

examples:
  gda rehearse train.py:rehearsal --topology v5e:16x16 --mesh data=64,model=4
  gda rehearse train.py:rehearsal --topology v5e:4x4 --mesh data=16 \\
           --trace step.json
  gda rehearse train.py:rehearsal --topology v5e:4x4 --mesh data,model --search
  gda rehearse train.py:rehearsal --topology h100:8 \\
           --mesh 'data=8; data=4,model=2'
  gda rehearse train.py:rehearsal --topology v5e:auto --topology h100:8 \\
           --mesh data,model --search --examples 65536 \\
           --price v5e=1.2 --price h100=3.0

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
        "--topology",
        metavar="NAME",
        required=True,
        action="append",
        help="such as v5e:16x16, h100:4x8 or cpu:8; several are compared in one table",
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
    parser.add_argument(
        "--max-meshes",
        metavar="N",
        default=str(_MOST_MESHES),
        help=f"the most meshes to rehearse; default {_MOST_MESHES}",
    )
    parser.add_argument("--examples", metavar="N", help="examples, or tokens, of a call")
    parser.add_argument(
        "--price",
        metavar="[KIND=]P",
        type=named_number("a price", "2.5 or v5p=4.2"),
        action="append",
        default=[],
        help="of a device for one hour, or of a device of one kind",
    )
    parser.add_argument(
        "--cost",
        metavar="TARGET=FLOPS",
        type=named_number("a number of operations with its kernel", "my_kernel=2e9", is_named=True),
        action="append",
        default=[],
        help="operations of one execution of a kernel that gda cannot count",
    )
    parser.add_argument(
        "--trace", metavar="FILE.json", help="of one mesh: a picture of the step, for Perfetto"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def rehearse(options: argparse.Namespace) -> int:
    results: list[RehearsalResult] = []
    notes: list[str] = []
    is_interrupted = False
    try:
        for some, note in _all_results(options):
            results += some
            notes += [note] if note else []
    except _Interrupted as interrupt:
        results += interrupt.results
        is_interrupted = True
    if not results:
        raise KeyboardInterrupt
    results.sort(key=RehearsalResult.order)
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
        print(*lines_of(results), *(["", *notes] if notes else []), sep="\n")
    if options.trace is not None and first.rehearsal:
        try:
            first.rehearsal.save_trace(options.trace)
        except (ValueError, OSError) as error:
            raise MistakesError(f"--trace: {error}") from None
    return INTERRUPTED if is_interrupted else first.code


class _Interrupted(Exception):  # noqa: N818
    """Ctrl-C, after the results."""

    def __init__(self, results: list[RehearsalResult]) -> None:
        self.results = results


def _all_results(options: argparse.Namespace) -> Iterator[tuple[list[RehearsalResult], str]]:
    """Yield results, with a line about a topology that was found."""
    requests = _Requests(options)
    if some := requests.of([each for each in options.topology if not each.endswith(_AUTO)]):
        yield _results(some), ""
    for each in options.topology:
        if each.endswith(_AUTO):
            yield _smallest(each.removesuffix(_AUTO), requests)


def _smallest(name: str, requests: _Requests) -> tuple[list[RehearsalResult], str]:
    """Return the results for the smallest topology of a kind that fits, and a line about it."""
    least, tried, results = 1, list[str](), list[RehearsalResult]()
    for topology in topologies_of(name):
        if num_devices_of(topology) * requests.num_slices < least:
            continue  # its memory does not hold the arguments
        try:
            some = requests.of([topology])
        except MistakesError as error:  # too many
            if not tried:
                raise
            return results, f"no {name} up to {tried[-1]} fits; {error}"
        results = _results(some)
        if any(each.fits for each in results):
            too_small = f"; too small: {listed(tried)}" if tried else ""
            return results, f"{topology} is the smallest {name} that fits{too_small}"
        known = [each.rehearsal.least_devices for each in results if each.rehearsal]
        if not known:
            return results, f"no mesh of {topology} could be rehearsed, so no larger one was tried"
        least = min(each or 1 for each in known)
        tried.append(topology)
    return results, f"no {name} fits; tried {listed(tried)}"


def _results(requests: list[RehearsalRequest]) -> list[RehearsalResult]:
    from gda.cli import rehearsal_processes

    reports: dict[int, Any] = {}

    def done() -> list[RehearsalResult]:
        return [RehearsalResult(requests[at], reports[at]) for at in sorted(reports)]

    try:
        with closing(rehearsal_processes.reports_of(requests)) as found:
            for at, report in found:
                reports[at] = report
    except KeyboardInterrupt:
        raise _Interrupted(done()) from None
    return done()


class _Requests:
    """The requests of a command, by topologies."""

    def __init__(self, options: argparse.Namespace) -> None:
        config, topologies = options.target_config, options.topology
        file, function = file_and_function(options.program, "train.py:rehearsal")
        if config is not None and not os.path.isfile(config):
            raise MistakesError(f"--target-config: there is no file {config!r} here")
        if config is not None and len(topologies) > 1:
            raise MistakesError("--target-config describes the GPUs of one topology; give one")
        self.num_slices = read_option("--num-slices", options.num_slices, parse_number)
        self._most = read_option("--max-meshes", options.max_meshes, parse_number)
        self._prices = dict(options.price)
        kinds = [each.partition(":")[0] for each in topologies]
        if unknown := [each for each in self._prices if each not in (None, *kinds)]:
            raise MistakesError(
                f"--price has the kind {unknown[0]!r}, but --topology has {listed(kinds)}"
            )
        self._meshes: list[dict[str, int]] = []
        self._names: list[str] = []
        if options.search:
            self._names = _axis_names(options.mesh)
        else:
            self._meshes = [
                read_option("--mesh", text, parse_mesh) for text in options.mesh.split(";")
            ]
        if not options.search and any(each.endswith(_AUTO) for each in topologies):
            raise MistakesError(f"a topology with {_AUTO} needs --search, as --mesh has no sizes")
        if options.trace is not None and (len(topologies) > 1 or len(self._meshes) != 1):
            raise MistakesError("--trace draws one mesh; give one with --mesh, without --search")
        examples = options.examples
        self._request = RehearsalRequest(
            file=file,
            function=function,
            topology="",
            num_slices=self.num_slices,
            target_config=config,
            mesh={},
            examples=None
            if examples is None
            else read_option("--examples", examples, parse_number),
            costs=dict(options.cost),
        )
        self._has_several = len(topologies) > 1

    def of(self, topologies: list[str]) -> list[RehearsalRequest]:
        """Return the requests for some topologies; too many are a mistake."""
        found = []
        for topology in topologies:
            kind = topology.partition(":")[0]
            price = self._prices.get(kind, self._prices.get(None))
            found += [
                self._request._replace(topology=topology, mesh=mesh, price=price)
                for mesh in self._meshes_of(topology)
            ]
        if len(found) > self._most:
            from gda.cli.rehearsal_processes import most_processes

            raise MistakesError(
                f"there are {len(found):,} meshes to rehearse, {most_processes()} at a time, and "
                f"each may take from seconds to minutes; for all of them add --max-meshes "
                f"{len(found)}, or name fewer axes"
            )
        return found

    def _meshes_of(self, topology: str) -> list[dict[str, int]]:
        try:
            num_devices = num_devices_of(topology) * self.num_slices
        except ValueError as error:
            raise MistakesError(f"--topology: {error}") from None
        if self._names:
            return mesh_sizes_of(self._names, num_devices)
        if not self._has_several:
            return self._meshes
        found = [each for each in self._meshes if math.prod(each.values()) == num_devices]
        if not found:
            raise MistakesError(f"--mesh has no mesh of the {num_devices:,} devices of {topology}")
        return found


def _axis_names(text: str) -> list[str]:
    names = [] if "=" in text else read_option("--mesh", text, parse_spec)
    if not names or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise MistakesError(
            "--search finds the sizes of the axes; give their names alone: --mesh data,model"
        )
    return [*map(str, names)]
