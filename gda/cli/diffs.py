"""The command ``gda diff A B``: the differences between two checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from gda.cli.checkpoints import add_timeout
from gda.cli.commands import DIFFERENT, OK, add_command, shows_progress
from gda.planning.notation.mistakes import MistakesError

_EPILOG = """\
exit code:
  0 if all leaves are the same, 1 if not, or if that is unknown, 2 for an error.
"""


def add_diff(commands: Any) -> None:
    says = "Compare two checkpoints by their fingerprints; only the manifests are read."
    parser = add_command(commands, diff, says, epilog=_EPILOG)
    parser.add_argument("a", metavar="A", help="a directory, or a URL such as s3://bucket/run")
    parser.add_argument("b", metavar="B", help="another one")
    parser.add_argument(
        "--values",
        action="store_true",
        help="read the arrays that differ; print how many elements do, and the largest difference",
    )
    parser.add_argument(
        "--at",
        metavar="PATH",
        help="compare only the subtree there, such as params/layers/0",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_timeout(parser)


def diff(options: argparse.Namespace) -> int:
    from gda import checkpoint

    try:
        differences = checkpoint.diff(
            options.a,
            options.b,
            values=options.values,
            at=_keys(options),
            timeout=options.timeout,
            progress=options.values and shows_progress(),
        )
    except KeyError as error:
        raise MistakesError(f"--at: {error.args[0]}") from None
    except checkpoint.CorruptionError as error:
        raise MistakesError(*error.problems) from None  # 1 is for a difference
    if options.json:
        import json

        print(json.dumps(differences.to_dict(), indent=1, sort_keys=True, allow_nan=False))
    else:
        print(differences)
    return DIFFERENT if differences else OK


def _keys(options: argparse.Namespace) -> Sequence[str | int]:
    """Return the path of ``--at``: the keys of the checkpoint A that are written like its parts."""
    from gda import checkpoint

    parts = [part for part in (options.at or "").split("/") if part]
    leaves = checkpoint.inspect(options.a, timeout=options.timeout).leaves if parts else ()
    for leaf in leaves:
        keys = leaf.path[: len(parts)]
        if [str(key) for key in keys] == parts:
            return keys
    return [int(part) if part.isdecimal() else part for part in parts]
