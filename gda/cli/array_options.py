"""The options of a command that describe one array and its layout."""

from __future__ import annotations

import argparse
from typing import Any

from gda.cli.commands import read_given
from gda.layout.text import listed
from gda.planning.notation.dtypes import parse_dtype
from gda.planning.notation.layouts import parse_mesh, parse_spec
from gda.planning.notation.mistakes import MistakesError
from gda.planning.notation.numbers import parse_number, parse_shape
from gda.planning.planned_array import PlannedArray, plan_array


def add_array_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of one array and its layout."""
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


def read_array(options: argparse.Namespace, says: str) -> PlannedArray:
    """Return the array that the options of a command describe.

    Raises:
      MistakesError: an option is missing, some cannot be read (all of them are reported), or they
        do not fit together.
    """
    needed = ("shape", "dtype", "mesh", "spec")
    missing = [f"--{name}" for name in needed if getattr(options, name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise MistakesError(f"{listed(missing)} {verb} missing; {says}")
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
