"""The options of a command that describe an array or a model, and its layout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from gda.cli.commands import read_given
from gda.layout.text import listed
from gda.planning.notation.mesh_and_spec import parse_mesh, parse_spec
from gda.planning.notation.mistakes import MistakesError
from gda.planning.notation.model_file import ModelText, text_of
from gda.planning.notation.numbers import parse_dtype, parse_number, parse_shape
from gda.planning.planned_array import PlannedArray, plan_array


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of one array or a model, and of its layout."""
    parser.add_argument("--shape", metavar="SHAPE", help="such as 65536x8192; () for a scalar")
    parser.add_argument("--dtype", metavar="DTYPE", help="such as float32, bfloat16 or bf16")
    parser.add_argument("--mesh", metavar="MESH", help="axes and sizes, such as data=64,model=16")
    parser.add_argument(
        "--spec", metavar="SPEC", help="the axes that shard each dimension, such as data,model"
    )
    parser.add_argument(
        "--pad", action="store_true", help="pad the sizes that do not divide; show the cost"
    )
    parser.add_argument(
        "--devices-per-process",
        metavar="N",
        help="devices of each process; by default one has all",
    )
    parser.add_argument(
        "--tree",
        metavar="FILE",
        help="take the model that this JSON file describes; - is stdin",
    )
    parser.add_argument("--no-picture", action="store_true", help="print no picture")


def read_array(options: argparse.Namespace, needed: str) -> PlannedArray:
    """Return the array that the options describe; an error names all that cannot be read.

    ``needed`` are the options that the command needs, for messages.
    """
    names = ("shape", "dtype", "mesh", "spec")
    missing = [f"--{name}" for name in names if getattr(options, name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise MistakesError(f"{listed(missing)} {verb} missing; {needed}")
    mistakes: list[str] = []

    def read(name: str, parse: Any) -> Any:
        try:
            return read_given(options, name, parse)
        except MistakesError as error:
            mistakes.extend(error.lines)

    shape, dtype = read("shape", parse_shape), read("dtype", parse_dtype)
    mesh, spec = read("mesh", parse_mesh), read("spec", parse_spec)
    devices_per_process = read("devices-per-process", parse_number)
    if mistakes:
        raise MistakesError(*mistakes)
    return plan_array(shape, dtype, mesh, spec, devices_per_process, pad=options.pad)


def refuse_options(options: argparse.Namespace, of_one_array: Sequence[str]) -> None:
    """Check that the options of one array are not given with ``--tree``."""
    names = [name for name in of_one_array if getattr(options, name) not in (None, [])]
    given = [f"--{name.replace('_', '-')}" for name in names]
    if given:
        raise MistakesError(
            f"{listed(given)} cannot be used with --tree, which plans a model; omit either"
        )


def read_text(option: str, path: str) -> ModelText:
    """Return the text of the file of an option; ``-`` is stdin."""
    if not path:
        raise MistakesError(f"{option}: the path of a file was expected, or - for stdin")
    if path == "-" and sys.stdin is None:  # stdin is closed
        raise MistakesError(f"{option}: stdin is closed; give the path of a file instead of -")
    try:
        if path == "-":
            return text_of("stdin", sys.stdin.buffer)
        with open(path, "rb") as file:
            return text_of(path, file)
    except OSError as error:
        raise MistakesError(f"{path} cannot be read: {error.strerror or error}") from None
