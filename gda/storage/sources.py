"""Sources: objects with a shape, a dtype and slices, read one block at a time.

Every library has its own way to read into existing memory, and its own gaps: some refuse
``slice(None)``, some have dtypes that NumPy does not know. This module does not know the use of a
block.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import jax
import numpy as np
from jax.errors import UnexpectedTracerError

from gda.layout.cover import move_of
from gda.layout.dtype_names import dtype_named, is_raw, native
from gda.layout.indices import bounded, sizes_of, start_of
from gda.layout.spec import Index, Shape, check_reduced
from gda.layout.text import format_index, format_processes
from gda.mesh import is_tracer, memory_kind_of, own_settings

if TYPE_CHECKING:
    from gda.storage.tasks import Future

_Memory = np.ndarray[Any, Any]

WHAT_IT_IS = (
    "a source has shape, dtype and NumPy-style slicing, such as numpy.load(path, mmap_mode='r'), a "
    "zarr.Array, an h5py.Dataset, a TensorStore or a value of gda.storage.open_safetensors"
)

# By their names in safetensors files, in the order in which the safetensors package ranks them.
SAFETENSORS_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(dtype_named(name))
    for name in (
        *("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
        *("I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64"),
    )
}


class Source(Protocol):
    """An object whose blocks can be read."""

    shape: Shape
    dtype: np.dtype[Any]  # of its blocks, except for the byte order
    chunks: Shape | None  # that it reads as a whole; None if it reads single elements
    read_bytes: int = 8 * 2**20  # to read at a time for several blocks
    buffer_bytes: int = 0  # of memory that a read needs beside the block
    is_local: bool = False  # a file of this machine, which any number of threads may read
    is_in_memory: bool = False  # an array, which needs no read

    def read(self, index: Index, empty: Callable[[np.dtype[Any]], _Memory]) -> Any:
        """Return the block at ``index``; ``empty`` gives a buffer for it."""
        ...

    @property
    def workers(self) -> int:
        """Threads that read at a time by default."""
        # They copy memory: more than there are cores would only wait.
        return min(os.cpu_count() or 1, 32) if self.is_local else 1


def source_of(value: Any) -> Source:
    """Return the reader of a source; ``TypeError`` or ``ValueError`` if it cannot be read."""
    if isinstance(value, HasReader):
        return value._reader
    if is_tracer(value):
        raise UnexpectedTracerError(
            "the source is being traced, so it has no data; call this outside jit and other "
            "transformations"
        )
    if not slices(value):
        raise TypeError(f"a {type(value).__name__} is not a source; {_instead_of(value)}")
    if is_a(value, "tensorstore", "TensorStore"):
        return _TensorStore(value)
    value = array_here(value)
    if isinstance(value, jax.Array):
        return _Shards(value)
    return _ReadDirect(value) if hasattr(value, "read_direct") else _Slicing(value)


def slices(value: Any) -> bool:
    """Return True if a value may be a source; ``ValueError`` if its file is closed."""
    _check_open(value)
    if is_a(value, "tensorstore", "TensorStore"):
        return True
    return all(hasattr(value, name) for name in ("shape", "dtype", "__getitem__"))


def is_mapping(value: object) -> bool:
    """Return True for a mapping that JAX takes for a leaf, such as open safetensors files."""
    if not (isinstance(value, Mapping) and jax.tree_util.all_leaves([value])):
        return False
    _check_open(value)
    return True


def is_future(value: object) -> bool:
    """Return True if a value is a future, such as the result of ``tensorstore.open``."""
    return callable(getattr(value, "result", None))


def _instead_of(value: object) -> str:
    if is_future(value):
        return "call .result() on it, and pass the result"
    if hasattr(value, "keys"):
        return "pick one array of it by its name, or pass a dict of them to gda.load_tree"
    return WHAT_IT_IS


def _check_open(value: Any) -> None:
    """Raise ``ValueError`` for an object of h5py whose file is closed."""
    if is_a(value, "h5py", "HLObject") and not value:
        raise ValueError(
            f"the file of this h5py.{type(value).__name__} is closed; open it again, and keep it "
            "open until the call returns"
        )


def is_a(value: object, module: str, name: str) -> bool:
    """Return True if a value is of a class of a library, without an import of the library."""
    # A program that has such a value has imported the library.
    return isinstance(value, getattr(sys.modules.get(module), name, ()))


class Unreadable:
    """A leaf that gda cannot read: any use of it raises ``ValueError`` with the reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def _raise(self, *_: object, **__: object) -> NoReturn:
        raise ValueError(self.reason)

    shape = dtype = property(_raise)
    __getitem__ = __array__ = _raise

    def __repr__(self) -> str:
        return f"<{self.reason}>"


class LocalFile:
    """A value that reads a file of this machine, from any number of threads at a time."""


class HasReader:
    """A value that brings its reader with it, such as a lazy view."""

    @property
    def _reader(self) -> Source:
        raise NotImplementedError


def settled(value: Any) -> Any:
    """Return the present value of a ``jax.Ref``, and any other value as it is."""
    if type(value) is not jax.Ref:
        return value
    with own_settings():
        return value[...]


def check_unmasked(value: object) -> None:
    """Raise ``TypeError`` for a masked array, unless no value of it is masked."""
    if has_masked_values(value):
        raise TypeError(
            "a masked array would lose its mask; pass array.filled(value), or its data and its mask"
        )


def has_masked_values(value: object) -> bool:
    # The netCDF libraries return masked arrays even if no value is missing.
    return isinstance(value, np.ma.MaskedArray) and bool(np.ma.getmaskarray(value).any())


def array_here(value: Any) -> Any:
    """Return the array of JAX in a value, or any other value as it is.

    ``ValueError`` if parts of an array are only in other processes.
    """
    value = settled(value)
    if is_tracer(value):  # which has a method __jax_array__ that is None
        return value
    kind = type(value)
    if hasattr(kind, "__jax_array__") and hasattr(kind, "is_fully_addressable"):
        value = value.__jax_array__()
    if not isinstance(value, jax.Array):
        return value
    check_reduced(getattr(value.sharding, "spec", ()))
    if value.is_fully_addressable:
        return value
    if value.is_fully_replicated and value.addressable_shards:
        return value.addressable_data(0)
    raise held_by_several_error(
        value,
        f"process {jax.process_index()} cannot read all of it. Move it to its new layout with "
        "gda.reshard_tree(tree, mesh, specs), which all of them call. For a part of it, slice it "
        "first, in all of them",
    )


def held_by_several_error(array: jax.Array, so: str) -> ValueError:
    """Return the error for an array of several processes; ``so`` is the consequence and advice."""
    processes = format_processes({device.process_index for device in array.devices()})
    return ValueError(f"the array of shape {array.shape} is held by {processes}, so {so}")


class _Slicing(Source):
    """A source that returns a new array, or a view of one, for slices."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.shape: Shape = _shape_of(value)
        self.dtype = _dtype_of(value)
        self.chunks = chunks_of(value, "chunks")
        self.is_in_memory = isinstance(value, np.ndarray)
        if isinstance(value, np.memmap):
            self.read_bytes = 64 * 2**20  # of a view, without a copy
            # A file that is mapped may be larger than memory. Without C order, rows of the array
            # are no rows of the file.
            self.is_in_memory = not value.flags.c_contiguous
        self.is_local = isinstance(value, LocalFile | np.memmap)

    def read(self, index: Index, empty: Callable[[np.dtype[Any]], _Memory]) -> Any:
        index = bounded(index, self.shape)
        return self._value[index]


class _Shards(Source):
    """An array of JAX, read from its blocks.

    XLA would change or fail to slice it. On CPU, it adds up the replicas of a slice,
    which loses denormals and changes NaNs, and it aborts the process for integers of less than a
    byte. Under the mesh of the user it refuses other devices.
    """

    is_in_memory = True

    def __init__(self, array: jax.Array) -> None:
        self._array, self.shape = array, array.shape
        self.dtype = _dtype_of(array)
        self.chunks = None

    @cached_property
    def _blocks(self) -> tuple[dict[int, Index], list[jax.Array]]:
        """The distinct blocks: their boxes by number, and their data."""
        distinct = {start_of(shard.index): shard for shard in self._array.addressable_shards}
        boxes = [bounded(shard.index, self.shape) for shard in distinct.values()]
        return dict(enumerate(boxes)), [shard.data for shard in distinct.values()]

    def read(self, index: Index, empty: Callable[[np.dtype[Any]], _Memory]) -> Any:
        boxes, data = self._blocks
        parts = move_of(boxes, bounded(index, self.shape)).parts
        with own_settings(), jax.enable_x64(True):  # for the indices of elements
            values = [_elements(data[part.block], part.in_block) for part in parts]
            if len(parts) == 1:
                return values[0]
            out = empty(self.dtype)
            for part, value in zip(parts, values, strict=True):
                out[part.in_box] = value
            return out


def _elements(block: jax.Array, index: Index) -> Any:
    """Return elements of a block, which stay on their device if that is an accelerator."""
    (device,) = block.devices()
    if device.platform == "cpu" or memory_kind_of(block.sharding) is not None:
        return np.asarray(apart(block))[(*index, ...)]  # with the dots, also of a scalar a view
    if sizes_of(index) == block.shape:
        return block
    return block[index]


def apart(data: jax.Array) -> jax.Array:
    """Return another array with the buffer of a single-device array, in some microseconds.

    JAX keeps a copy on the host with the array that was asked for it, and a shard lives as long as
    its whole. Without this, all that was ever copied would stay on the host.
    """
    return jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])


class _ReadDirect(_Slicing):
    """A source that reads into given memory, as ``h5py.Dataset`` does."""

    # A buffer of this size stays in the cache. With 2 MiB columns of a file took a tenth to a
    # quarter longer, in Python; with 16 MiB the copies alone took a quarter longer.
    read_bytes = 4 * 2**20

    def read(self, index: Index, empty: Callable[[np.dtype[Any]], _Memory]) -> Any:
        out = empty(self.dtype.newbyteorder("="))
        self._value.read_direct(out, bounded(index, self.shape))
        return out


class AsyncSource(Source):
    """A source that reads concurrently, in threads of its library."""

    read_bytes = 4 * 2**20

    def begin(self, index: Index, out: _Memory) -> Future:
        """Begin to read the block at ``index`` into ``out``, of any strides."""
        raise NotImplementedError

    def read(self, index: Index, empty: Callable[[np.dtype[Any]], _Memory]) -> _Memory:
        out = empty(self.dtype)
        self.begin(index, out).result()
        return out


class TensorStoreFacts(NamedTuple):
    """The properties of a TensorStore.

    Attributes:
      handle: the store, with indices that count from 0 also if it is a part of another.
      read_chunks, write_chunks: that are read and written as a whole; ``None`` if there are none.
      origin: an element at which a chunk begins; it may be outside.
    """

    handle: Any
    shape: Shape
    dtype: np.dtype[Any]
    read_chunks: Shape | None
    write_chunks: Shape | None
    origin: Shape

    @classmethod
    def of(cls, store: Any) -> TensorStoreFacts:
        import tensorstore

        handle = store[tensorstore.d[:].translate_to[0]] if store.rank else store
        shape, layout = tuple(handle.shape), handle.chunk_layout
        # A dimension to which TensorStore gives no size may be one chunk.
        read, write = (
            sizes and tuple([n or max(whole, 1) for n, whole in zip(sizes, shape, strict=True)])
            for sizes in (layout.read_chunk.shape, layout.write_chunk.shape)
        )
        origin = tuple([first or 0 for first in layout.grid_origin or (0,) * len(shape)])
        return cls(handle, shape, handle.dtype.numpy_dtype, read, write, origin)


class _TensorStore(AsyncSource):
    """A TensorStore, which copies straight into the memory that it is given."""

    def __init__(self, store: Any) -> None:
        facts = TensorStoreFacts.of(store)
        self._store, self.shape, self.dtype = facts.handle, facts.shape, facts.dtype
        self.chunks = None if any(facts.origin) else facts.read_chunks or None

    def begin(self, index: Index, out: _Memory) -> Future:
        import tensorstore

        block = self._store[bounded(index, self.shape)]
        return tensorstore.array(out).write(block).commit


def typed(source: Source, dtype: np.dtype[Any] | None) -> Source:
    """Return a source with the type for elements without a NumPy type; ``TypeError`` if unfit."""
    if dtype is None or not is_raw(source.dtype):
        return source
    if dtype.itemsize != source.dtype.itemsize:
        raise TypeError(
            f"the source has elements of {source.dtype.itemsize} bytes without a NumPy type "
            f"({source.dtype}); they cannot be {dtype}, of {dtype.itemsize} bytes. Pass the dtype "
            "that was saved"
        )
    return _Typed(source, dtype)


class _Typed(Source):
    """A source whose elements have no NumPy type, and the type that they are read as."""

    def __init__(self, source: Source, dtype: np.dtype[Any]) -> None:
        self._source, self.dtype = source, dtype
        self.shape, self.chunks = source.shape, source.chunks
        self.read_bytes, self.buffer_bytes = source.read_bytes, source.buffer_bytes
        self.is_local, self.is_in_memory = source.is_local, source.is_in_memory

    def read(self, index: Index, empty: Callable[[np.dtype[Any]], _Memory]) -> Any:
        given: list[_Memory] = []

        def untyped(dtype: np.dtype[Any]) -> _Memory:
            given.append(empty(self.dtype))
            return given[0].view(dtype)

        block = as_numpy(self._source.read(index, untyped), index)
        if given:
            return given[0]  # the same object, which tells that it is filled
        return block.view(self.dtype) if is_raw(block.dtype) else block


def check_not_awaitable(value: Any) -> None:
    """Raise ``TypeError`` for the result of an ``async`` function."""
    if hasattr(value, "__await__") and not hasattr(value, "shape"):
        if hasattr(value, "close"):
            value.close()  # or Python warns that nothing waited for it
        raise TypeError(
            f"the callback returned a {type(value).__name__}, and gda waits for none; pass a "
            "function that is not async. With max_workers=, several calls run at a time"
        )


def as_numpy(value: object, index: Index) -> np.ndarray[Any, Any]:
    """Return a block as a NumPy array; ``TypeError`` if it is masked or there is none."""
    check_not_awaitable(value)
    if value is None:
        raise TypeError(
            f"the callback or source returned None for index {format_index(index)}; it must return "
            "the block"
        )
    if has_masked_values(value):
        raise TypeError(
            f"the block at index {format_index(index)} is a masked array and JAX has no masks; "
            "return block.filled(value)"
        )
    return np.asarray(value)


def checked_block(
    source: Source, index: Index, block: object, any_dtype: bool = False
) -> np.ndarray[Any, Any]:
    """Return the block that a source gave for an index.

    ``ValueError`` for another shape, and ``TypeError`` for another dtype unless any will do.
    """
    found, shape = as_numpy(block, index), sizes_of(index)
    if found.shape != shape:
        raise ValueError(
            f"the block at index {format_index(index)} has shape {found.shape}; a source of shape "
            f"{source.shape} has {shape} there"
        )
    if not any_dtype and native(found.dtype) != native(source.dtype):
        raise TypeError(
            f"the source has dtype {source.dtype}, but its block has dtype {found.dtype}, as in "
            "libraries that scale their data; choose one with gda.storage.lazy(source).astype"
        )
    return found


def chunks_of(value: Any, name: str) -> Shape | None:
    """Return the shape of the chunks; None if there are none, or the attribute is no one shape."""
    try:
        sizes = tuple(map(int, getattr(value, name, ())))
    except (NotImplementedError, TypeError, ValueError):
        return None
    is_shape = len(sizes) == len(value.shape) > 0 and min(sizes) > 0
    return sizes if is_shape else None


def _shape_of(value: Any) -> Shape:
    try:
        return tuple(int(size) for size in value.shape)
    except (TypeError, ValueError):
        raise TypeError(
            f"a {type(value).__name__} of shape {value.shape!r} is not a source; {WHAT_IT_IS}"
        ) from None


def _dtype_of(value: Any) -> np.dtype[Any]:
    try:
        return np.dtype(value.dtype)
    except TypeError:
        raise TypeError(
            f"a {type(value).__name__} of dtype {value.dtype} is not a source: NumPy does not have "
            "that dtype; convert it to numbers first"
        ) from None
