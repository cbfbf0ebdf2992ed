"""The live arrays by name, and layouts, of many arrays that are sharded over 8 devices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

import gda
from benchmarks.layout.index_math import mesh_of
from benchmarks.pairs import Side
from benchmarks.work import Within, Work

_ARRAYS = 10_000
_LIVE_ARRAYS = 1_000


def _report(is_named: bool) -> Sequence[Side]:
    """Return gda, and JAX's own paths and bytes of the same arrays: no layouts, nothing shared."""
    mesh = mesh_of((4, 2), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec("data", "model"))
    data = np.zeros((8, 64), np.float32)
    arrays = jax.device_put([data] * _LIVE_ARRAYS, sharding)
    layers = [{"w": array} for array in arrays]
    trees = {"layers": layers} if is_named else {}

    def rival() -> list[tuple[str, int]]:
        if not is_named:
            return [("", array.nbytes) for array in jax.live_arrays()]
        leaves = tree_flatten_with_path(layers)[0]
        return [(keystr(path), array.nbytes) for path, array in leaves]

    assert gda.memory(layers=layers).devices[0].by_tree["layers"] == _LIVE_ARRAYS * data.nbytes // 8
    # The arrays live as long as the sides do.
    return [Side(lambda: gda.memory(**trees), done=lambda _: layers), Side(rival)]


def _layouts() -> Sequence[Side]:
    """Return gda, and JAX's own paths and bytes of the same shapes."""
    mesh = mesh_of((4, 2), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec("data", "model"))
    shape = jax.ShapeDtypeStruct((8, 64), np.float32, sharding=sharding)
    layers = [{"w": shape} for _ in range(_ARRAYS)]

    def rival() -> list[tuple[str, int]]:
        leaves = tree_flatten_with_path(layers)[0]
        return [(keystr(path), leaf.size * leaf.dtype.itemsize) for path, leaf in leaves]

    assert gda.layouts(layers).nbytes_per_device == _ARRAYS * 256
    return [Side(lambda: gda.layouts(layers)), Side(rival)]


WORKS = [
    Work(
        f"list the layouts of {_ARRAYS:,} arrays",
        _layouts,
        {"their paths and bytes in JAX": None},
        limit=Within(50),
    ),
    *(
        Work(
            f"report the memory of {_LIVE_ARRAYS:,} {kind} arrays",
            partial(_report, kind == "named"),
            {"their bytes in JAX" if kind == "unnamed" else "their paths and bytes in JAX": None},
            limit=Within(150),
        )
        for kind in ("named", "unnamed")
    ),
]
