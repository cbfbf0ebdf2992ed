"""The command line ``gda``: plans, rehearsals, checkpoints and other files of trees.

Provisional: see ``docs/stable.md``.

``show`` answers from shapes, meshes and specs alone: it imports no JAX and touches no device.
``plan`` has the memory of a tree, from its shapes. ``rehearse`` compiles a program, in other
processes. ``inspect`` looks at a checkpoint; ``diff`` compares two; ``verify`` reads one;
``convert`` makes one of other files, or other files of one.
``python -m gda`` is the same command.

A subcommand has two functions: one adds its arguments to a parser, one runs it and returns the exit
code. It imports its modules when it runs, so that ``gda --help`` is quick.

Read in this order: ``notation`` (the texts of options), ``commands``; ``pictures``; ``plans``;
``rehearsals`` with ``rehearsal_table``, ``rehearsal_processes`` and ``rehearsal_program``;
``checkpoints``; ``convert``; ``functions`` (of the user). What they print is computed elsewhere:
a picture by ``gda.show``, a plan by ``gda.layouts``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from gda.cli.checkpoints import add_diff, add_hold, add_inspect, add_rollback, add_verify
from gda.cli.commands import DAMAGED, ERRORS, INTERRUPTED, OK, WRONG
from gda.cli.convert import add_convert
from gda.cli.notation.mistakes import MistakesError
from gda.cli.pictures import add_show
from gda.cli.plans import add_plan
from gda.cli.rehearsals import add_rehearse
from gda.layout.text import printable, unknown_options

_COMMANDS = (
    *(add_show, add_plan, add_rehearse, add_inspect, add_verify, add_diff, add_convert),
    *(add_rollback, add_hold),
)

_EPILOG = """\
examples:
  gda show --shape 8192x8192 --dtype bf16 --mesh data=64,model=16 --spec data
  gda plan models/llama --mesh data=16,model=4 --optimizer adamw
  gda rehearse train.py:rehearsal --topology v5e:16x16 --mesh data=64,model=4
  gda inspect /checkpoints/step_100
  gda diff runs/a@100 runs/a@latest
  gda rollback runs/a 400
  gda convert orbax/100 model.safetensors --dtype bf16

exit code:
  0 for success, 1 for a damaged checkpoint, a program that does not fit or two
  checkpoints that differ, 2 for a wrong command, a path without a checkpoint,
  an unreadable path, output that cannot be written, or an error in the program
  to rehearse, 130 after Ctrl-C.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, ``sys.argv[1:]`` by default, and return the exit code.

    ``--help`` and mistakes in the command raise ``SystemExit``, as argparse does.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and (
        sys.stdout.errors == "strict"
        # In the locale C. UTF-8 has all but the bytes of names, which this keeps.
        or (sys.stdout.errors == "surrogateescape" and sys.stdout.encoding.lower() != "utf-8")
    ):
        sys.stdout.reconfigure(errors="replace")  # frames and names may not be in its encoding
    output, end = io.StringIO(), None
    with contextlib.redirect_stdout(output):
        try:
            code = _run(sys.argv[1:] if argv is None else argv)
        except KeyboardInterrupt:
            code = INTERRUPTED
        except SystemExit as exit_:
            code, end = OK, exit_
    try:
        print(output.getvalue(), end="", flush=True)
    except OSError as error:
        # The interpreter would try once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # whose reader wants no more
            return _failed(OSError(f"the output cannot be written: {error}"))
    if end is not None:
        raise end
    return code


def _run(argv: Sequence[str]) -> int:
    parser = _parser()
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        options.parser.error(unknown_options(unknown, options.parser.format_help()))
    if options.version:
        import gda

        print(f"gda {gda.__version__}")
        return OK
    if options.run is None:
        parser.print_help()
        return OK
    try:
        return options.run(options)
    except (NotImplementedError, RecursionError):
        raise  # these subclasses of RuntimeError are mistakes of gda
    except ERRORS as error:
        return _failed(error)


def _failed(error: Exception) -> int:
    """Print the error, with one line for each problem; return the exit code."""
    # Only commands that read checkpoints import this, because it imports JAX, which takes long.
    errors: Any = sys.modules.get("gda.storage.stores.errors")
    is_damage = errors is not None and isinstance(error, errors.CorruptionError)
    if is_damage:
        lines: Sequence[str] = getattr(error, "problems", ())
    else:
        lines = error.lines if isinstance(error, MistakesError) else [str(error)]
        first, *more = [*lines, *getattr(error, "__notes__", ())]
        lines = [f"gda: {first or type(error).__name__}", *more]
    with contextlib.suppress(OSError):  # if nothing can be written, the exit code is enough
        for line in lines:
            print(printable(line), file=sys.stderr)
    return DAMAGED if is_damage else WRONG


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gda",
        description="Plan layouts, rehearse programs, inspect, compare and convert checkpoints.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.set_defaults(run=None, parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in _COMMANDS:
        add(commands)
    return parser
