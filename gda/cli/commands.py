"""The common parts of the commands: ``add_command`` and the exit codes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from gda.launch.arguments import Parser

OK, DAMAGED, INTERRUPTED = 0, 1, 130

# These are reported in one line. Any other exception is a bug in gda and keeps its traceback.
ERRORS = (OSError, ValueError, RuntimeError, ImportError, MemoryError)


def add_command(
    commands: Any,
    run: Callable[[argparse.Namespace], int],
    says: str,
    *,
    epilog: str | None = None,
    errors: tuple[type[Exception], ...] = ERRORS,
) -> Parser:
    """Add the subcommand of a function, by its name; return its parser.

    Args:
      commands: the subparsers of argparse.
      run: runs the command and returns the exit code.
      says: its description in one line.
      epilog: the end of its help.
      errors: the exceptions that mean a mistake of the user.
    """
    parser = commands.add_parser(
        run.__name__,
        help=says,
        description=says,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, errors=errors)
    return parser
