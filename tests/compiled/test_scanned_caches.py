"""Caches that a loop copies: found in the trace, advised where the program has the copy."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gda
from gda.compiled.traces.scanned_caches import scanned_caches

LAYERS, BATCH, LENGTH, SIZE = 8, 16, 2048, 512


def scanned(w: Any, cache: Any, x: Any, at: Any, constrained: Any = lambda x: x) -> Any:
    def layer(x: Any, given: Any) -> Any:
        w, cache = given
        y = x @ w
        cache = constrained(lax.dynamic_update_slice(cache, y[:, None], (0, at, 0)))
        scores = jax.nn.softmax(jnp.einsum("bh,bsh->bs", y, cache), -1)
        return x + jnp.einsum("bs,bsh->bh", scores, cache), cache

    return lax.scan(layer, x, (w, cache))


def carried(w: Any, cache: Any, x: Any, at: Any) -> Any:
    def layer(i: Any, carry: Any) -> Any:
        x, cache = carry
        y = x @ lax.dynamic_index_in_dim(w, i, 0, keepdims=False)
        cache = lax.dynamic_update_slice(cache, y[None, :, None], (i, 0, at, 0))
        own = lax.dynamic_index_in_dim(cache, i, 0, keepdims=False)
        scores = jax.nn.softmax(jnp.einsum("bh,bsh->bs", y, own), -1)
        return x + jnp.einsum("bs,bsh->bh", scores, own), cache

    return lax.fori_loop(0, LAYERS, layer, (x, cache))


def read_alone(w: Any, cache: Any, x: Any, at: Any) -> Any:
    def layer(x: Any, given: Any) -> Any:
        return x @ given[0], given[1].sum() + at

    return lax.scan(layer, x, (w, cache))


def arguments(mesh: Mesh | None = None) -> list[Any]:
    sizes = (LAYERS, SIZE, SIZE), (LAYERS, BATCH, LENGTH, SIZE), (BATCH, SIZE), ()
    forms = [jax.ShapeDtypeStruct(each, jnp.bfloat16) for each in sizes[:3]]
    forms += [jax.ShapeDtypeStruct(sizes[3], jnp.int32)]
    specs = P(), P(None, "x"), P("x"), P()
    return forms if mesh is None else [*map(gda.abstract, forms, [mesh] * 4, specs)]


@pytest.mark.parametrize(
    ("step", "is_found"),
    [
        (scanned, True),
        (jax.jit(lambda *args: jax.jit(scanned)(*args)), True),
        (lambda w, cache, *args: scanned(w, cache.at[0].set(0), *args), True),
        (carried, False),
        (read_alone, False),
    ],
)
def test_an_argument_that_is_xs_and_ys_is_found_with_its_line(step: Any, is_found: bool) -> None:
    found = scanned_caches(jax.jit(step).trace(*arguments()).jaxpr)
    assert [*found] == [1] * is_found
    for file, line in found.values():
        assert file == __file__
        with open(file) as text:
            assert "lax.dynamic_update_slice" in text.readlines()[line - 1]


@pytest.mark.topology("gpu")
@pytest.mark.parametrize("is_donated", [True, False])
def test_a_cache_that_is_carried_as_advised_takes_what_was_promised(is_donated: bool) -> None:
    mesh = gda.rehearsal_mesh("h100:4", {"x": 4})
    before, after = (
        gda.rehearse(jax.jit(step, donate_argnums=donated), *arguments(mesh))
        for step, donated in ((scanned, 1 if is_donated else ()), (carried, 1))
    )
    (advice,) = [each for each in before.advice if each.text.startswith("carry ")]
    nbytes = LAYERS * BATCH * LENGTH * SIZE * 2 // 4
    assert advice.saves_bytes == nbytes
    assert before.peak_bytes is not None
    assert after.peak_bytes is not None
    assert nbytes <= before.peak_bytes - after.peak_bytes + LENGTH * SIZE * 8
    assert before.seconds.estimate is not None
    assert after.seconds.estimate is not None
    assert advice.saves_seconds is not None
    assert 0 < advice.saves_seconds < before.seconds.estimate - after.seconds.estimate
    assert re.match(r"carry cache \(64.0 MiB\) in the loop of \S+\.py:\d+, as jax", advice.text)
    assert ("in place, and donate them: " in advice.text) != is_donated
    # To donate it alone would save none of it.
    assert not any(each.text.startswith("donate cache") for each in before.advice)
    assert not any(each.text.startswith("carry ") for each in after.advice)


@pytest.mark.topology
def test_the_donation_of_a_scanned_cache_promises_nothing_on_tpus() -> None:
    mesh = gda.rehearsal_mesh("v5p:2x2x1", {"x": 4})
    before, after = (
        gda.rehearse(jax.jit(scanned, donate_argnums=donated), *arguments(mesh))
        for donated in ((), 1)
    )
    assert before.peak_bytes is not None
    assert after.peak_bytes is not None
    assert before.peak_bytes - after.peak_bytes < 2**20  # XLA copies it
    (advice,) = [each for each in before.advice if each.text.startswith("donate ")]
    assert advice.saves_bytes is None
    unless = r"unless XLA copies what is xs and ys of the scan of \S+:\d+; rehearse that"
    assert re.fullmatch(rf"donate cache \(64.0 MiB\): saves 64.0 MiB, {unless}", advice.text)
