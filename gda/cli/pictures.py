"""The command ``gda show``: a picture of the layout of an array on devices that need not exist."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gda.cli.commands import OK, add_command, read_option, terminal_width
from gda.cli.notation.mesh_and_spec import parse_mesh, parse_spec
from gda.cli.notation.mistakes import MistakesError
from gda.cli.notation.numbers import parse_dtype, parse_number, parse_shape
from gda.layout.text import format_mesh

if TYPE_CHECKING:
    from gda.layout.numbering import IntArray

_MOST_DEVICES = 2**22  # some answers take O(devices)

_EPILOG = """\
specs:
  One entry for each dimension, between commas: an axis of the mesh (data),
  several that shard one dimension together (data+model), or _ for not sharded.
  Dimensions that are omitted at the end are not sharded. P('data', None) of
  Python can be pasted.

examples:
  gda show --shape 65536x8192 --dtype bf16 --mesh data=64,model=16 \\
           --spec data,model --devices-per-process 8
  gda show --shape 32x4096x128 --dtype f32 --mesh x=4,y=2 --spec _,x+y
"""

_OPTIONS = (
    ("--shape", "such as 65536x8192; () for a scalar"),
    ("--dtype", "such as float32, bfloat16 or bf16"),
    ("--mesh", "axes and sizes, such as data=64,model=16"),
    ("--spec", "the axes that shard each dimension, such as data,model"),
)


def add_show(commands: Any) -> None:
    description = "Show the blocks of an array on each device of a mesh; no device is needed."
    parser = add_command(commands, show, description, epilog=_EPILOG)
    for name, says in _OPTIONS:
        parser.add_argument(name, metavar=name[2:].upper(), required=True, help=says)
    parser.add_argument("--pad", action="store_true", help="pad the sizes that do not divide")
    parser.add_argument("--devices-per-process", metavar="N", help="devices of each process")


def show(options: argparse.Namespace) -> int:
    shape = read_option("--shape", options.shape, parse_shape)
    dtype = read_option("--dtype", options.dtype, parse_dtype)
    mesh = read_option("--mesh", options.mesh, parse_mesh)
    spec = read_option("--spec", options.spec, parse_spec)
    process_of = _process_of(mesh, options.devices_per_process)

    from gda.layout.grid import ShardGrid
    from gda.show.subject import Subject
    from gda.show.terminal import NARROWEST, text_of

    grid = ShardGrid(shape, mesh, spec, pad=options.pad, process_of=process_of)
    width = max(terminal_width(), NARROWEST)
    print(text_of(Subject(grid, dtype=dtype, kind="plan"), width=width))
    return OK


def _process_of(mesh: Mapping[str, int], per_process: str | None) -> IntArray | None:
    """Return the process of each device; None if the number of its devices was not given."""
    devices = math.prod(mesh.values())
    if devices > _MOST_DEVICES:
        raise MistakesError(
            f"a picture is for at most {_MOST_DEVICES:,} devices; the mesh has more"
        )
    if per_process is None:
        return None
    count = read_option("--devices-per-process", per_process, parse_number)
    if devices % count:
        raise MistakesError(
            f"{count} devices per process do not divide the {devices} devices of the mesh "
            f"{format_mesh(mesh)}; give a number that does"
        )
    import numpy as np

    return np.arange(devices) // count
