"""All that is measured on an accelerator: ``python -m benchmarks --accelerator``.

The ways are those of the other works, on arrays of one accelerator. Beside them stands a copy from
pinned memory of the host to the device, or from it, which is as fast as the bus. With
``GDA_ACCELERATOR=cpu``, CPU devices take the place of the accelerator, to see that everything runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gda
from benchmarks.arrays.building import MIB
from benchmarks.arrays.using import jitted
from benchmarks.checkpoint.checkpointers import GDA, ORBAX, ORBAX_V1, SAFETENSORS
from benchmarks.checkpoint.checkpoints import (
    CHECKED,
    LARGE,
    READ,
    ROWS,
    SMALL,
    WRITES,
    Scale,
    Scratch,
    delete,
    sides_that_begin,
    sides_that_restore,
    sides_that_save,
)
from benchmarks.exchange import two_programs
from benchmarks.layout.index_math import mesh_of
from benchmarks.pairs import Side
from benchmarks.trees.prefetching import by_thread, in_turns, ours, placed_ahead
from benchmarks.work import Work
from gda.testing.pool import Pool

P = PartitionSpec


TO_DEVICE = "a copy from pinned memory to the device"
TO_HOST = "a copy from the device to pinned memory"
MEMORY_READ = "one read of the memory of the device"


@cache
def _mesh() -> Mesh:
    return mesh_of((1, 1))


def _on_device(shape: tuple[int, ...], dtype: Any = np.float32, kind: str | None = None) -> Any:
    """Return an array of a normal distribution in a memory of the device."""
    values = np.random.default_rng(0).standard_normal(shape, np.float32).astype(dtype)
    return jax.block_until_ready(jax.device_put(values, _sharding(kind)))


def _sharding(kind: str | None = None) -> NamedSharding:
    return NamedSharding(_mesh(), P(), memory_kind=kind)


def _waits(run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: jax.block_until_ready(run(*arguments))


def _copies(shape: tuple[int, ...], *, to_device: bool) -> Side:
    """Return the copy between pinned memory and the device, whose speed is that of the bus."""
    kinds = "pinned_host", None
    source = _on_device(shape, kind=kinds[not to_device])
    return Side(_waits(lambda: jax.device_put(source, _sharding(kinds[to_device]))), done=delete)


# The works. Each returns gda's side first.


def _building(rows: int, count: int) -> list[Side]:
    rng = np.random.default_rng(0)
    values = {str(i): rng.standard_normal((rows, 1024), np.float32) for i in range(count)}

    def from_callbacks() -> Any:
        return {
            name: gda.GlobalArray.from_callback(
                each.shape, _mesh(), P(), lambda index, each=each: each[index]
            ).array
            for name, each in values.items()
        }

    def make_array() -> Any:
        return {
            name: jax.make_array_from_callback(
                each.shape, _sharding(), lambda index, each=each: each[index]
            )
            for name, each in values.items()
        }

    ways = [
        from_callbacks,
        lambda: gda.load_tree(values, _mesh(), P(), plain=True),
        make_array,
        lambda: jax.device_put(values, _sharding()),
    ]
    bus = _copies((rows * count, 1024), to_device=True)
    return [*[Side(_waits(way), done=delete) for way in ways], bus]


def _to_host(side: int) -> list[Side]:
    """Return the ways to get an array of the device as NumPy's; none may find a copy of before."""
    array = _on_device((side, side))
    fresh = jax.jit(lambda x: x + 0)

    def another() -> tuple[Any]:
        return (jax.block_until_ready(fresh(array)),)

    ways = [gda.to_numpy, np.asarray]
    return [*[Side(way, another) for way in ways], _copies(array.shape, to_device=False)]


def _loading_safetensors(scale: Scale) -> list[Side]:
    from safetensors import flax, numpy

    scratch = Scratch()
    path = scratch.another()
    rng = np.random.default_rng(0)
    shape = scale.side, scale.side
    values = {str(i): rng.standard_normal(shape, np.float32) for i in range(scale.arrays)}
    path.mkdir()
    file = path / "model.safetensors"
    numpy.save_file(values, file)
    ways = [
        lambda: gda.load_tree(gda.storage.open_safetensors(path), _mesh(), P(), plain=True),
        lambda: flax.load_file(file),
        lambda: jax.device_put(numpy.load_file(file), _sharding()),
    ]
    for way in ways:
        assert all(np.array_equal(each, values[name]) for name, each in way().items())
    sides = [Side(_waits(way), scratch.keep, done=delete) for way in ways]
    rows = scale.nbytes // 4 // scale.side
    return [*sides, _copies((rows, scale.side), to_device=True)]


def _fingerprints(side: int, dtype: str) -> list[Side]:
    array = _on_device((side, side), jnp.dtype(dtype))
    bits = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
    read = jax.jit(lambda x: jax.lax.bitcast_convert_type(x, bits).sum(dtype=jnp.uint32))
    return [Side(lambda: gda.fingerprint(array)), Side(_waits(lambda: read(array)))]


@cache
def _pool() -> Pool:
    return Pool(1)


def _pulling(mebibytes: int, *, from_device: bool) -> list[Side]:
    """Pull from a process on CPU to the device, or from the device to a process on CPU."""
    scratch, pool = Scratch(), _pool()
    programs: list[Any] = [_here, partial(_in_pool, pool)]
    holder, puller = programs if from_device else reversed(programs)
    address = holder(two_programs.offer, mebibytes, 1)
    assert puller(two_programs.is_right, address)

    def through_files(path: Path) -> float:
        saved = holder(two_programs.save, str(path), mebibytes, 1)
        return saved + puller(two_programs.restore, str(path))

    return [
        Side(lambda: puller(two_programs.pull, address), times_itself=True),
        Side(through_files, scratch.fresh, times_itself=True),
    ]


def _here(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _in_pool(pool: Pool, function: Callable[..., Any], *arguments: Any) -> Any:
    return pool.run(function, *arguments)[0]


_STEPS = 10  # in one sample
Batch = dict[str, Any]


def _prefetching(rows: int, width: int, products: int) -> list[Side]:
    mesh = mesh_of((1,), ("data",))
    weights = jax.device_put(np.eye(width, dtype=jnp.bfloat16), NamedSharding(mesh, P()))
    batches = [{"x": np.full((rows, width), number, np.float32)} for number in range(2)]

    @jax.jit
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        x = x.astype(jnp.bfloat16)
        for _ in range(products):
            x = x @ w
        return x.sum()

    def loader() -> Iterator[Batch]:
        while True:
            yield from batches

    placed = jax.block_until_ready(jax.device_put(batches, NamedSharding(mesh, P("data"))))

    def alone(loader: Any, mesh: Mesh) -> Iterator[Batch]:
        while True:
            yield from placed

    def side(way: Callable[..., Iterator[Any]]) -> Side:
        def seconds() -> float:
            each = way(loader, mesh)
            jax.block_until_ready(step(weights, jnp.asarray(next(each)["x"])))
            start = time.perf_counter()
            for _ in range(_STEPS):
                jax.block_until_ready(step(weights, jnp.asarray(next(each)["x"])))
            taken = time.perf_counter() - start
            each.close()  # pyright: ignore[reportAttributeAccessIssue]
            return taken

        return Side(seconds, calls=_STEPS, times_itself=True)

    return [side(way) for way in (ours, in_turns, placed_ahead, by_thread, alone)]


# The list of all works.


def works(quick: bool = False) -> list[Work]:
    """Return the works; if ``quick``, with small arrays, only to see that everything runs."""
    large, small = (scale.smaller() if quick else scale for scale in (LARGE, SMALL))
    side = 512 if quick else 16384
    mebibytes = side**2 * 4 // MIB
    rivals: dict[str, None] = dict.fromkeys((ORBAX, ORBAX_V1))
    to_pull = 1 if quick else 256
    return [
        *[
            Work(
                f"build {name} of float32 from memory of the host",
                partial(_building, 64 if quick else rows, 4 if quick else count),
                dict.fromkeys(
                    ["gda.load_tree", "make_array_from_callback", "device_put", TO_DEVICE]
                ),
                ours="from_callback",
                seconds=6,
                nbytes=(64 if quick else rows) * (4 if quick else count) * 4096,
            )
            for name, rows, count in [
                ("one array of 512 MiB", 131072, 1),
                ("1,000 arrays of 64 KiB", 16, 1000),
            ]
        ],
        Work(
            "an array of 256 MiB on the host, as NumPy's",
            partial(_to_host, side // 2),
            dict.fromkeys(["np.asarray", TO_HOST]),
            ours="gda.to_numpy",
            seconds=5,
            nbytes=side**2,
        ),
        Work(
            f"save {large.name}, until it is durable",
            partial(sides_that_save, large, [GDA, ORBAX, ORBAX_V1]),
            {**rivals, **dict.fromkeys(WRITES)},
            seconds=18,
            nbytes=large.nbytes,
        ),
        Work(
            f"save {large.name}, until the caller goes on",
            partial(sides_that_begin, large, [GDA, ORBAX, ORBAX_V1]),
            rivals,
            seconds=14,
            nbytes=large.nbytes,
        ),
        *[
            Work(
                f"restore {scale.name}",
                partial(sides_that_restore, scale, ROWS, [GDA, ORBAX, ORBAX_V1, *more]),
                {**rivals, **dict.fromkeys([*more, READ, CHECKED])},
                seconds=seconds,
                nbytes=scale.nbytes,
            )
            for scale, more, seconds in [(large, [SAFETENSORS], 14), (small, [], 8)]
        ],
        Work(
            f"load a safetensors file of {large.name}",
            partial(_loading_safetensors, large),
            dict.fromkeys(["safetensors.flax", "safetensors.numpy and device_put", TO_DEVICE]),
            ours="gda.load_tree",
            seconds=10,
            nbytes=large.nbytes,
            needs="flax",
        ),
        *[
            Work(
                f"fingerprint of {mebibytes * width // 4:,} MiB of {dtype}",
                partial(_fingerprints, side, dtype),
                {MEMORY_READ: None},
                seconds=3,
                nbytes=side**2 * width,
            )
            for dtype, width in [("float32", 4), ("bfloat16", 2)]
        ],
        *[
            Work(
                f"pull {to_pull} MiB of float32 {direction}",
                partial(_pulling, to_pull, from_device=from_device),
                {"checkpoint.save and restore": None},
                ours="gda.pull",
                seconds=6,
                nbytes=to_pull * MIB,
            )
            for direction, from_device in [
                ("from a process on CPU to the device", False),
                ("from the device to a process on CPU", True),
            ]
        ],
        *[
            Work(
                f"a jitted call with {name} as input",
                partial(jitted, inputs),
                {"a jitted call with jax.Arrays": None},
                seconds=3,
            )
            for name, inputs in [("one GlobalArray", 1), ("100 GlobalArrays", 100)]
        ],
        Work(
            "gda.jit: GlobalArray in and out",
            partial(jitted, 1, gda.jit),
            {"jax.jit: jax.Array in and out": None},
            seconds=3,
        ),
        Work(
            "a step with a batch of 64 MiB from memory of the host",
            partial(_prefetching, *((64, 64, 2) if quick else (8192, 2048, 250))),
            dict.fromkeys(
                [
                    "the same loop without prefetch",
                    "two batches placed ahead without a thread, as flax does",
                    "a thread and a queue of two batches",
                    "the step alone",
                ]
            ),
            ours="prefetch",
            seconds=8,
        ),
    ]
