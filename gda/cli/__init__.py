"""The command line: ``gda inspect PATH`` and ``gda verify PATH``, also as ``python -m gda``.

A subcommand is a function that adds its arguments to a parser, and one that does it and returns the
exit code. What it needs is imported when it runs, so that ``gda --help`` is quick.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from gda.checkpoint.inspecting import Contents
    from gda.checkpoint.manifest import Leaf

_OK, _DAMAGED, _WRONG, _INTERRUPTED = 0, 1, 2, 130

_EPILOG = """\
exit code:
  0 when all is well, 1 when a checkpoint is damaged, 2 for a wrong command, a path without a
  checkpoint, or one that cannot be read, 130 after Ctrl-C.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, ``sys.argv[1:]`` by default, and return the exit code.

    ``--help``, ``--version`` and mistakes in the command raise ``SystemExit``, as argparse does.
    """
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Of `gda inspect PATH | head`. What is still buffered has nowhere to go either.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _OK


def _run(argv: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.run is None:
        parser.print_help()
        return _OK
    try:
        code = options.run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        raise
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> int:
    """Say in a line for each problem what is wrong, where that is known; return the exit code."""
    from gda.checkpoint.errors import CorruptionError, printable

    if isinstance(error, CorruptionError):
        for problem in error.problems:
            print(printable(problem), file=sys.stderr)
        return _DAMAGED
    if not isinstance(error, OSError | ValueError | RuntimeError | ImportError | MemoryError):
        raise error
    said = str(error) or type(error).__name__
    print(f"gda: {printable(said)}", file=sys.stderr)
    return _WRONG


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(_WRONG, f"{self.prog}: {message} (--help says more)\n")


class _Version(argparse.Action):
    """Prints the version, which takes longer to find than all of the rest."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import gda

        print(f"gda {gda.__version__}")
        parser.exit(_OK)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="gda",
        description="Sharded JAX arrays outside jit.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print it and end")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in _COMMANDS:
        add(commands)
    return parser


def _command(commands: Any, run: Callable[[argparse.Namespace], int], says: str) -> _Parser:
    """Add the subcommand of a function, by its name; return its parser."""
    name = run.__name__.strip("_")
    parser = commands.add_parser(name, help=says, description=says, allow_abbrev=False)
    parser.set_defaults(run=run)
    return parser


# gda inspect


def _add_inspect(commands: Any) -> None:
    parser = _command(commands, _inspect, "Show what a checkpoint has; only its manifest is read.")
    parser.add_argument(
        "path", metavar="PATH", help="a directory, or a URL such as s3://bucket/run"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def _inspect(options: argparse.Namespace) -> int:
    from gda import checkpoint

    contents = checkpoint.inspect(options.path)
    if options.json:
        print(_json(contents))
    elif not (sys.stdout.isatty() and _print_table(contents)):
        print(contents)
    return _OK


def _print_table(contents: Contents) -> bool:
    """Print what a checkpoint has to a terminal; return whether rich is there to do so."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("path", "type", "size", "layout"):
        table.add_column(name, justify="right" if name == "size" else "left", overflow="fold")
    for row in contents.rows:
        table.add_row(*map(Text, row))  # a path such as ['bold'] is no markup
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(table)
    for line in contents.summary:
        console.print(line, soft_wrap=True)
    return True


def _json(contents: Contents) -> str:
    import json

    document = {
        "path": contents.path,
        "data": contents.data,
        "nbytes": contents.nbytes,
        "about": contents.about,
        "leaves": [_leaf_for_json(leaf, contents) for leaf in contents.leaves],
    }
    return json.dumps(document, indent=1, allow_nan=False)


def _leaf_for_json(leaf: Leaf, contents: Contents) -> dict[str, Any]:
    from gda.checkpoint.errors import said
    from gda.checkpoint.manifest import ValueLeaf

    if isinstance(leaf, ValueLeaf):
        value = leaf.value
        is_short = isinstance(value, int) and value.bit_length() <= 1000
        is_finite = isinstance(value, float) and math.isfinite(value)
        if not (is_short or is_finite or isinstance(value, str)):
            value = value.hex() if isinstance(value, bytes) else said(value)
        return {"path": list(leaf.path), "kind": type(leaf.value).__name__, "value": value}
    entry: dict[str, Any] = {
        "path": list(leaf.path),
        "kind": leaf.kind,
        "shape": list(leaf.shape),
        "dtype": leaf.dtype.name,
        "nbytes": leaf.nbytes,
    }
    if leaf.array is not None:
        entry["array"] = contents.arrays[leaf.array].name
    else:
        entry["pieces"] = [
            {
                "array": contents.arrays[piece.array].name,
                "offset": piece.offset,
                "start": piece.start,
                "shape": piece.shape,
            }
            for piece in leaf.pieces
        ]
    optional = ("key_impl", "spec", "mesh", "fingerprint")
    return entry | {name: getattr(leaf, name) for name in optional if getattr(leaf, name)}


# gda verify


def _add_verify(commands: Any) -> None:
    parser = _command(commands, _verify, "Read all of a checkpoint and compare every checksum.")
    parser.add_argument(
        "path", metavar="PATH", help="a directory, or a URL such as s3://bucket/run"
    )


def _verify(options: argparse.Namespace) -> int:
    from gda import checkpoint
    from gda.sizes import format_bytes

    contents = checkpoint.verify(options.path, progress=sys.stderr.isatty() and _has_rich())
    print(
        f"{contents.path} is whole: {len(contents.leaves)} leaves, {format_bytes(contents.nbytes)}"
    )
    return _OK


def _has_rich() -> bool:
    from importlib.util import find_spec

    return find_spec("rich") is not None


_COMMANDS = (_add_inspect, _add_verify)

if __name__ == "__main__":
    sys.exit(main())
