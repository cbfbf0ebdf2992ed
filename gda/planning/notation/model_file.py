"""Files that describe a model: names with shapes, dtypes and specs; as ``gda plan --tree`` reads.

The file is one JSON object, with

- ``parameters``: for each name ``{"shape": [...], "dtype": ..., "spec": ...}``, and perhaps
  ``memory_kind``, as JAX names it: ``"pinned_host"`` is the memory of the host;
- ``mesh``: sizes of the axes by name, in mesh order, or a text; ``--mesh`` overrides it;
- ``dtype`` and ``spec``: for the parameters without their own;
- ``about``: anything a reader should know.

A dtype is a name as ``--dtype`` takes it, a spec a list of null, axes and lists of axes, or a text
as ``--spec`` takes it. With null, a parameter is not sharded. Without a mesh, the object may also
be ``parameters`` alone. A file may have 16 MiB: more than 100,000 parameters.
"""

from __future__ import annotations

import json
import reprlib
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from gda.layout.spec import check_spec
from gda.layout.strict_json import parse_json
from gda.layout.text import did_you_mean, nearest
from gda.planning.notation.mesh_and_spec import NOT_SHARDED, parse_mesh, parse_spec
from gda.planning.notation.mistakes import MisreadError, MistakesError
from gda.planning.notation.name_ranges import with_ranges
from gda.planning.notation.numbers import parse_dtype
from gda.planning.notation.planned_grid import (
    TypedGrid,
    check_dimensions,
    check_shape_and_mesh,
    plan_grid,
)

if TYPE_CHECKING:
    import numpy as np

    from gda.layout.spec import Shape, SpecEntry

_MOST_BYTES = 2**24
_LINES_SHOWN, _KEYS_SHOWN = 20, 8
_EXPECTED = 'expected is {"mesh": {...}, "parameters": {NAME: {"shape": [...], ...}, ...}}'


class ModelArray(NamedTuple):
    """An array of a file, not yet checked against a mesh."""

    name: str
    shape: Shape
    dtype: np.dtype[Any]
    spec: tuple[SpecEntry, ...] = ()
    memory_kind: str | None = None


@dataclass(frozen=True)
class Parameter(TypedGrid):
    """An array of a model on a mesh."""

    name: str
    memory_kind: str | None = None


class ModelText(NamedTuple):
    """A file with its text; ``path`` is its name in messages."""

    path: str
    text: str


def text_of(path: str, file: BinaryIO) -> ModelText:
    """Return the text of an open file, which must be in UTF-8 and not too large."""
    content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise MistakesError(
            f"{path} has more than {_MOST_BYTES:,} bytes; describe the model in several files"
        )
    try:
        return ModelText(path, content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise MistakesError(f"{path} is not a text in UTF-8: {error}") from None


def read_arrays(file: ModelText) -> list[ModelArray]:
    """Return the arrays of a file, for any mesh; that of the file is not read."""
    mistakes = _Mistakes(file.path)
    arrays = _arrays_of(_document_of(file), mistakes)
    mistakes.check()
    return arrays


def read_model(
    file: ModelText, mesh: Mapping[str, int] | None, *, pad: bool
) -> tuple[dict[str, int], list[Parameter]]:
    """Return the mesh and the parameters of a model; an error names each parameter with a mistake.

    ``mesh``, of the option ``--mesh``, overrides the mesh of the file.
    """
    mistakes, document = _Mistakes(file.path), _document_of(file)
    sizes: dict[str, int] = {}
    with mistakes.of("mesh"):
        given = _mesh_of(document.get("mesh")) if mesh is None else dict(mesh)
        check_shape_and_mesh((), given)
        sizes = given
    arrays, parameters = _arrays_of(document, mistakes), []
    for name, shape, dtype, spec, memory_kind in arrays:
        with mistakes.of(name):
            grid = plan_grid(shape, dtype, sizes, spec, pad=pad)
            parameters.append(Parameter(grid, dtype, name, memory_kind))
    mistakes.check()
    return sizes, parameters


class _Mistakes:
    """The mistakes of a file, collected for one message."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._by_message: dict[str, list[str]] = defaultdict(list)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Keep the mistakes that the block raises; ``name`` is what has them, or empty."""
        try:
            yield
        except MistakesError as error:
            for message in error.lines:
                self._by_message[message].append(name)
        except MisreadError as error:
            self._by_message[str(error)].append(name)

    def check(self) -> None:
        """Raise ``MistakesError`` if there are any; parameters with the same one share a line."""
        lines = [
            f"  {name}: {message}" if name else f"  {message}"
            for message, names in self._by_message.items()
            for name, _ in with_ranges(names)
        ]
        if not lines:
            return
        count = sum(map(len, self._by_message.values()))
        kind = "a mistake" if count == 1 else f"{count:,} mistakes"
        if (more := len(lines) - _LINES_SHOWN) > 0:
            lines[_LINES_SHOWN:] = [f"  … and {more} more lines like these"]
        raise MistakesError(f"{self._path} has {kind}:", *lines)


def _document_of(file: ModelText) -> dict[str, Any]:
    """Return the object of a file, with ``parameters``."""
    try:
        document = parse_json(file.text)
    except ValueError as error:
        raise MistakesError(f"{file.path} cannot be read as JSON: {error}") from None
    if not isinstance(document, dict):
        raise MistakesError(f"{file.path} is {_short(document)}; {_EXPECTED}")
    return document if {"parameters", "mesh", "about"} & {*document} else {"parameters": document}


def _arrays_of(document: Mapping[str, Any], mistakes: _Mistakes) -> list[ModelArray]:
    given: Any = document.get("parameters")
    arrays, defaults = [], {}
    with mistakes.of(""):
        if not isinstance(given, dict):
            raise MistakesError(f'"parameters" is {_short(given)}; {_EXPECTED}')
        defaults = _read(document, _OF_A_MODEL)
    mistakes.check()
    for name, entry in given.items():
        with mistakes.of(name):
            arrays.append(_array(name, entry, defaults))
    return arrays


def _array(name: str, entry: Any, defaults: Mapping[str, Any]) -> ModelArray:
    if not isinstance(entry, dict):
        raise MistakesError(f'expected is {{"shape": [...], ...}}, not {_short(entry)}')
    needed = {key for key in ("shape", "dtype") if key not in defaults}
    values = _read(entry, _OF_A_PARAMETER, needed)
    not_sharded = {"spec": ()} if "spec" in entry else {}
    return ModelArray(name, **{**defaults, **not_sharded, **values})


def _read(
    given: Mapping[str, Any],
    readers: Mapping[str, Callable[[Any], Any] | None],
    needed: Container[str] = (),
) -> dict[str, Any]:
    """Return the values that are not null; an error has a line for each that is wrong."""
    values, wrong = {}, []
    if unknown := [key for key in given if key not in readers]:
        more = f" and {len(unknown) - _KEYS_SHOWN:,} more" if len(unknown) > _KEYS_SHOWN else ""
        near = did_you_mean([f'"{each}"' for each in nearest(unknown[0], readers)])
        known = near or f"; known are {_named([*readers])}"
        is_or_are = "is" if len(unknown) == 1 else "are"
        wrong.append(f"{_named(unknown[:_KEYS_SHOWN])}{more} {is_or_are} not known{known}")
    for key, read in readers.items():
        if read is None:
            continue
        if given.get(key) is None:
            wrong += [f'there is no "{key}"'] if key in needed else []
            continue
        try:
            values[key] = read(given[key])
        except (TypeError, ValueError) as error:
            wrong.append(f'"{key}": {error}')
    if wrong:
        raise MistakesError(*wrong)
    return values


def _mesh_of(given: Any) -> dict[str, int]:
    if isinstance(given, str):
        return parse_mesh(given)
    if not isinstance(given, dict) or not given:
        raise MistakesError(
            'expected are sizes by axis such as {"data": 16, "model": 4}, here or by --mesh, '
            f"not {_short(given)}"
        )
    for name, size in given.items():
        if not name or name in NOT_SHARDED:
            raise MistakesError(f"an axis cannot have the name {name!r}")
        if type(size) is not int or size < 1:
            raise MistakesError(f"axis {name!r} has the size {_short(size)}; it must be 1 or more")
    return given


def _shape_of(given: Any) -> Shape:
    if not isinstance(given, list) or not all(type(size) is int for size in given):
        raise ValueError(f"expected is a list of integers, not {_short(given)}")
    check_dimensions("shape", given)
    if any(not 0 <= size < 2**63 for size in given):
        raise ValueError(f"sizes are from 0 to 2**63 - 1, and not {_short(given)}")
    return tuple(given)


_known_dtype = lru_cache(maxsize=256)(parse_dtype)


def _dtype_of(given: Any) -> np.dtype[Any]:
    return _known_dtype(_text(given, "bfloat16"))


def _kind_of(given: Any) -> str:
    return _text(given, "pinned_host")


def _text(given: Any, example: str) -> str:
    if not isinstance(given, str):
        raise ValueError(f'expected is a name such as "{example}", not {_short(given)}')
    return given


def _spec_of(given: Any) -> tuple[SpecEntry, ...]:
    if isinstance(given, str):
        return parse_spec(given)
    for value in (given, *given) if isinstance(given, list) else ():
        if isinstance(value, list):
            check_dimensions("spec", value)
    entries = check_spec(given, (0,) * len(given) if isinstance(given, list) else ())
    names = [name for each in entries for name in (each if isinstance(each, tuple) else (each,))]
    for word in {*NOT_SHARDED} & {*names}:
        raise ValueError(f'a dimension that is not sharded is null in a list, and not "{word}"')
    return entries


# The keys, with the readers of their values.
_OF_A_MODEL = {
    "about": None,
    "mesh": None,
    "dtype": _dtype_of,
    "spec": _spec_of,
    "parameters": None,
}
_OF_A_PARAMETER = {
    "shape": _shape_of,
    "dtype": _dtype_of,
    "spec": _spec_of,
    "memory_kind": _kind_of,
}


def _named(keys: Sequence[str]) -> str:
    return ", ".join(json.dumps(key[:60]) for key in keys)


def _short(value: Any) -> str:
    """Return a value in a few characters; null, true and false as in JSON."""
    is_word = value is None or isinstance(value, bool)
    return json.dumps(value) if is_word else reprlib.repr(value)
