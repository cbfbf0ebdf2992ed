"""The ways to save a tree of arrays: gda, Orbax, JAX's own, TensorStore, and plain files.

Each saves a tree into a folder that is not there yet, returns when that is durable, and restores it
as shapes, types and shardings say. What can be set up once, such as a checkpointer, is set up once.
"""

from __future__ import annotations

import asyncio
import atexit
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from gda import checkpoint

Tree = dict[str, jax.Array]
Like = dict[str, jax.ShapeDtypeStruct]
Block = np.ndarray[Any, Any]


def gda_save(path: Path, tree: Tree) -> None:
    checkpoint.save(path, tree)


def gda_restore(path: Path, like: Like) -> Any:
    return checkpoint.restore(path, like=like)


@cache
def _orbax() -> Any:
    import orbax.checkpoint as ocp

    checkpointer = ocp.StandardCheckpointer()
    atexit.register(checkpointer.close)
    return checkpointer


def orbax_save(path: Path, tree: Tree) -> None:
    _orbax().save(path, tree)
    _orbax().wait_until_finished()


def orbax_restore(path: Path, like: Like) -> Any:
    return _orbax().restore(path, like)


@cache
def _orbax_uncompressed() -> Any:
    import orbax.checkpoint as ocp

    # The standard handler, which `StandardCheckpointer` has, does not offer this option.
    checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
    atexit.register(checkpointer.close)
    return checkpointer


def orbax_uncompressed_save(path: Path, tree: Tree) -> None:
    import orbax.checkpoint as ocp

    _orbax_uncompressed().save(path, args=ocp.args.PyTreeSave(tree))
    _orbax_uncompressed().wait_until_finished()


def orbax_uncompressed_restore(path: Path, like: Like) -> Any:
    import orbax.checkpoint as ocp

    restore_args = ocp.checkpoint_utils.construct_restore_args(like)
    return _orbax_uncompressed().restore(
        path, args=ocp.args.PyTreeRestore(like, restore_args=restore_args)
    )


def jax_save(path: Path, tree: Tree) -> None:
    from jax.experimental.array_serialization import pytree_serialization

    pytree_serialization.save(tree, path)


def jax_restore(path: Path, like: Like) -> Any:
    from jax.experimental.array_serialization import pytree_serialization

    shardings = {name: array.sharding for name, array in like.items()}
    return pytree_serialization.load(path, shardings=shardings)


def tensorstore_save(path: Path, tree: Tree) -> None:
    asyncio.run(_tensorstore_write(path, tree))
    _wait_for_the_others()


async def _tensorstore_write(path: Path, tree: Tree) -> None:
    import tensorstore as ts

    async def write(name: str, array: jax.Array) -> None:
        shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
        if not shards:
            return  # another process has them
        store = await ts.open(
            {
                **_tensorstore_spec(path, name),
                "metadata": {
                    "shape": array.shape,
                    "data_type": str(array.dtype),
                    "chunk_grid": {
                        "name": "regular",
                        "configuration": {"chunk_shape": shards[0].data.shape},
                    },
                    "codecs": [
                        {"name": "bytes", "configuration": {"endian": "little"}},
                        {"name": "crc32c"},
                    ],
                },
            },
            create=True,
            open=True,
        )
        await asyncio.gather(
            *[
                store[shard.index].write(
                    np.asarray(shard.data), can_reference_source_data_indefinitely=True
                )
                for shard in shards
            ]
        )

    await asyncio.gather(*[write(name, array) for name, array in tree.items()])


def tensorstore_restore(path: Path, like: Like) -> Tree:
    return asyncio.run(_tensorstore_read(path, like))


async def _tensorstore_read(path: Path, like: Like) -> Tree:
    import tensorstore as ts

    async def read(name: str, array: jax.ShapeDtypeStruct) -> jax.Array:
        store = await ts.open(_tensorstore_spec(path, name), open=True)
        indices = array.sharding.addressable_devices_indices_map(array.shape).values()
        distinct = {_key(index): index for index in indices if index is not None}
        blocks = await asyncio.gather(*[store[index].read() for index in distinct.values()])
        by_key = dict(zip(distinct, blocks, strict=True))
        return jax.make_array_from_callback(
            array.shape, array.sharding, lambda index: by_key[_key(index)]
        )

    arrays = await asyncio.gather(*[read(name, array) for name, array in like.items()])
    return dict(zip(like, arrays, strict=True))


def _tensorstore_spec(path: Path, name: str) -> dict[str, Any]:
    return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/{name}"}}


def raw_save(path: Path, tree: Tree) -> None:
    path.mkdir(exist_ok=True)
    for name, array in tree.items():
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                with open(path / f"{name}.{_key(shard.index)[0][0] or 0:09}", "wb") as file:
                    file.write(np.asarray(shard.data).data)
                    os.fsync(file.fileno())
    fsync(path)
    _wait_for_the_others()


def raw_restore(path: Path, like: Like) -> Tree:
    files: dict[str, list[Path]] = {}
    for file in sorted(path.iterdir()):
        files.setdefault(file.name.partition(".")[0], []).append(file)
    return {
        name: jax.make_array_from_callback(
            array.shape, array.sharding, partial(_raw_block, files[name], array.shape)
        )
        for name, array in like.items()
    }


def _raw_block(files: Sequence[Path], shape: tuple[int, ...], index: Any) -> Block:
    rows, columns = index
    height = shape[0] // len(files)
    if columns == slice(None) and rows != slice(None):
        return np.fromfile(files[(rows.start or 0) // height], np.float32).reshape(height, -1)
    if len(files) == 1:
        return np.fromfile(files[0], np.float32).reshape(shape)
    maps = [np.memmap(file, np.float32, "r", shape=(height, shape[1])) for file in files]
    return np.concatenate([part[:, columns] for part in maps])


@dataclass(frozen=True)
class Way:
    save: Callable[[Path, Tree], None]
    restore: Callable[[Path, Like], Any]


GDA, ORBAX, RAW = "gda", "Orbax's default", "raw files with fsync, numpy.fromfile"
WAYS = {
    GDA: Way(gda_save, gda_restore),
    ORBAX: Way(orbax_save, orbax_restore),
    "Orbax without compression": Way(orbax_uncompressed_save, orbax_uncompressed_restore),
    "JAX's pytree_serialization": Way(jax_save, jax_restore),
    "TensorStore, zarr v3 with CRC-32C": Way(tensorstore_save, tensorstore_restore),
    RAW: Way(raw_save, raw_restore),
}
# The others write a file for every block, and 8,000 times fsync would take most of the time.
FOR_MANY = tuple(WAYS)[:4]


# Saves that go on behind the caller: each begins one and returns what waits until it is durable.


def gda_begin(path: Path, tree: Tree) -> Callable[[], object]:
    return checkpoint.save_async(path, tree).result


def copy_to_host(path: Path, tree: Tree) -> Callable[[], object]:
    """Copy every block, and save nothing."""
    copies = [np.array(s.data) for array in tree.values() for s in array.addressable_shards]
    return copies.clear


def orbax_begin(path: Path, tree: Tree) -> Callable[[], object]:
    _orbax().save(path, tree)
    return _orbax().wait_until_finished


def jax_begin(path: Path, tree: Tree) -> Callable[[], object]:
    from jax.experimental.array_serialization import pytree_serialization

    return pytree_serialization.nonblocking_save(tree, path).result


COPY = "one copy of the blocks to the host"
BEGIN = {
    GDA: gda_begin,
    COPY: copy_to_host,
    ORBAX: orbax_begin,
    "JAX's pytree_serialization": jax_begin,
}


def _key(index: Any) -> tuple[tuple[Any, Any], ...]:
    return tuple((part.start, part.stop) for part in index)


def fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _wait_for_the_others() -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("durable")
