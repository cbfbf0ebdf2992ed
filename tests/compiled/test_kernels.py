"""Programs with kernels, compiled for devices: all that follows a kernel is read and counted."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gda

TRITON = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
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


@pytest.mark.topology
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


# On GPUs.


def triton(x: jax.Array, **estimate: Any) -> jax.Array:
    from jax.experimental import pallas

    def double(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = x_ref[...] * 2

    return pallas.pallas_call(double, jax.typeof(x), name="doubling", **estimate)(x)


def mosaic(x: jax.Array, **estimate: Any) -> jax.Array:
    from jax.experimental.pallas import mosaic_gpu

    def copy(x_ref: Any, y_ref: Any, block: Any) -> None:
        block[...] = x_ref[...]
        mosaic_gpu.commit_smem()
        mosaic_gpu.copy_smem_to_gmem(block, y_ref)
        mosaic_gpu.wait_smem_to_gmem(0)

    grid: dict[str, Any] = {"grid": (1,), "grid_names": ("g",)}
    scratch = [mosaic_gpu.SMEM(x.shape, x.dtype)]
    form = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return mosaic_gpu.kernel(copy, out_type=form, scratch_types=scratch, **grid, **estimate)(x)


def on_each(mesh: Mesh, kernel: Kernel) -> Kernel:
    return jax.shard_map(kernel, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)


@pytest.mark.topology("gpu")
@TRITON
@pytest.mark.parametrize("kernel", [triton, mosaic])
def test_the_estimate_of_the_author_of_a_kernel_counts_on_gpus(kernel: Kernel) -> None:
    from jax.experimental import pallas

    mesh = gda.rehearsal_mesh("h100:2", {"x": 2})
    x = gda.abstract(shape(128, 64), mesh, P("x"))
    estimate = pallas.CostEstimate(flops=10**9, transcendentals=0, bytes_accessed=0)
    counted = gda.rehearse(on_each(mesh, functools.partial(kernel, cost_estimate=estimate)), x)
    assert (counted.flops, counted.flops_total, counted.repetitions) == (1e9, 2e9, 1)
    assert not counted.seconds.not_counted
    assert gda.rehearse(on_each(mesh, kernel), x).seconds.not_counted


@pytest.mark.topology("gpu")
@TRITON
def test_costs_of_kernels_are_given_by_name_or_target() -> None:
    mesh = gda.rehearsal_mesh("h100:2", {"x": 2})
    x = gda.abstract(shape(128, 64), mesh, P("x"))
    for name in ("doubling", "__gpu$xla.gpu.triton"):
        assert gda.rehearse(on_each(mesh, triton), x, costs={name: 1e9}).flops == 1e9
    with pytest.raises(ValueError, match=r"costs has 'other'.* of which it has __gpu\$xla"):
        gda.rehearse(on_each(mesh, triton), x, costs={"other": 1e9})
    with pytest.raises(ValueError, match=r"costs\['doubling'\] must be a number above 0"):
        gda.rehearse(on_each(mesh, triton), x, costs={"doubling": -1})


@pytest.mark.topology("gpu")
@pytest.mark.parametrize("has_bias", [False, True])
def test_attention_of_cudnn_is_counted_without_a_card(has_bias: bool) -> None:
    mesh = gda.rehearsal_mesh("h100:8", {"data": 4, "model": 2})
    query, key = (
        gda.abstract(shape(16, 512, heads, 64), mesh, P("data", None, "model")) for heads in (8, 4)
    )
    bias = [gda.abstract(shape(1, 8, 512, 512), mesh, P(None, "model"))] * has_bias
    original = jax.nn.dot_product_attention

    def loss(query: jax.Array, key: jax.Array, *bias: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            options: Any = {"implementation": "cudnn", "is_causal": not has_bias}
            return jax.nn.dot_product_attention(x, key, key, *bias, **options), None

        return jax.lax.scan(jax.checkpoint(layer), query, None, length=3)[0].sum()

    rehearsal = gda.rehearse(jax.grad(loss), query, key, *bias)
    product = 2 * 4 * 4 * 512 * 512 * 64 * (1 if has_bias else 0.5)  # of a layer on one device
    assert rehearsal.flops == 3 * (2 + 2 + 5) * product
    assert rehearsal.flops_model == 8 * 3 * (2 + 5) * product
    assert rehearsal.repetitions == 1
    assert not rehearsal.seconds.not_counted
    assert not any(each.axes == ("data",) for each in rehearsal.traffic if not has_bias)
    assert jax.nn.dot_product_attention is original
