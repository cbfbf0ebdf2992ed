"""The common parts of the commands: their parsers, options and exit codes."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar

from gda.cli.notation.mistakes import MisreadError, MistakesError

T = TypeVar("T")

OK, DAMAGED, DIFFERENT, WRONG, INTERRUPTED = 0, 1, 1, 2, 130

# These are reported in one line. Any other exception is a bug in gda and keeps its traceback.
ERRORS = (OSError, ValueError, TypeError, RuntimeError, ImportError, MemoryError)


def add_command(
    commands: Any,
    run: Callable[[argparse.Namespace], int],
    description: str,
    *,
    epilog: str | None = None,
) -> argparse.ArgumentParser:
    """Add the subcommand of a function, by its name; return its parser."""
    parser = commands.add_parser(
        run.__name__,
        help=description,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_timeout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=seconds,
        default=600,
        help="wait this long for each answer of an object store; default 600",
    )


def seconds(text: str) -> float:
    return _above_zero(text, "a number of seconds", "30")


def named_number(
    what: str, example: str, *, is_named: bool = False
) -> Callable[[str], tuple[str | None, float]]:
    """Return a parser for ``name=number``, and for a number without a name unless ``is_named``."""

    def parse(text: str) -> tuple[str | None, float]:
        name, equals, number = text.rpartition("=")
        if bool(name) < bool(equals) or (is_named and not name):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}; write {example}, say")
        return name or None, _above_zero(number, what, example, most=sys.float_info.max)

    return parse


def _above_zero(text: str, what: str, example: str, most: float = math.inf) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (number := float(text)) <= most:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not {what} above 0; write {example}, say")


def without_accelerators() -> None:
    """Keep JAX from taking the memory of accelerators, unless JAX_PLATFORMS names some."""
    if not os.environ.get("JAX_PLATFORMS"):
        import jax

        jax.config.update("jax_platforms", "cpu")


def read_option(name: str, text: str, parse: Callable[[str], T]) -> T:
    """Return ``parse(text)``; a text that cannot be read raises with the name of the option."""
    try:
        return parse(text)
    except MisreadError as error:
        raise MistakesError(*error.lines(name)) from None


def terminal_width() -> int:
    """Return the columns of the terminal; 80 without one."""
    return shutil.get_terminal_size().columns


def shows_progress() -> bool:
    """Return True if stderr is a terminal and rich, which draws a bar there, is installed."""
    return bool(sys.stderr and sys.stderr.isatty() and find_spec("rich"))
