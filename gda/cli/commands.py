"""The common parts of the commands: how one is added to the parser, and the exit codes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from gda.launch.arguments import Parser

OK, DAMAGED, INTERRUPTED = 0, 1, 130

# These are said in a line. Anything else is a mistake in gda, and its traceback is wanted.
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
      commands: what argparse calls subparsers.
      run: does it, and returns the exit code.
      says: what it does, in a line.
      epilog: what its help ends with.
      errors: what it raises where the user, not gda, is mistaken.
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
