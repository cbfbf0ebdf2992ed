"""Building arrays: callbacks, files, and JAX's recipes for placing blocks.

The alignment of every block is chosen, because it decides: JAX's CPU backend takes memory that
begins at a multiple of 64 bytes as the device's own, and copies any other. Waiting until the data
is there is part of the work, for JAX may copy after its call has returned; freeing it is not.
Memory is memory that the process has used before: fresh from the operating system it costs ten
times as much as reading a file into it, and who gets it would be luck.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gda
from benchmarks.layout.index_math import mesh_of
from benchmarks.pairs import Side
from benchmarks.work import AtMost, Faster, Floor, Work

P = PartitionSpec
Block = np.ndarray[Any, Any]
Recipe = Callable[..., jax.Array]

KIB, MIB = 1024, 1024 * 1024
_MESH_SIZES = {8: (4, 2), 64: (8, 8)}
_MEMORY = {True: "aligned", False: "not aligned"}


def _empty(shape: tuple[int, ...], aligned: bool, refused: list[Block] | None = None) -> Block:
    """Return new memory that begins at a multiple of 64 bytes, or surely does not.

    Memory that is not aligned is NumPy's own, as a callback would make it.

    Args:
      shape: of float32 values.
      aligned: which of the two.
      refused: keeps what was tried in vain, or NumPy would offer it again.
    """
    if aligned:
        return gda.aligned_empty(shape, np.float32)
    refused = [] if refused is None else refused
    for _ in range(1000):
        block = np.empty(shape, np.float32)
        if block.ctypes.data % 64:
            return block
        refused.append(block)
    raise RuntimeError("NumPy gives nothing but aligned memory here")


@cache
def _keep_freed_memory() -> None:
    # glibc gives freed blocks back to the operating system from a size on that grows with what was
    # freed, up to 32 MiB.
    np.empty(31 * MIB, np.uint8)


@cache
def _files(count: int, nbytes: int) -> list[Path]:
    """Return files of float32 values; just written, so in the page cache."""
    folder = Path(tempfile.mkdtemp(prefix="gda-benchmark-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    paths = [folder / f"{i}.bin" for i in range(count)]
    for i, path in enumerate(paths):
        (np.arange(nbytes // 4, dtype=np.float32) + i).tofile(path)
    return paths


def _read_into(path: Path, out: Block) -> None:
    with open(path, "rb", buffering=0) as file:
        file.readinto(out.data)


def _built(
    shape: tuple[int, ...],
    mesh: Mesh,
    spec: PartitionSpec,
    our_callback: Callable[..., Any],
    *rival_callbacks: Callable[..., Any],
    fresh: Callable[[], tuple[Any, ...]] = tuple,
    **options: Any,
) -> list[Side]:
    """Return the sides that build an array; the callbacks get what ``fresh`` made first."""
    sharding = NamedSharding(mesh, spec)
    _keep_freed_memory()

    def ours(*arguments: Any) -> gda.GlobalArray:
        callback = partial(our_callback, *arguments) if arguments else our_callback
        built = gda.GlobalArray.from_callback(shape, mesh, spec, callback, **options)
        return built.block_until_ready()

    def rival(rival_callback: Callable[..., Any], *arguments: Any) -> jax.Array:
        callback = partial(rival_callback, *arguments) if arguments else rival_callback
        built = jax.make_array_from_callback(shape, sharding, callback)
        return built.block_until_ready()

    rivals = [partial(rival, callback) for callback in rival_callbacks]
    expected = np.asarray(ours(*fresh()))
    assert all(np.array_equal(np.asarray(each(*fresh())), expected) for each in rivals)
    return [Side(each, fresh, done=_delete) for each in (ours, *rivals)]


def _delete(array: jax.Array | gda.GlobalArray) -> None:
    array.delete()
    # JAX lets go of NumPy memory only in the next call to it, and that would be a timed one.
    jax.device_put(np.float32(0)).block_until_ready()


def _own_blocks(devices: int, nbytes: int, aligned: bool, filled_before: bool) -> list[Side]:
    sizes = _MESH_SIZES[devices]
    shard_shape = (nbytes // 4 // 128, 128)
    shape = (shard_shape[0] * sizes[0], shard_shape[1] * sizes[1])
    source = np.arange(nbytes // 4, dtype=np.float32).reshape(shard_shape)

    def fresh() -> tuple[Any, ...]:
        blocks, refused = [], []
        for _ in range(devices):
            block = _empty(shard_shape, aligned, refused)
            np.copyto(block, source)
            blocks.append(block)
        return (blocks,)

    # Popped, so that nobody holds the block but the one that it is returned to.
    def pop(blocks: list[Block], index: Any) -> Block:
        return blocks.pop()

    def pop_and_fill(blocks: list[Block], index: Any) -> Block:
        block = blocks.pop()
        np.copyto(block, source)
        return block

    callback = pop if filled_before else pop_and_fill
    return _built(shape, mesh_of(sizes), P("x", "y"), callback, callback, fresh=fresh)


def _keeping(
    callback: Callable[[Any], Block],
) -> tuple[Callable[[Any], Block], Callable[[], tuple[()]]]:
    """Return the callback with a dictionary of the blocks that it read, and what empties that."""
    known: dict[int, Block] = {}

    def kept(index: Any) -> Block:
        start = index[0].start or 0
        if start not in known:
            known[start] = callback(index)
        return known[start]

    def forget() -> tuple[()]:
        known.clear()
        return ()

    return kept, forget


def _replicas_from_files(blocks: int, aligned: bool) -> list[Side]:
    paths = _files(blocks, MIB)
    shape = (blocks, MIB // 4)

    def callback(index: Any) -> Block:
        block = _empty((1, shape[1]), aligned)
        _read_into(paths[index[0].start], block)
        return block

    mesh, (kept, forget) = mesh_of((blocks, 4), ("data", "model")), _keeping(callback)
    return _built(shape, mesh, P("data"), callback, callback, kept, fresh=forget)


def _into(sizes: tuple[int, int]) -> list[Side]:
    nbytes, rows = 8 * MIB, 2048
    paths = _files(sizes[0], nbytes)
    shard_shape = (rows, nbytes // 4 // rows)
    shape = (rows * len(paths), shard_shape[1])

    def path_of(index: Any) -> Path:
        return paths[(index[0].start or 0) // rows]

    def fill(index: Any, out: Block) -> None:
        _read_into(path_of(index), out)

    def read_not_aligned(index: Any) -> Block:
        block = _empty(shard_shape, aligned=False)
        _read_into(path_of(index), block)
        return block

    def read(index: Any) -> Block:
        return np.fromfile(path_of(index), np.float32).reshape(shard_shape)

    mesh, (kept, forget) = mesh_of(sizes), _keeping(read)
    callbacks = (fill, read_not_aligned, read, kept)
    options = {"into": True, "dtype": np.float32}
    return _built(shape, mesh, P("x"), *callbacks, fresh=forget, **options)


# JAX's recipes for placing blocks that were read before, from aligned memory.


def _by_callback(shape: Any, sharding: Any, blocks: list[Block], devices: Any) -> jax.Array:
    remaining: Iterator[Block] = iter(blocks)
    return jax.make_array_from_callback(shape, sharding, lambda _: next(remaining))


def _by_lists(shape: Any, sharding: Any, blocks: list[Block], devices: list[Any]) -> jax.Array:
    buffers: Any = jax.device_put(blocks, devices)
    return jax.make_array_from_single_device_arrays(shape, sharding, buffers)


def _by_loop(shape: Any, sharding: Any, blocks: list[Block], devices: list[Any]) -> jax.Array:
    buffers = [jax.device_put(b, device) for b, device in zip(blocks, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(shape, sharding, buffers)


def _by_sharding(shape: Any, sharding: Any, blocks: list[Block], devices: Any) -> jax.Array:
    return jax.device_put(blocks[0], sharding)


def _by_replicating(shape: Any, sharding: Any, blocks: list[Block], devices: Any) -> jax.Array:
    return jax.device_put(jax.device_put(blocks[0], devices[0]), sharding)


def _by_nested_callback(shape: Any, sharding: Any, blocks: list[Block], devices: Any) -> jax.Array:
    remaining: Iterator[Block] = iter(blocks)

    def callback(index: Any) -> Block:
        return next(remaining)

    return jax.make_array_from_callback(shape, sharding, lambda index: callback(index))


def _recipes(devices: int, nbytes: int, spec: PartitionSpec, recipes: list[Recipe]) -> list[Side]:
    mesh = mesh_of((devices,), ("x",))
    sharding = NamedSharding(mesh, spec)
    shard_shape = (1, nbytes // 4)
    block = gda.aligned_empty(shard_shape, np.float32)
    block[...] = np.arange(nbytes // 4)
    if sharding.is_fully_replicated:
        shape, blocks = shard_shape, [block] * devices
    else:
        shape, blocks = (devices, shard_shape[1]), []
        for _ in range(devices):
            blocks.append(gda.aligned_empty(shard_shape, np.float32))
            blocks[-1][...] = block

    def side(recipe: Recipe) -> Side:
        def run() -> jax.Array:
            placed = recipe(shape, sharding, blocks, list(mesh.devices.flat))
            return placed.block_until_ready()

        return Side(run, done=_delete)

    sides = [side(recipe) for recipe in (_by_callback, *recipes)]
    first, *others = [np.asarray(each.run()) for each in sides]
    assert all(np.array_equal(first, other) for other in others)
    return sides


def _size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


_CALLBACK = "make_array_from_callback"
_KEPT = f"{_CALLBACK}, same callback, which keeps each block in a dictionary"
_RECIPES: dict[str, Recipe] = {
    "device_put of lists": _by_lists,
    "device_put in a loop": _by_loop,
    # At least this any function costs that looks at blocks on their way to JAX.
    f"{_CALLBACK}, one call more around the callback": _by_nested_callback,
}
_REPLICATING: dict[str, Recipe] = {
    "device_put with the sharding": _by_sharding,
    "device_put on one device, then with the sharding": _by_replicating,
}

WORKS = [
    *[
        Work(
            f"from_callback, a fresh {_size(nbytes)} block per device, {_MEMORY[aligned]}, "
            f"{devices} devices{', all filled before' if filled_before else ''}",
            partial(_own_blocks, devices, nbytes, aligned, filled_before),
            {
                f"{_CALLBACK}, same callback, sharding made before": (
                    # A callback that does nothing shows what gda's looking at blocks costs.
                    None if filled_before else AtMost(1.05)
                )
            },
            devices=devices,
            seconds=2,
        )
        for filled_before in [False, True]
        for devices in _MESH_SIZES
        for nbytes in ([64 * KIB] if filled_before else [64 * KIB, MIB])
        for aligned in ([True] if filled_before else [True, False])
    ],
    *[
        Work(
            f"from_callback, 4 replicas of each of {blocks} blocks, callback reads 1 MiB from a "
            f"file into memory that is {_MEMORY[aligned]}",
            partial(_replicas_from_files, blocks, aligned),
            {f"{_CALLBACK}, same callback": Faster(3), _KEPT: None},
            devices=4 * blocks,
            floor=(
                Floor("The blocks must be read, and JAX must place each replica.")
                if aligned
                else None
            ),
            seconds=2,
        )
        for blocks in [2, 16]
        for aligned in [True, False]
    ],
    *[
        Work(
            f"into=True, 8 MiB blocks from files, {name}",
            partial(_into, sizes),
            {
                f"{_CALLBACK}, callback reads with readinto memory that is not aligned": target,
                f"{_CALLBACK}, callback reads with numpy.fromfile, aligned by chance": None,
                f"{_CALLBACK}, the same, which keeps each block in a dictionary": None,
            },
            devices=8 if prod(sizes) == 8 else 64,
            seconds=2,
        )
        for name, sizes, target in [
            ("8 own blocks", (8, 1), Faster(1.5)),
            ("2 blocks with 8 replicas each", (2, 8), Faster(10)),
            # Only here JAX, too, reads once.
            ("1 block on all of 8 devices", (1, 8), None),
        ]
    ],
    # For information: why gda.arrays.construction.placing places blocks as it does.
    *[
        Work(
            f"place {devices} aligned blocks of {_size(4 * KIB)} on {devices} devices",
            partial(_recipes, devices, 4 * KIB, P("x"), list(_RECIPES.values())),
            dict.fromkeys(_RECIPES),
            ours=_CALLBACK,
            devices=devices,
        )
        for devices in [8, 64]
    ],
    Work(
        "replicate an aligned block of 1 MiB over 8 devices",
        partial(_recipes, 8, MIB, P(), list(_REPLICATING.values())),
        dict.fromkeys(_REPLICATING),
        ours=_CALLBACK,
    ),
]
