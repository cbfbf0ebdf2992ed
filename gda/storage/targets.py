"""The targets of ``gda.store``, and their properties, found before anything is written.

A target is anything with ``shape``, ``dtype`` and NumPy's slice assignment, or a TensorStore. Only
the library of the target is imported here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from gda.layout.spec import Shape
from gda.storage.casts import holds
from gda.storage.sources import TensorStoreFacts, check_unmasked, chunks_of, is_a, is_future


class Target(NamedTuple):
    """The properties of a target."""

    handle: Any  # the object to write to; its indices count from 0
    shape: Shape
    dtype: np.dtype[Any]
    chunks: Shape | None = None  # each is written as a whole; None if elements are written singly
    origin: Shape = ()  # an element at which a chunk begins; it may be outside
    is_asynchronous: bool = False  # a TensorStore
    allows_threads: bool = False  # several of one process may write into one chunk at a time
    allows_processes: bool = True  # several may write to the target


def target_of(target: Any) -> Target:
    """Return the properties of a target; ``TypeError`` or ``ValueError`` if it takes no data."""
    if is_a(target, "tensorstore", "TensorStore"):
        return _of_tensorstore(target)
    if is_a(target, "h5py", "Dataset"):
        return _of_h5py(target)
    if isinstance(target, jax.Array):
        raise TypeError("the target is a jax.Array, which is immutable; pass a NumPy array")
    if isinstance(target, np.ndarray):
        check_unmasked(target)
        _check_writeable(target)
        return Target(target, target.shape, target.dtype)
    if getattr(target, "read_only", False):
        raise ValueError(
            f"the target, a {type(target).__name__}, is read-only; open it with a mode that allows "
            "writing, such as 'r+'"
        )
    return _of_anything(target)


def _of_anything(target: Any) -> Target:
    try:
        shape, dtype = tuple(map(int, target.shape)), np.dtype(target.dtype)
    except (AttributeError, TypeError):
        shape, dtype = None, None
    if shape is None or dtype is None or not hasattr(target, "__setitem__"):
        raise TypeError(f"a {type(target).__name__} is not a target; {_instead_of(target)}")
    # With chunks packed into shards, Zarr reads, changes and writes a whole shard.
    for name in ("shards", "chunks"):
        if (chunks := chunks_of(target, name)) is not None:
            return Target(target, shape, dtype, chunks, (0,) * len(shape))
    return Target(target, shape, dtype)


def _instead_of(target: Any) -> str:
    if is_future(target):
        return "call .result() on it, and pass the open TensorStore that it returns"
    return (
        "a target has shape, dtype and slice assignment, such as a numpy.memmap, a zarr.Array or "
        "an h5py.Dataset, or is an open TensorStore"
    )


def _of_h5py(target: Any) -> Target:
    if not target:
        raise ValueError("the target is a dataset of an HDF5 file that was closed; open it again")
    file = target.file
    if file.mode == "r":
        raise ValueError(
            f"the target is read-only: its file {file.filename} is open with mode 'r'; open it "
            "with 'r+'"
        )
    # h5py holds one lock around every call of HDF5. Without MPI, HDF5 lets one process write.
    return _of_anything(target)._replace(
        allows_threads=True, allows_processes=file.driver == "mpio"
    )


def _check_writeable(target: np.ndarray[Any, Any]) -> None:
    mode = getattr(target, "mode", None)
    if not target.flags.writeable:
        advice = "map the file with mode 'r+'" if mode else "pass one that is writeable"
        raise ValueError(f"the target, a {type(target).__name__}, is read-only; {advice}")
    if mode == "c":
        raise ValueError(
            "the target is a memory map of mode 'c', which does not write to the file; map the "
            "file with mode 'r+'"
        )


def _of_tensorstore(target: Any) -> Target:
    if not target.writable:
        raise ValueError("the target, a TensorStore, is read-only; open it with write=True")
    handle, shape, dtype, _, chunks, origin = TensorStoreFacts.of(target)
    return Target(handle, shape, dtype, chunks, origin, is_asynchronous=True, allows_threads=True)


def check_fit(target: Target, shape: Shape, dtype: np.dtype[Any]) -> None:
    """Raise ``ValueError`` unless the target has this shape and holds every value of the dtype."""
    if target.shape != shape:
        raise ValueError(
            f"the array has shape {shape}, and the target {target.shape}; make them the same"
        )
    if not holds(target.dtype, dtype):
        raise ValueError(
            f"the array has dtype {dtype}, and the target {target.dtype}, which cannot hold all of "
            "its values; make a target of a dtype that holds them, such as float32 in a library "
            "without bfloat16, or store array.astype(target_dtype)"
        )
