"""Do replicas hold the same bits? Against a simpler sum of each, and comparison on the host.

Every way must notice one bit that differs. XOR is the cheapest sum; it does not notice elements
that changed places, or two that changed alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gda
from benchmarks.pairs import Side
from benchmarks.work import AtMost, Work


def _replicated(*shape: int, dtype: Any = np.float32) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    data = np.random.default_rng(0).integers(0, 100, shape).astype(jnp.dtype(dtype))
    return jax.device_put(data, NamedSharding(mesh, PartitionSpec()))


@jax.jit
def _xor(blocks: list[jax.Array]) -> jax.Array:
    """Return the XOR of all bits of each block, made on every device: one read of its memory."""
    return jnp.stack(
        [
            lax.reduce(
                lax.bitcast_convert_type(block, jnp.dtype(f"uint{block.dtype.itemsize * 8}")),
                np.array(0, f"uint{block.dtype.itemsize * 8}"),
                lax.bitwise_xor,
                range(block.ndim),
            )
            for block in blocks
        ]
    )


def _by_xor(tree: list[jax.Array]) -> None:
    """Compare the XOR of each leaf on every device with that of the first, on the host."""
    first, *others = (np.asarray(shard.data) for shard in _xor(tree).addressable_shards)
    if not all(np.array_equal(first, other) for other in others):
        raise ValueError("the replicas differ")


def _on_the_host(tree: list[jax.Array]) -> None:
    """Compare all shards with the first, as NumPy arrays: on CPU without a copy."""
    for leaf in tree:
        shards = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        first, *others = (shard.view(f"u{leaf.dtype.itemsize}") for shard in shards)
        if not all(np.array_equal(first, other) for other in others):
            raise ValueError("the replicas differ")


def _notices(check: Callable[[list[jax.Array]], object], tree: list[jax.Array]) -> bool:
    *rest, last = tree
    shards = [np.array(shard.data) for shard in last.addressable_shards]
    shards[-1].reshape(-1).view(np.uint8)[-1] ^= 1
    buffers: Any = jax.device_put(shards, list(last.sharding.device_set))
    other = jax.make_array_from_single_device_arrays(last.shape, last.sharding, buffers)
    try:
        check([*rest, other])
    except ValueError:
        return True
    return False


def _compared(make: Any) -> Sequence[Side]:
    tree = make()
    ways = (gda.check_replicas_agree, _by_xor, _on_the_host)
    assert all(_notices(way, tree) for way in ways)
    return [Side(partial(way, tree)) for way in ways]


def _large(mebibytes: int, dtype: str = "float32") -> list[jax.Array]:
    return [_replicated(mebibytes, (1 << 20) // jnp.dtype(dtype).itemsize, dtype=dtype)]


def _small() -> list[jax.Array]:
    return [_replicated(16, 16 * (1 + i % 8)) for i in range(1000)]


_XOR = "XOR of all bits by XLA, compared on the host"
_HOST = "bytes of all shards compared on the host"


def works(quick: bool) -> list[Work]:
    size = 1 if quick else 64
    return [
        Work(
            "replicas compared: 64 MiB of float32 on each of 8 devices",
            partial(_compared, partial(_large, size)),
            {_XOR: AtMost(2), _HOST: None},
            seconds=3,
        ),
        Work(
            "replicas compared: 64 MiB of bfloat16 on each of 8 devices",
            partial(_compared, partial(_large, size, "bfloat16")),
            {_XOR: None, _HOST: None},
            seconds=3,
        ),
        Work(
            "replicas compared: 1,000 leaves of 256 to 2,048 float32 on 8 devices",
            partial(_compared, _small),
            {_XOR: None, _HOST: None},
            seconds=3,
        ),
    ]
