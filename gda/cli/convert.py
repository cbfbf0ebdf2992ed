"""The command ``gda convert SOURCE TARGET``: a tree goes from files of one kind into another."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gda.cli.commands import (
    OK,
    add_command,
    add_timeout,
    shows_progress,
    without_accelerators,
)
from gda.cli.functions import file_and_function, function_of, traceback_of
from gda.cli.notation.mistakes import MistakesError
from gda.layout.text import counted, format_bytes, printable

_EPILOG = """\
SOURCE is a checkpoint of gda, a safetensors file or a folder of such files, or
an Orbax run; its files tell which. TARGET must not exist. If its name ends with
.safetensors, it is a safetensors file; otherwise it is a checkpoint of gda, or
with --to safetensors a folder of safetensors files and their index.

the function of --map:
  FUNCTION(tree) takes the tree at SOURCE and returns the tree to write. Its
  arrays are views that read nothing: w.T, w[0], w.reshape(...), w.astype(...),
  gda.storage.stack([a, b]). Of safetensors files, it is a dict by name.
  Numbers become arrays in safetensors files.

the function of --merge:
  FUNCTION(values, 1) takes the values of a PerProcess, one of each process that
  saved it, and returns a list of one value.

examples:
  gda convert run/100 checkpoint
  gda convert checkpoint model.safetensors --at params --dtype bf16
  gda convert hf checkpoint --map examples/convert_llama.py:to_scanned
  gda convert checkpoint hf --to safetensors --map map.py:to_hugging_face

exit code:
  0 if TARGET was written, 1 if SOURCE is a damaged checkpoint, 2 for another
  error, 130 after Ctrl-C.
"""
_UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30}
_KINDS = ("checkpoint", "safetensors")


def add_convert(commands: Any) -> None:
    says = "Write the tree of a checkpoint or of other files as other files."
    parser = add_command(commands, convert, says, epilog=_EPILOG)
    parser.add_argument("source", metavar="SOURCE", help="a path, or a URL such as s3://bucket/run")
    parser.add_argument("target", metavar="TARGET", help="a path where nothing is, or a URL")
    parser.add_argument("--to", choices=_KINDS, help="the kind of TARGET")
    parser.add_argument("--at", metavar="PATH", default="", help="only this subtree: params/layers")
    parser.add_argument(
        "--skip", action="store_true", help="omit the leaves that TARGET cannot hold, and name them"
    )
    parser.add_argument(
        "--merge",
        metavar="FILE.py:FUNCTION",
        help="make one value of those that several processes saved, as merge of restore",
    )
    parser.add_argument(
        "--map", metavar="FILE.py:FUNCTION", help="a function that returns the tree to write"
    )
    parser.add_argument(
        "--dtype", metavar="DTYPE", help="cast arrays of floats to it, such as bf16"
    )
    parser.add_argument(
        "--max-file-bytes",
        metavar="BYTES",
        type=_bytes,
        default=5 * 2**30,
        help="the most data in a safetensors file; default 5GiB",
    )
    add_timeout(parser)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]+)([a-z]+)", text.lower())
    if found is None or found[2] not in _UNITS or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes; write 2GiB, say")
    return int(found[1]) * _UNITS[found[2]]


def convert(options: argparse.Namespace) -> int:
    without_accelerators()
    from gda.checkpoint import converting
    from gda.checkpoint.format.files_at import FileKind

    converted = converting.convert(
        options.source,
        options.target,
        kind=None if options.to is None else FileKind[options.to.upper()],
        at=options.at,
        merge=None if options.merge is None else _of_user(options.merge, "data.py:merge"),
        skip=options.skip,
        change=None if options.map is None else _of_user(options.map, "map.py:to_scanned"),
        dtype=options.dtype,
        max_file_bytes=options.max_file_bytes,
        timeout=options.timeout,
        progress=shows_progress(),
    )
    leaves = counted(converted.num_leaves, "leaf", "leaves")
    nbytes = format_bytes(converted.nbytes)
    print(f"wrote {leaves}, {nbytes}, to {options.target}, {converted.kind.value}")
    if converted.skipped:
        print(f"skipped {', '.join(map(printable, converted.skipped))}")
    return OK


def _of_user(text: str, example: str) -> Callable[..., Any]:
    """Return the function of an option, whose errors are reported with a traceback."""
    file, name = file_and_function(text, example)
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path(file).resolve().parent))  # as for a script
    function = function_of(file, name)

    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            raise MistakesError(f"{text} failed:", *traceback_of(error, __file__)) from None

    return call
