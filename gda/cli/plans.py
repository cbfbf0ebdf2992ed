"""The command ``gda plan``: the memory of a tree on the devices of a mesh that need not exist."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from gda.cli.commands import (
    OK,
    add_command,
    add_timeout,
    read_option,
    terminal_width,
    without_accelerators,
)
from gda.cli.functions import file_and_function, function_of, traceback_of
from gda.cli.notation.mesh_and_spec import parse_mesh, parse_spec
from gda.cli.notation.mistakes import MistakesError
from gda.layout.tables import table
from gda.layout.text import counted, format_bytes

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

    from gda.trees.layouts import Layouts

    SpecOf = Callable[[str, Any], PartitionSpec]

_AUTO = "auto"

# Arrays in float32 beside each array of the parameters.
_OPTIMIZERS = {"adam": 2, "adamw": 2, "lion": 1, "momentum": 1, "sgd": 0}

_EPILOG = """\
the tree:
  A checkpoint, a step of a run such as runs/a@latest, a safetensors file or a
  folder of one model, an Orbax run; or FILE.py:FUNCTION, where FUNCTION() returns
  shapes: return jax.eval_shape(init, key). No data is read.

specs:
  --spec 'PATTERN=SPEC' is for the arrays whose path matches, such as
  '*w1=data,model'; the first that matches counts. --spec SPEC is for all others;
  without it they are replicated. A spec has one entry for each dimension: an axis
  (data), several (data+model), or _ for not sharded. auto adds each axis to the
  largest dimension that it divides; without --spec and --rules, all are auto.

examples:
  gda plan models/llama --mesh data=16,model=4 --optimizer adamw
  gda plan train.py:shapes --mesh data=8,model=4 --spec '*w1=data,model' \\
           --spec '*w2=model,data' --spec auto
  gda plan runs/a@latest --mesh data=64 --rules train.py:rule
"""


def add_plan(commands: Any) -> None:
    description = "Show the bytes of a tree on each device of a mesh; no device is needed."
    parser = add_command(commands, plan, description, epilog=_EPILOG)
    parser.add_argument("tree", metavar="TREE", help="a path, or FILE.py:FUNCTION")
    parser.add_argument(
        "--mesh", metavar="MESH", required=True, help="axes and sizes, such as data=64,model=16"
    )
    parser.add_argument(
        "--spec",
        metavar="[PATTERN=]SPEC",
        action="append",
        default=[],
        help="the axes that shard each dimension, of arrays by path, or auto",
    )
    parser.add_argument(
        "--rules", metavar="FILE.py:FUNCTION", help="FUNCTION(path, leaf) returns a PartitionSpec"
    )
    parser.add_argument(
        "--optimizer", choices=[*_OPTIMIZERS], help="add its state, sharded as its arrays"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_timeout(parser)


def plan(options: argparse.Namespace) -> int:
    mesh_shape = read_option("--mesh", options.mesh, parse_mesh)
    without_accelerators()
    from jax.sharding import AbstractMesh

    from gda.compiled.abstract import abstract
    from gda.compiled.devices.device_kinds import KINDS
    from gda.trees.layouts import layouts

    mesh = AbstractMesh((*mesh_shape.values(),), (*mesh_shape,))
    rule, unused = _rule_of(options, mesh_shape)
    found = layouts(abstract(_tree_of(options), mesh, rule))
    if not found.arrays:
        raise MistakesError(f"{options.tree} has no arrays")
    if unused:
        raise MistakesError(f"no array has a path like {min(unused)!r}, of --spec")
    nbytes_of_optimizer = _optimizer_bytes(found, options.optimizer)
    nbytes = found.nbytes_per_device + nbytes_of_optimizer
    shares = {kind.name: nbytes / kind.capacity_bytes for kind in KINDS}
    if options.json:
        about = {"mesh": mesh_shape, "optimizer": options.optimizer}
        sizes = {"optimizer_bytes_per_device": nbytes_of_optimizer, "all_bytes_per_device": nbytes}
        document = {**about, **found.to_dict(), **sizes, "share_of_memory": shares}
        print(json.dumps(document, indent=1, allow_nan=False))
        return OK
    lines = [str(found), ""]
    if options.optimizer:
        count = counted(_OPTIMIZERS[options.optimizer], "array")
        of_state = f"{options.optimizer}, {count} in float32 for each"
        lines += [f"{format_bytes(nbytes)} on each device with {of_state}"]
    lines += [""] if options.optimizer else []
    fitting = sorted(((share, name) for name, share in shares.items() if share <= 1), reverse=True)
    too_small = [name for name, share in shares.items() if share > 1]
    rows = [("fits", ", ".join(f"{name} {share:.1%}" for share, name in fitting) or "no kind")]
    rows += [("too small", ", ".join(too_small))] if too_small else []
    lines += table([("kinds", "part of the memory"), *rows], width=terminal_width())
    lines += ["", "gradients, activations and the program take memory too: see gda rehearse"]
    print(*lines, sep="\n")
    return OK


def _tree_of(options: argparse.Namespace) -> Any:
    if not re.fullmatch(r".+\.py:\w+", options.tree):
        from gda.checkpoint.step_folders.folder import path_of
        from gda.checkpoint.tree_at import open_tree

        return open_tree(path_of(options.tree, options.timeout), options.timeout).tree
    function = function_of(*file_and_function(options.tree, "train.py:shapes"))
    try:
        return function()
    except Exception as error:
        failed = f"{options.tree} failed; it is called without arguments:"
        raise MistakesError(failed, *traceback_of(error, __file__)) from None


def _rule_of(options: argparse.Namespace, mesh_shape: dict[str, int]) -> tuple[SpecOf, set[str]]:
    """Return a rule of specs, and the patterns that no path has matched, which it removes."""
    from jax.sharding import PartitionSpec

    from gda.layout.grid import ShardGrid, better_spec

    if options.rules is not None:
        if options.spec:
            raise MistakesError("--rules and --spec were given; give one of them")
        return function_of(*file_and_function(options.rules, "train.py:rule")), set()
    given = [each.rpartition("=")[::2] for each in options.spec or [_AUTO]]
    specs = [
        (pattern or "*", None if text == _AUTO else read_option("--spec", text, parse_spec))
        for pattern, text in given
    ]
    unused = {pattern for pattern, _ in specs} - {"*"}

    def rule(path: str, leaf: Any) -> PartitionSpec:
        for pattern, spec in sorted(specs, key=lambda each: each[0] == "*"):
            if fnmatchcase(path, pattern):
                unused.discard(pattern)
                if spec is None:
                    spec = better_spec(ShardGrid(leaf.shape, mesh_shape, ()))
                return PartitionSpec(*spec)
        return PartitionSpec()

    return rule, unused


def _optimizer_bytes(found: Layouts, optimizer: str | None) -> int:
    import jax.numpy as jnp

    floats = (row for row in found.arrays if jnp.issubdtype(jnp.dtype(row.dtype), jnp.inexact))
    elements = sum(math.prod(row.block_shape) for row in floats)
    return 4 * elements * _OPTIMIZERS.get(optimizer or "", 0)
