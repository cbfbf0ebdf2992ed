"""The attention of cuDNN, traced without a card.

JAX asks cuDNN and the card while it traces ``jax.nn.dot_product_attention`` with the implementation
``"cudnn"``. Here stand-ins make the same calls, whose shapes tell their operations. A program with
them is for rehearsals alone: the calls lack what cuDNN needs to run them.
"""

from __future__ import annotations

import functools
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

# The dimensions of arrays: batch, tokens, heads, size; a bias may have 1 in place of the first two.
_QUERY, _KEY, _SUMS, _BIAS = "b t n h", "b s k h", "b n t", "c d e f"

_lock = threading.RLock()  # all threads share the function of JAX


class _Form(NamedTuple):
    """The options of an attention; ``keys`` are those of each query in a sliding window."""

    is_causal: bool
    keys: int | None
    has_bias_gradient: bool


@contextmanager
def traced_without_card() -> Iterator[None]:
    """Trace the attention of cuDNN in this block also where JAX finds no card or no cuDNN."""
    with _lock:
        of_jax = jax.nn.dot_product_attention

        @functools.wraps(of_jax)
        def attention(
            query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **options: Any
        ) -> Any:
            try:
                return of_jax(query, key, value, bias, mask, **options)
            except RuntimeError:  # wrong arguments raise other errors
                if options.get("implementation") != "cudnn" or query.dtype.itemsize != 2:
                    raise
            return _attention_of_any_rank(query, key, value, bias, mask, options)

        jax.nn.dot_product_attention = attention
        try:
            yield
        finally:
            jax.nn.dot_product_attention = of_jax


def _attention_of_any_rank(
    query: Any, key: Any, value: Any, bias: Any, mask: Any, options: dict[str, Any]
) -> Any:
    window = options.get("local_window_size")
    left = window[0] if isinstance(window, tuple) else window
    keys = None if left is None else min(left + 1, key.shape[-3])
    form = _Form(options.get("is_causal", False) and keys is None, keys, bias is not None)
    if mask is not None:
        bias = jnp.where(mask, 0 if bias is None else bias, -1e4).astype(query.dtype)
    is_one = query.ndim == 3
    arrays = [each[None] if is_one else each for each in (query, key, value)]
    results: Any = _attention(form, *arrays, bias)
    results = results[0], results[1].swapaxes(1, 2).astype(query.dtype)
    out, sums = (each[0] if is_one else each for each in results)
    return (out, sums) if options.get("return_residual") else out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(form: _Form, query: Any, key: Any, value: Any, bias: Any) -> Any:
    out, sums = _call(form, "", (query, key, value), bias)
    return out, sums


def _forward(form: _Form, query: Any, key: Any, value: Any, bias: Any) -> Any:
    out, sums = _call(form, "", (query, key, value), bias)
    return (out, sums), (query, key, value, bias, out, sums)


def _backward(form: _Form, saved: Any, slopes: Any) -> Any:
    *arrays, bias, out, sums = saved
    found = _call(form, "Backward", (*arrays, out, slopes[0], sums), bias)
    return (*found, *[None] * (4 - len(found)))


_attention.defvjp(_forward, _backward)


def _call(form: _Form, direction: str, arrays: tuple[Any, ...], bias: Any) -> Any:
    """Return the results of one kernel; over a mesh, batch and heads may be sharded."""
    has_gradient = bool(direction) and bias is not None and form.has_bias_gradient
    target = f"__cudnn$fmha{'ScaleBias' * (bias is not None)}Softmax{direction}"
    given = [*(_QUERY, _KEY, _KEY), *([_QUERY, _QUERY, _SUMS] if direction else [])]
    given += [_BIAS] * (bias is not None)
    made = [*given[:3], *[_BIAS] * has_gradient] if direction else [_QUERY, _SUMS]

    def kernel(*arrays: Any) -> Any:
        (batch, tokens, heads, _), keys = arrays[0].shape, form.keys or arrays[1].shape[1]
        sums = jax.ShapeDtypeStruct((batch, heads, tokens), jnp.float32)
        results = [*arrays[:3], *arrays[-1:] * has_gradient] if direction else [arrays[0], sums]
        about = {
            "intermediate_tensor_shape": {"dimensions": [*map(str, (batch, heads, tokens, keys))]},
            "mask_type": "CAUSAL" if form.is_causal else "NO_MASK",
        }
        return jax.ffi.ffi_call(
            target,
            [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in results],
            custom_call_api_version=2,
            legacy_backend_config=json.dumps(
                {"cudnn_fmha_backend_config": about}, separators=(",", ":")
            ),
        )(*arrays)

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        batch, _, heads, *_ = (*operands[0].sharding.spec, None, None, None)
        parts = math.prod(mesh.shape[axis] for axis in jax.tree.leaves(heads))
        heads = None if operands[1].shape[2] % parts else heads

        def sharding(of: Any, names: str) -> NamedSharding:
            axes = {"b": batch, "n": heads, "k": heads}
            if names == _BIAS:
                axes = {
                    "c": (of.shape[0] > 1 and batch) or None,
                    "d": (of.shape[1] > 1 and heads) or None,
                }
            return NamedSharding(mesh, PartitionSpec(*map(axes.get, names.split())))

        return mesh, kernel, [*map(sharding, results, made)], tuple(map(sharding, operands, given))

    whole = custom_partitioning(kernel)
    rule = f"{', '.join(given)} -> {', '.join(made)}"
    whole.def_partition(partition=partition, sharding_rule=rule)
    return whole(*arrays) if bias is None else whole(*arrays, bias)
