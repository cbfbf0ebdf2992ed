"""Whole trees restored, against a plain way: read the bytes, and place as many.

The model has the shape of Llama 2 7B, with widths for which its weights take 2 GiB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gda
from benchmarks.checkpoint.checkpointers import read, write
from benchmarks.checkpoint.checkpoints import DEVICES, READ, Scratch, delete
from benchmarks.pairs import Side
from benchmarks.work import OfSpeed, Work

P = PartitionSpec
BY_ROWS, BY_COLUMNS = P("model", "data"), P("data", "model")
Leaf = tuple[tuple[int, ...], PartitionSpec]
Leaves = Mapping[str, Leaf]

_PLACED = "raw read, and make_array_from_callback of aligned memory"


def model(layers: int, width: int) -> Leaves:
    """Return shape and spec of every weight."""
    wide, vocabulary = width * 43 // 16, width * 125 // 16
    embedding: Leaf = ((vocabulary, width), BY_ROWS)
    leaves = {"embedding": embedding, "head": embedding}
    for layer in range(layers):
        leaves |= {f"{layer}.{name}": ((width, width), BY_ROWS) for name in "qkv"}
        leaves |= {f"{layer}.{name}": ((wide, width), BY_ROWS) for name in ("gate", "up")}
        leaves[f"{layer}.o"] = (width, width), BY_COLUMNS
        leaves[f"{layer}.down"] = (width, wide), BY_COLUMNS
        leaves |= {f"{layer}.norm{n}": ((width,), P()) for n in (1, 2)}
    return leaves


def small_leaves(count: int) -> Leaves:
    """Return shape and spec of weights of 16 KiB."""
    return {str(number): ((128, 64), P("data")) for number in range(count)}


def _restoring(leaves: Leaves) -> Sequence[Side]:
    mesh = Mesh(np.array(jax.devices()[:DEVICES]).reshape(4, 2), ("data", "model"))
    rng = np.random.default_rng(0)
    values = {
        name: rng.integers(0, 2**15, shape, np.uint16).view(ml_dtypes.bfloat16)
        for name, (shape, _) in leaves.items()
    }
    shardings = {name: NamedSharding(mesh, spec) for name, (_, spec) in leaves.items()}
    like = {
        name: jax.ShapeDtypeStruct(shape, ml_dtypes.bfloat16, sharding=shardings[name])
        for name, (shape, _) in leaves.items()
    }
    scratch = Scratch()
    path, raw = scratch.another(), scratch.another()
    tree = gda.load_tree(values, shardings)
    gda.checkpoint.save(path, tree)
    delete(tree)
    restored = gda.checkpoint.restore(path, like)
    for name, each in values.items():
        assert np.array_equal(np.asarray(restored[name]).view("u2"), each.view("u2"))
        delete(restored.pop(name))  # with the copy that JAX keeps of it
    flat = np.concatenate([each.view(np.uint8).reshape(-1) for each in values.values()])
    write(raw, np.array_split(flat, -(-flat.size // (32 * 2**20))))
    blocks = {
        (each.sharding, each.shape): gda.aligned_empty(
            each.sharding.shard_shape(each.shape), each.dtype
        )
        for each in like.values()
    }

    def placed(like: jax.ShapeDtypeStruct) -> jax.Array:
        block = blocks[like.sharding, like.shape]
        return jax.make_array_from_callback(like.shape, like.sharding, lambda _: block)

    def read_and_place() -> dict[str, jax.Array]:
        read(raw)
        return jax.block_until_ready({name: placed(each) for name, each in like.items()})

    return [
        Side(
            lambda: jax.block_until_ready(gda.checkpoint.restore(path, like)),
            scratch.keep,
            done=delete,
        ),
        Side(partial(read, raw), scratch.keep),
        Side(read_and_place, scratch.keep, done=delete),
    ]


def works(quick: bool = False) -> list[Work]:
    """Return the works; if ``quick``, with small arrays, only to see that everything runs."""
    return [
        Work(
            f"restore {name}",
            partial(_restoring, leaves),
            {READ: None, _PLACED: None, **targets},
            raw=READ,
            seconds=10,
        )
        for name, leaves, targets in [
            (
                "a model in the shape of Llama 2 7B, 2 GiB",
                model(2 if quick else 32, 1632),
                {READ: OfSpeed(0.8)},
            ),
            (
                "4,000 arrays of 128 x 64",
                small_leaves(50 if quick else 4000),
                {_PLACED: OfSpeed(0.6)},
            ),
        ]
    ]
