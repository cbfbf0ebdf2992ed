"""Reading one block of anything that has a shape, a dtype and slices.

Every library has its own way of reading into memory that is there already, and its own gaps: some
refuse ``slice(None)``, some have no dtype that NumPy knows. Nothing here knows what becomes of a
block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax import numpy as jnp

from gda.layout.spec import Index, Shape
from gda.storage.tasks import Future

_Memory = np.ndarray[Any, Any]

WHAT_IT_IS = (
    "a source has shape, dtype and NumPy-style slicing, as numpy.load(path, mmap_mode='r'), a "
    "zarr.Array, an h5py.Dataset, a TensorStore and the values of gda.storage.open_safetensors have"
)

# By the names that safetensors files have for them.
SAFETENSORS_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "U16": np.uint16,
        "I16": np.int16,
        "U32": np.uint32,
        "I32": np.int32,
        "U64": np.uint64,
        "I64": np.int64,
        "F16": np.float16,
        "BF16": jnp.bfloat16,
        "F32": np.float32,
        "F64": np.float64,
        "C64": np.complex64,
        "F8_E4M3": jnp.float8_e4m3fn,
        "F8_E5M2": jnp.float8_e5m2,
        "F8_E4M3FNUZ": jnp.float8_e4m3fnuz,
        "F8_E5M2FNUZ": jnp.float8_e5m2fnuz,
        "F8_E8M0": jnp.float8_e8m0fnu,
    }.items()
}


class Source(Protocol):
    """Something to read blocks of.

    Attributes:
      dtype: of what ``read`` returns, but for the byte order.
    """

    shape: Shape
    dtype: np.dtype[Any]

    def read(self, index: Index, empty: Callable[[np.dtype[Any]], _Memory]) -> Any:
        """Return the block at ``index``; ``empty`` gives a buffer for it."""
        ...


def source_of(value: Any) -> Source:
    """Return how to read a value that is a source.

    Raises:
      TypeError: it is none, or NumPy does not know its dtype.
      ValueError: its file is closed.
    """
    _check_open(value)
    if is_a(value, "tensorstore", "TensorStore"):
        return AsyncSource(value)
    if hasattr(value, "get_shape") and hasattr(value, "get_dtype"):
        return _SafetensorsSlice(value)
    if not all(hasattr(value, name) for name in ("shape", "dtype", "__getitem__")):
        raise TypeError(f"a {type(value).__name__} is no source; {_instead_of(value)}")
    return _Filling(value) if hasattr(value, "read_direct") else _Slicing(value)


def is_group(value: object) -> bool:
    """Return whether a value is a mapping that JAX takes for a leaf, as Zarr and h5py have.

    Raises:
      ValueError: its file is closed.

    >>> is_group({}), is_group(np.zeros(2))
    (False, False)
    """
    if not (_is_mapping(value) and jax.tree_util.all_leaves([value])):
        return False
    _check_open(value)
    return True


def is_future(value: object) -> bool:
    """Return whether a value comes later, as the one that ``tensorstore.open`` returns does."""
    return callable(getattr(value, "result", None))


def _is_mapping(value: object) -> bool:
    return all(hasattr(value, name) for name in ("keys", "__getitem__"))


def _instead_of(value: object) -> str:
    if is_future(value):
        return "call .result() on it, and pass what that returns"
    if _is_mapping(value):
        return "pick one array of it by its name, or read all with gda.load_tree"
    return WHAT_IT_IS


def _check_open(value: Any) -> None:
    """Raise ``ValueError`` for an object of h5py whose file is closed."""
    if is_a(value, "h5py", "HLObject") and not value:
        raise ValueError(
            f"the file of this h5py.{type(value).__name__} is closed; open it again, and keep it "
            "open until the call returns"
        )


def is_a(value: object, module: str, name: str) -> bool:
    """Return whether a value is of a class of a library, which is not imported for it.

    A program that has such a value has imported the library.

    >>> is_a(np.zeros(2), "numpy", "ndarray"), is_a(np.zeros(2), "nowhere", "ndarray")
    (True, False)
    """
    return isinstance(value, getattr(sys.modules.get(module), name, ()))


class _Slicing:
    """Anything that gives a new array, or a view of one, for slices."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.shape: Shape = _shape_of(value, value.shape)
        self.dtype = _dtype_of(value, value.dtype)

    def read(self, index: Index, empty: Callable[[np.dtype[Any]], _Memory]) -> Any:
        block = self._value[_bounds(index, self.shape)]
        # The netCDF libraries return masked arrays also where nothing is missing.
        if isinstance(block, np.ma.MaskedArray) and not np.ma.getmaskarray(block).any():
            return block.data
        return block


class _Filling(_Slicing):
    """Anything that reads into given memory as h5py's datasets do."""

    def read(self, index: Index, empty: Callable[[np.dtype[Any]], _Memory]) -> Any:
        out = empty(self.dtype.newbyteorder("="))
        self._value.read_direct(out, _bounds(index, self.shape))
        return out


class _SafetensorsSlice:
    """A slice that ``get_slice`` of the safetensors package gives."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.shape: Shape = tuple(value.get_shape())
        name = str(value.get_dtype())
        if name not in SAFETENSORS_DTYPES or name.startswith("F8"):
            # The package looks for the dtype's name in NumPy, in vain.
            raise TypeError(
                f"the safetensors package cannot slice tensors of dtype {name} for NumPy; open the "
                "file with gda.storage.open_safetensors"
            )
        self.dtype = SAFETENSORS_DTYPES[name]

    def read(self, index: Index, empty: Callable[[np.dtype[Any]], _Memory]) -> Any:
        return self._value[_bounds(index, self.shape)]


class AsyncSource:
    """A TensorStore, which reads by itself, in threads of its own, while others are read."""

    def __init__(self, store: Any) -> None:
        import tensorstore

        self._tensorstore = tensorstore
        self.shape: Shape = _shape_of(store, store.shape)
        dtype = store.dtype.numpy_dtype
        self.dtype = _dtype_of(store, dtype)
        self._store = store[tensorstore.d[:].translate_to[0]] if self.shape else store

    def begin(self, index: Index, out: _Memory) -> Future:
        """Begin to read the block at ``index`` into ``out``; no other memory is needed for it."""
        block = self._store[_bounds(index, self.shape)]
        return self._tensorstore.array(out).write(block).commit

    def read(self, index: Index, empty: Callable[[np.dtype[Any]], _Memory]) -> Any:
        out = empty(self.dtype)
        self.begin(index, out).result()
        return out


def _shape_of(value: Any, shape: Any) -> Shape:
    try:
        return tuple(int(size) for size in shape)
    except (TypeError, ValueError):
        raise TypeError(
            f"a {type(value).__name__} of shape {shape!r} is no source; {WHAT_IT_IS}"
        ) from None


def _dtype_of(value: Any, dtype: Any) -> np.dtype[Any]:
    try:
        return np.dtype(dtype)
    except TypeError:
        raise TypeError(
            f"a {type(value).__name__} of dtype {dtype} is no source, because NumPy does not know "
            "that dtype; convert it to numbers first"
        ) from None


def _bounds(index: Index, shape: Shape) -> Index:
    """Return the index with all starts and stops written out: some libraries want them."""
    return tuple(
        slice(s.start or 0, size if s.stop is None else s.stop)
        for s, size in zip(index, shape, strict=True)
    )
