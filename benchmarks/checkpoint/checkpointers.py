"""The ways to save a tree of arrays: gda, Orbax, JAX's own, TensorStore, PyTorch, plain files.

Each saves a tree into a folder that is not there yet, returns when that is durable, and restores it
as shapes, types and shardings say. What can be set up once, such as a checkpointer, is set up once.
"""

from __future__ import annotations

import asyncio
import atexit
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gda import aligned_empty, checkpoint, load_tree, storage

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

    checkpointer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
    atexit.register(checkpointer.close)
    return checkpointer


def orbax_begin(path: Path, tree: Tree) -> Callable[[], object]:
    import orbax.checkpoint as ocp

    _orbax().save(path, args=ocp.args.StandardSave(tree))
    return _orbax().wait_until_finished


def orbax_save(path: Path, tree: Tree) -> None:
    orbax_begin(path, tree)()


def orbax_restore(path: Path, like: Like) -> Any:
    import orbax.checkpoint as ocp

    return _orbax().restore(path, args=ocp.args.StandardRestore(like))


def opened_orbax(path: Path, like: Like) -> Any:
    shardings = {name: each.sharding for name, each in like.items()}
    return load_tree(storage.open_orbax(path), shardings, plain=True)


def _orbax_v1(**options: bool) -> tuple[Any, Any]:
    """Return the module, which has another name in older versions, and a context."""
    try:
        from orbax.checkpoint import v1  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:
        from orbax.checkpoint.experimental import v1
    context = v1.Context()
    for name, value in options.items():
        setattr(context.array.saving, name, value)
    return v1, context


def orbax_v1_save(path: Path, tree: Tree, **options: bool) -> None:
    v1, context = _orbax_v1(**options)
    with context:
        v1.save(path, tree)


def orbax_v1_begin(path: Path, tree: Tree) -> Callable[[], object]:
    v1, context = _orbax_v1()
    with context:
        return v1.save_async(path, tree).result


def orbax_v1_restore(path: Path, like: Like, **options: bool) -> Any:
    v1, context = _orbax_v1(**options)
    with context:
        return v1.load(path, like)


def jax_save(path: Path, tree: Tree) -> None:
    from jax.experimental.array_serialization import pytree_serialization

    pytree_serialization.save(tree, path)


def jax_restore(path: Path, like: Like) -> Any:
    from jax.experimental.array_serialization import pytree_serialization

    shardings = {name: array.sharding for name, array in like.items()}
    return pytree_serialization.load(path, shardings=shardings)


def tensorstore_save(path: Path, tree: Tree) -> None:
    asyncio.run(_tensorstore_write(path, tree))


async def _tensorstore_write(path: Path, tree: Tree) -> None:
    import tensorstore as ts

    async def write(name: str, array: jax.Array) -> None:
        shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
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


def safetensors_save(path: Path, tree: Tree) -> None:
    from safetensors.numpy import save_file

    path.mkdir()
    save_file({name: _gathered(array) for name, array in tree.items()}, path / "model")
    fsync(path / "model")
    fsync(path)


def safetensors_restore(path: Path, like: Like) -> Tree:
    from safetensors import safe_open

    with safe_open(path / "model", framework="numpy") as file:
        return {name: _by_slices(file.get_slice(name), each) for name, each in like.items()}


def memmap_save(path: Path, tree: Tree) -> None:
    path.mkdir()
    for name, array in tree.items():
        np.save(path / f"{name}.npy", _gathered(array))
        fsync(path / f"{name}.npy")
    fsync(path)


def memmap_restore(path: Path, like: Like) -> Tree:
    return {
        name: _by_slices(np.load(path / f"{name}.npy", mmap_mode="r"), each)
        for name, each in like.items()
    }


def savez_save(path: Path, tree: Tree) -> None:
    path.mkdir()
    arrays: dict[str, Any] = {name: _gathered(array) for name, array in tree.items()}
    np.savez(path / "model.npz", **arrays)
    fsync(path / "model.npz")
    fsync(path)


def savez_restore(path: Path, like: Like) -> Tree:
    with np.load(path / "model.npz") as file:
        return {name: jax.device_put(file[name], each.sharding) for name, each in like.items()}


def _gathered(array: jax.Array) -> Block:
    # Not np.asarray, whose result an array keeps: only the first save would have to make it.
    whole = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        whole[shard.index] = shard.data
    return whole


def _by_slices(source: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    # Copied, or the array would be the mapped file, which nothing has read yet.
    return jax.make_array_from_callback(
        like.shape, like.sharding, lambda index: np.array(source[index])
    )


# Plain ways to move the bytes, by as many threads as there are cores.


def _by_threads(
    function: Callable[[Any], Any], values: Iterable[Any], threads: int | None = os.cpu_count()
) -> list[Any]:
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, values))


def write(
    path: Path, blocks: Sequence[Block], threads: int | None = os.cpu_count(), flags: int = 0
) -> None:
    """Write every block into a file of its own, durably."""

    def one(number: int) -> None:
        flags_of = os.O_WRONLY | os.O_CREAT | flags
        with open(os.open(path / f"{number:06}", flags_of, 0o644), "wb", buffering=0) as file:
            rest = memoryview(blocks[number].data).cast("B")
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())

    path.mkdir(exist_ok=True)
    _by_threads(one, range(len(blocks)), threads)
    fsync(path)


def write_directly(path: Path, blocks: Sequence[Block]) -> None:
    """Write as ``write``, but past the page cache, where the file system can.

    The memory of the blocks must be ``page_aligned``.
    """
    try:
        write(path, blocks, flags=os.O_DIRECT)
    except OSError:
        write(path, blocks)


def page_aligned(block: Block) -> Block:
    """Return the bytes of a block in whole pages of memory."""
    pages = np.frombuffer(mmap.mmap(-1, -(-block.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE), "u1")
    pages[: block.nbytes] = block.reshape(-1).view(np.uint8)
    return pages


def read(path: Path) -> None:
    """Read every file of a folder, and of those in it, into fresh memory."""

    def one(file: Path) -> Block:
        block = np.empty(file.stat().st_size, np.uint8)
        rest = memoryview(block.data)
        with open(file, "rb", buffering=0) as source:
            while rest:
                rest = rest[source.readinto(rest) :]
        return block

    _by_threads(one, _files(path))


def read_checked(path: Path) -> None:
    """Read every file into fresh aligned memory, with the CRC-32C of each MiB as it comes."""
    from fastcrc import crc32

    def one(file: Path) -> Block:
        block = aligned_empty(file.stat().st_size, np.uint8)
        rest, crc = memoryview(block.data), 0
        with open(file, "rb", buffering=0) as source:
            while rest:
                count = source.readinto(rest[: 1 << 20])
                crc, rest = crc32.iscsi(rest[:count], crc), rest[count:]
        return block

    _by_threads(one, _files(path))


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


# PyTorch, with whole tensors in one process.


def torch_save(path: Path, tree: Any) -> None:
    dcp: Any = import_module("torch.distributed.checkpoint")
    dcp.save(tree, checkpoint_id=path, no_dist=True)


def torch_restore(path: Path, like: Any) -> Any:
    torch: Any = import_module("torch")
    dcp: Any = import_module("torch.distributed.checkpoint")
    tensors = {name: torch.empty(each.shape) for name, each in like.items()}
    dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def torch_tree(tree: Tree) -> Any:
    torch: Any = import_module("torch")
    return {name: torch.from_numpy(np.array(array)) for name, array in tree.items()}


@dataclass(frozen=True)
class Way:
    """A way to save and restore.

    Attributes:
      own: makes of a tree the one that is saved, before the timing.
    """

    save: Callable[[Path, Any], None]
    restore: Callable[[Path, Like], Any]
    own: Callable[[Tree], Any] = lambda tree: tree


GDA, ORBAX, ORBAX_V1 = "gda", "Orbax", "Orbax v1"
OPENED = "gda, of a run that Orbax saved"
UNCOMPRESSED = f"{ORBAX_V1}, no OCDBT, not compressed"
TENSORSTORE = "TensorStore, zarr v3"  # with CRC-32C
JAX, TORCH = "JAX pytree_serialization", "PyTorch DCP"
SAFETENSORS, MEMMAP = "safetensors", "NumPy, memory-mapped"
SAVEZ = "numpy.savez"
_PLAIN = {"use_ocdbt": False, "use_compression": False}
WAYS = {
    GDA: Way(gda_save, gda_restore),
    ORBAX: Way(orbax_save, orbax_restore),
    OPENED: Way(orbax_save, opened_orbax),
    ORBAX_V1: Way(orbax_v1_save, orbax_v1_restore),
    UNCOMPRESSED: Way(partial(orbax_v1_save, **_PLAIN), partial(orbax_v1_restore, **_PLAIN)),
    JAX: Way(jax_save, jax_restore),
    TENSORSTORE: Way(tensorstore_save, tensorstore_restore),
    SAFETENSORS: Way(safetensors_save, safetensors_restore),
    MEMMAP: Way(memmap_save, memmap_restore),
    SAVEZ: Way(savez_save, savez_restore),
}
if find_spec("torch"):
    WAYS[TORCH] = Way(torch_save, torch_restore, torch_tree)

# Saves that go on behind the caller: each begins one and returns what waits until it is durable.


def gda_begin(path: Path, tree: Tree) -> Callable[[], object]:
    return checkpoint.save_async(path, tree).result


def copy_to_host(path: Path, tree: Tree) -> Callable[[], object]:
    """Copy every block, and save nothing."""
    copies = [np.array(s.data) for array in tree.values() for s in array.addressable_shards]
    return copies.clear


def jax_begin(path: Path, tree: Tree) -> Callable[[], object]:
    from jax.experimental.array_serialization import pytree_serialization

    return pytree_serialization.nonblocking_save(tree, path).result


COPY = "one copy of the blocks to the host"
BEGIN = {
    GDA: gda_begin,
    COPY: copy_to_host,
    ORBAX: orbax_begin,
    ORBAX_V1: orbax_v1_begin,
    JAX: jax_begin,
}


def _key(index: Any) -> tuple[tuple[Any, Any], ...]:
    return tuple((part.start, part.stop) for part in index)


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
