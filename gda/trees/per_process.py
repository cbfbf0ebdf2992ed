"""A value that each process of a program has by itself, and its bytes in a file.

The bytes are a line of JSON, then the data of all arrays and of all ``bytes``, end to end. Lists
and what JSON has stand for themselves; of everything else there is an object with its kind:
``{"dict": [[key, value], ...]}``, ``{"tuple": [...]}``, ``{"float": "nan"}``, ``{"bytes": size}``,
``{"array": [dtype, shape]}``, ``{"number": dtype}``. A long string is data too:
``{"text": size}``. To read them runs no code of the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gda.layout.boundary import set_module
from gda.layout.dtype_names import is_storable, native, recorded_dtype
from gda.layout.spec import Shape
from gda.layout.strict_json import check_memory, parse_json
from gda.layout.text import counted
from gda.storage.sources import check_unmasked

_LONG_TEXT = 2**16  # characters; ``check_memory`` would count brackets in it as lists
_MOST_DEPTH = 100  # that a reader can follow, however deep the stack of its caller is


@set_module("gda.checkpoint")
class PerProcess:
    """A leaf of a saved tree that each process has by itself, such as the state of its data loader.

    ``save`` and ``save_async`` copy the value when they are called, and write it into a file of its
    process. ``restore`` gives each process its own, as a ``PerProcess``. In ``like``, its value
    does not matter. If the number of processes has changed, ``restore`` needs ``merge``. Functions
    of trees leave it as it is; ``gda.offer`` and ``gda.pull`` refuse it. Two are equal if their
    values have equal bytes in a file.

    Args:
      value: ``None``, a number, a string, bytes, a NumPy array or number with a dtype of JAX; or a
        list, tuple or dict of such values, whose keys are strings and integers. Subclasses, such as
        ``OrderedDict``, come back as the plain class.

    >>> import gda, tempfile
    >>> state = {'step': 7, 'data': gda.checkpoint.PerProcess({'next_index': 32})}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gda.checkpoint.save(folder, state)
    ...     gda.checkpoint.restore(folder)['data'].value
    {'next_index': 32}
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PerProcess):
            return NotImplemented
        return to_bytes(self.value) == to_bytes(other.value)

    def __hash__(self) -> int:
        return hash(to_bytes(self.value))

    def __repr__(self) -> str:
        return f"PerProcess({self.value!r})"


def merged(
    merge: Callable[[list[Any], int], Sequence[Any]], values: list[Any], count: int
) -> Sequence[Any]:
    """Return the values that ``merge`` makes for each of ``count`` processes."""
    made = merge(values, count)
    if len(made) != count:
        processes = counted(count, "process", "processes")
        raise ValueError(
            f"merge returned {len(made)} values for {processes}; return one for each process"
        )
    return made


def to_bytes(value: Any) -> bytes:
    """Return the bytes of a value.

    Raises:
      TypeError: a ``PerProcess`` cannot hold it.
      ValueError: ``from_bytes`` would refuse the bytes: it has too many values, or is nested too
        deeply.
    """
    data: list[bytes] = []
    text = json.dumps(_to_json(value, data, 0), separators=(",", ":"), allow_nan=False)
    try:
        check_memory(text)
    except ValueError as error:
        raise ValueError(
            f"a PerProcess could not be read again: {error}. Put its numbers into NumPy arrays, or "
            "the whole value into bytes"
        ) from None
    return b"".join([text.encode(), b"\n", *data])


def from_bytes(file: bytes) -> Any:
    """Return the value with these bytes; ``ValueError`` if they are not those of a value."""
    text, _, data = file.partition(b"\n")
    reader = _Reader(data)
    try:
        value = reader.value_of(parse_json(text.decode()))
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise ValueError("has no value of a PerProcess") from None
    if reader.end != len(data):
        raise ValueError(f"has {len(data) - reader.end} bytes too many")
    return value


def _to_json(value: Any, data: list[bytes], depth: int) -> Any:
    """Return the JSON of a value; put the data of its arrays into a list."""
    if depth > _MOST_DEPTH:
        raise ValueError(
            f"the value of a PerProcess is nested in more than {_MOST_DEPTH} lists, tuples and "
            "dicts; flatten it"
        )
    check_unmasked(value)
    if isinstance(value, np.ndarray | np.generic):  # before float, which has subclasses in NumPy
        array = np.asarray(value, native(value.dtype))
        if is_storable(array.dtype):
            data.append(array.tobytes())
            is_array = isinstance(value, np.ndarray)
            dtype = array.dtype.name
            return {"array": [dtype, array.shape]} if is_array else {"number": dtype}
    elif isinstance(value, str) and len(value) > _LONG_TEXT:
        data.append(value.encode("utf-8", "surrogatepass"))
        return {"text": len(data[-1])}
    elif value is None or isinstance(value, bool | int | str):
        return value
    elif isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    elif isinstance(value, bytes):
        data.append(value)
        return {"bytes": len(value)}
    elif isinstance(value, list | tuple):
        items = [_to_json(each, data, depth + 1) for each in value]
        return items if isinstance(value, list) else {"tuple": items}
    elif isinstance(value, dict) and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, _to_json(each, data, depth + 1)] for key, each in value.items()]}
    raise TypeError(
        f"a PerProcess cannot hold {value!r:.60} of type {type(value).__name__}; it holds None, "
        "numbers, strings, bytes and NumPy arrays of dtypes of JAX, in lists, tuples, and dicts "
        "whose keys are strings and integers. Convert it, an array of JAX with numpy.asarray"
    )


class _Reader:
    """The reader of a value from its JSON, and from the data of its arrays."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.end = 0  # of what was read

    def value_of(self, node: Any) -> Any:
        if isinstance(node, list):
            return [*map(self.value_of, node)]
        if not isinstance(node, dict):
            return node
        ((kind, given),) = node.items()
        match kind:
            case "dict":
                return {key: self.value_of(each) for key, each in given}
            case "tuple":
                return tuple(map(self.value_of, given))
            case "float":
                return float(given)
            case "bytes":
                return self._array("uint8", [given]).tobytes()
            case "text":
                text = self._array("uint8", [given]).tobytes()
                return text.decode("utf-8", "surrogatepass")
            case "array":
                return self._array(*given)
            case "number":
                return self._array(given, [])[()]
        raise ValueError(kind)

    def _array(self, dtype: str, shape: Shape | list[int]) -> np.ndarray[Any, Any]:
        array = np.ndarray(shape, recorded_dtype(dtype), self._data, self.end)
        self.end += array.nbytes
        return array.copy()
