"""The file ``checkpoint`` of a run of Orbax 0.5 or older: its tree in msgpack. Reads no files.

It has the values of the leaves that were aggregated into it, as those of flax's
``save_args_from_target``: numbers, texts, and arrays in types of their own. In the place of a leaf
that has files of its own stands a text. The file may be damaged, or hostile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gda.layout.dtype_names import dtype_named
from gda.storage.orbax_runs.metadata import DEEPEST, Key, OrbaxLeaf, check_name

# In place of leaves with files of their own; the second is of the first releases.
_PLACEHOLDERS = ("PLACEHOLDER://", "AGGREGATED://")
_IS_CHUNKED = "__msgpack_chunked_array__"
_ARRAY, _COMPLEX, _NUMBER, _TUPLE = 1, 2, 3, 4  # the types of flax


def parse_values(text: bytes) -> Any:
    """Return the tree in the file, with lists for tuples; ``ValueError`` says the fault in it."""
    try:
        import msgpack
    except ImportError as error:
        raise ImportError(
            "this run of an old release of Orbax has values in the file 'checkpoint', in the "
            "format of msgpack; install the package msgpack, which flax needs too, to read them",
            name=error.name,
        ) from error

    def value_of(kind: int, data: bytes) -> Any:
        if kind in (_ARRAY, _NUMBER):
            shape, name, buffer = msgpack.unpackb(data, raw=True)
            if (dtype := dtype_named(name.decode())) is None:
                raise ValueError(f"an array has the dtype {name[:80]!r}, which is unknown")
            array = np.frombuffer(buffer, dtype).reshape(shape)
            return array if kind == _ARRAY else array[()]
        if kind == _COMPLEX:
            return complex(*msgpack.unpackb(data))
        if kind == _TUPLE:
            return list(msgpack.unpackb(data, raw=False, ext_hook=value_of))
        raise ValueError(f"it has a value of the type {kind}, which is unknown")

    try:
        return _joined(msgpack.unpackb(text, raw=False, ext_hook=value_of))
    except (TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _joined(values: Any) -> Any:
    """Return the tree with arrays of more than 1 GiB joined of the parts that the file has."""
    if isinstance(values, list):
        return [_joined(value) for value in values]
    if not isinstance(values, dict):
        return values
    if not values.get(_IS_CHUNKED):
        return {name: _joined(value) for name, value in values.items()}
    sizes, parts = values["shape"], values["chunks"]
    whole = np.concatenate([parts[str(number)] for number in range(len(parts))])
    return whole.reshape([sizes[str(number)] for number in range(len(sizes))])


def leaves_of(values: Any, path: tuple[Key, ...] = ()) -> Iterator[OrbaxLeaf]:
    """Yield the leaves of the tree in the file, as those of a run without ``_METADATA``."""
    if len(path) > DEEPEST:
        raise ValueError(f"it is more than {DEEPEST} levels deep")
    if isinstance(values, dict | list) and values:
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from leaves_of(value, (*path, key))
    elif is_placeholder(values):
        leaf = OrbaxLeaf(path, "np.ndarray", is_written=True)
        check_name(leaf.name)
        yield leaf
    else:
        kind = "None" if values is None else {dict: "Dict", list: "List"}.get(type(values), "value")
        yield OrbaxLeaf(path, kind, is_written=False)


def is_placeholder(value: Any) -> bool:
    """Return True for the text in the place of a leaf that has files of its own."""
    return isinstance(value, str) and value.startswith(_PLACEHOLDERS)


def value_at(values: Any, path: tuple[Key, ...]) -> Any:
    """Return a value of the tree in the file; ``LookupError`` if there is none."""
    for key in path:
        node: Any = values if isinstance(values, dict | list) else {}
        values = node[key]
    return values
