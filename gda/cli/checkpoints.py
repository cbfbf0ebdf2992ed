"""The commands of checkpoints: ``gda inspect PATH``, ``gda verify PATH`` and ``gda diff A B``.

All of them take the folder of a ``Run``, for which there are ``gda rollback RUN STEP`` and
``gda hold RUN STEP`` too.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from gda.cli.commands import (
    DIFFERENT,
    OK,
    add_command,
    add_timeout,
    shows_progress,
    without_accelerators,
)
from gda.cli.notation.mistakes import MistakesError
from gda.layout.text import counted, format_bytes

_INSPECT_EPILOG = """\
PATH may also be a safetensors file, a folder of one model, an Orbax run, or a
folder of Orbax runs. No array is read.
"""

_DIFF_EPILOG = """\
exit code:
  0 if all leaves are the same, 1 if not, or if that is unknown, 2 for an error.
"""


def _add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a checkpoint; the folder of a Run, or one of its steps, as runs/a@100, @latest or "
        "@best; or a URL such as s3://bucket/run",
    )
    add_timeout(parser)


def add_inspect(commands: Any) -> None:
    says = "List the steps of a run, or the leaves of a checkpoint or of other files."
    parser = add_command(commands, inspect, says, epilog=_INSPECT_EPILOG)
    _add_path(parser)
    parser.add_argument("--json", action="store_true", help="print all facts as JSON")
    local = "PATH is the folder of local steps on this host, which Run has as local="
    parser.add_argument("--local", action="store_true", help=local)


def inspect(options: argparse.Namespace) -> int:
    without_accelerators()
    from gda import checkpoint
    from gda.checkpoint.runs import host_overview, overview

    if options.local:
        found = host_overview.host_overview_of(options.path)
    else:
        found = overview.overview_of(options.path, options.timeout)
        found = found or checkpoint.inspect(options.path, timeout=options.timeout)
    print(json.dumps(found.to_dict(), indent=1, allow_nan=False) if options.json else found)
    if isinstance(found, overview.Overview) and found.problems:
        raise checkpoint.CorruptionError(f"{options.path} is damaged", found.problems)
    return OK


def add_verify(commands: Any) -> None:
    says = "Read all data of a checkpoint and compare its checksums."
    _add_path(add_command(commands, verify, says))


def verify(options: argparse.Namespace) -> int:
    without_accelerators()
    from gda import checkpoint
    from gda.checkpoint.runs import overview

    path, seconds, progress = options.path, options.timeout, shows_progress()
    if overview.is_run(path, seconds):
        print(overview.verify_run(path, seconds, progress))
        return OK
    contents = checkpoint.verify(path, timeout=seconds, progress=progress)
    leaves = counted(len(contents.leaves), "leaf", "leaves")
    print(f"{contents.path} is whole: {leaves}, {format_bytes(contents.nbytes)}")
    return OK


def add_diff(commands: Any) -> None:
    says = "Compare two checkpoints by their fingerprints; no array is read."
    parser = add_command(commands, diff, says, epilog=_DIFF_EPILOG)
    parser.add_argument("a", metavar="A", help="a path, or a URL such as s3://bucket/run")
    parser.add_argument("b", metavar="B", help="another one")
    add_timeout(parser)


def diff(options: argparse.Namespace) -> int:
    without_accelerators()
    from gda import checkpoint

    try:
        differences = checkpoint.diff(options.a, options.b, timeout=options.timeout)
    except checkpoint.CorruptionError as error:
        raise MistakesError(*error.problems) from None  # 1 is for a difference
    print(differences)
    return DIFFERENT if differences else OK


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", help="the folder of a Run, or its URL")
    parser.add_argument("step", metavar="STEP", type=int, help="a complete step, such as 400")
    add_timeout(parser)


def add_rollback(commands: Any) -> None:
    says = "Remove the steps of a run after one; its training can no longer save."
    _add_step(add_command(commands, rollback, says))


def rollback(options: argparse.Namespace) -> int:
    without_accelerators()
    from gda.checkpoint.runs.overview import roll_back

    removed = ", ".join(map(str, roll_back(options.path, options.step, options.timeout)))
    at = f"step {options.step}"
    print(
        f"removed {removed}; the run goes on at {at}"
        if removed
        else f"nothing to do: {at} is the newest"
    )
    return OK


def add_hold(commands: Any) -> None:
    says = "Keep a step of a run, whatever its rules say, until its held.json is removed."
    _add_step(add_command(commands, hold, says))


def hold(options: argparse.Namespace) -> int:
    without_accelerators()
    from gda.checkpoint import Run

    Run(options.path, every=1, timeout=options.timeout).hold(options.step)
    print(f"step {options.step} is kept")
    return OK
