"""Programs with kernels of Pallas, compiled for TPUs: all that follows a kernel is read."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gda

pytestmark = pytest.mark.topology
Kernel = Callable[..., Any]
Operands = tuple[jax.ShapeDtypeStruct, ...]


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def doubling() -> tuple[Kernel, Operands]:
    """Return a kernel whose metadata JAX prints in lines of its own, of which one begins with }."""
    from jax.experimental import pallas

    def double(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = x_ref[...] * 2

    def kernel(x: jax.Array) -> jax.Array:
        odd = {"block": "8", "odd": "a}b{\"c\n% d'("}
        return pallas.pallas_call(double, jax.typeof(x), metadata=odd)(x)

    return kernel, (shape(1024, 1024),)


def splash() -> tuple[Kernel, Operands]:
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    one = splash_attention_mask.CausalMask((512, 512))
    mask = splash_attention_mask.MultiHeadMask([one] * 4)
    kernel = splash_attention_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    return kernel, (shape(4, 512, 128),) * 3


def paged() -> tuple[Kernel, Operands]:
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    def kernel(*operands: jax.Array) -> jax.Array:
        return paged_attention(*operands, pages_per_compute_block=4)

    pages = shape(8, 64, 16, 128)
    numbers = shape(4, dtype=jnp.int32), shape(4, 16, dtype=jnp.int32)
    return kernel, (shape(4, 8, 128), pages, pages, *numbers)


def ragged() -> tuple[Kernel, Operands]:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    def kernel(*operands: jax.Array) -> jax.Array:
        blocks = {"num_kv_pages_per_block": 4, "num_queries_per_block": 8}
        return ragged_paged_attention(*operands, **blocks)

    numbers = [shape(*sizes, dtype=jnp.int32) for sizes in [(4,), (4, 16), (5,), (1,)]]
    return kernel, (shape(64, 8, 128), shape(64, 16, 16, 128), *numbers)


@pytest.mark.parametrize(
    ("topology", "num_devices"),
    [("v4:2x2x1", 4), ("v5e:2x2", 4), ("v5p:2x2x1", 4), ("v6e:2x2", 4), ("tpu7x:2x2x1", 8)],
)
@pytest.mark.parametrize("attention", [doubling, splash, paged, ragged])
def test_collectives_after_a_kernel_are_read(
    topology: str, num_devices: int, attention: Callable[[], tuple[Kernel, Operands]]
) -> None:
    mesh = gda.rehearsal_mesh(topology, {"x": num_devices})
    kernel, operands = attention()

    def step(x: jax.Array, *operands: jax.Array) -> jax.Array:
        out = jax.shard_map(kernel, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(
            *operands
        )
        sums = x.sum() + out.astype(np.float32).sum()
        return jax.lax.with_sharding_constraint(x * sums, NamedSharding(mesh, P()))

    x = gda.abstract(shape(4096, 8, dtype=np.float32), mesh, P("x"))
    inputs = [gda.abstract(operand, mesh, P()) for operand in operands]
    rehearsal = gda.rehearse(step, x, *inputs)
    assert rehearsal.collectives is not None
    kinds = {collective.kind for collective in rehearsal.collectives}
    assert "all-gather" in kinds
    assert "all-reduce" in kinds
    assert rehearsal.seconds is not None
    assert rehearsal.seconds.not_counted
    with pytest.raises(AssertionError):
        gda.assert_collectives(step, x, *inputs, allow=[])
