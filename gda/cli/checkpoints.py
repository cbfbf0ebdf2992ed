"""The commands of checkpoints: ``gda inspect PATH``, ``gda verify PATH`` and ``gda diff A B``.

A path may also be that of safetensors files or of an Orbax run, or that of the folder of a
``Run``, for which there are ``gda rollback RUN STEP`` and ``gda hold RUN STEP`` too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gda.cli.commands import (
    DIFFERENT,
    ERRORS,
    OK,
    add_command,
    add_timeout,
    shows_progress,
    without_accelerators,
)
from gda.layout.text import counted, format_bytes
from gda.planning.notation.mistakes import MistakesError

if TYPE_CHECKING:
    from gda.trees.records.recorded_tree import Leaf

_DIFF_EPILOG = """\
A and B are checkpoints, safetensors files or Orbax runs. Of checkpoints, only
the manifests are read. Leaves match by path; beside safetensors files, by the
names that they have there, such as layers.0.w.

exit code:
  0 if all leaves are the same, 1 if not, or if that is unknown, 2 for an error.
"""


def _add_path(parser: argparse.ArgumentParser, kinds: str) -> None:
    parser.add_argument(
        "path",
        metavar="PATH",
        help=f"{kinds}; the folder of a Run, or one of its steps, as runs/a@100, @latest or @best; "
        "or a URL such as s3://bucket/run",
    )
    add_timeout(parser)


def add_inspect(commands: Any) -> None:
    says = "List the contents of a checkpoint or other files; no array is read."
    parser = add_command(commands, inspect, says)
    _add_path(parser, "a checkpoint, safetensors files or an Orbax run")


def inspect(options: argparse.Namespace) -> int:
    without_accelerators()
    from gda.checkpoint.inspecting import contents_at
    from gda.checkpoint.runs import overview

    if overview.is_run(options.path, options.timeout):
        document = overview.document_of(options.path, options.timeout)
        print(*overview.lines_of(document), sep="\n")
    else:
        print(contents_at(options.path, timeout=options.timeout))
    return OK


def add_verify(commands: Any) -> None:
    says = "Read all data of a checkpoint and compare its checksums."
    parser = add_command(commands, verify, says)
    _add_path(parser, "a checkpoint")
    parser.add_argument(
        "--fingerprints",
        action="store_true",
        help="also compute the fingerprint of every array and compare it with the recorded one",
    )


def verify(options: argparse.Namespace) -> int:
    without_accelerators()
    from gda import checkpoint
    from gda.checkpoint.runs import overview

    path, seconds, fingerprints = options.path, options.timeout, options.fingerprints
    if overview.is_run(path, seconds):
        print(overview.verify_run(path, seconds, shows_progress(), fingerprints=fingerprints))
        return OK
    progress = shows_progress()
    contents = checkpoint.verify(
        path, fingerprints=fingerprints, timeout=seconds, progress=progress
    )
    leaves = counted(len(contents.leaves), "leaf", "leaves")
    print(f"{contents.path} is whole: {leaves}, {format_bytes(contents.nbytes)}")
    return OK


def add_diff(commands: Any) -> None:
    says = "Compare two checkpoints, or other files, by their fingerprints."
    parser = add_command(commands, diff, says, epilog=_DIFF_EPILOG, errors=(*ERRORS, TypeError))
    parser.add_argument("a", metavar="A", help="a path, or a URL such as s3://bucket/run")
    parser.add_argument("b", metavar="B", help="another one")
    parser.add_argument(
        "--at",
        metavar="PATH",
        help="compare only the subtree there, such as params/layers/0",
    )
    add_timeout(parser)


def diff(options: argparse.Namespace) -> int:
    without_accelerators()
    from gda import checkpoint

    try:
        at = _keys(options)
        differences = checkpoint.diff(options.a, options.b, at=at, timeout=options.timeout)
    except KeyError as error:
        raise MistakesError(f"--at: {error.args[0]}; write keys as in params/layers/0") from None
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
    from gda.checkpoint import Run

    run = Run(options.path, every=1, timeout=options.timeout)
    later = [step for step in run.steps() if step > options.step]
    run.rollback(options.step, newest=max(later, default=options.step))
    removed = ", ".join(map(str, later))
    print(
        f"removed {removed}; the run goes on at step {options.step}" if later else "nothing to do"
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


def _keys(options: argparse.Namespace) -> Sequence[str | int]:
    """Return the path of ``--at``: the keys of the checkpoint A that are written like its parts."""
    from gda.checkpoint.inspecting import contents_at

    parts = [part for part in (options.at or "").split("/") if part]
    leaves: Sequence[Leaf] = ()
    if parts:
        leaves = contents_at(options.a, options.timeout).leaves
    for leaf in leaves:
        keys = leaf.path[: len(parts)]
        if [str(key) for key in keys] == parts:
            return keys
    return [int(part) if part.isdecimal() else part for part in parts]
