"""Files that describe a model: names with shapes, dtypes and specs; as ``gda plan --tree`` reads.

The file is one JSON object, with

- ``parameters``: for each name ``{"shape": [...], "dtype": ..., "spec": ...}``;
- ``mesh``: sizes of the axes by name, in mesh order; ``--mesh`` overrides it;
- ``dtype`` and ``spec``: for the parameters without their own. Without a spec, or with null, a
  parameter is not sharded;
- ``about``: anything a reader should know.

A parameter may have ``memory_kind``, as JAX names it: ``"pinned_host"`` is the memory of the host.

A shape is a list of integers, a dtype a name as ``--dtype`` takes it; a spec is a list of null,
axes and lists of axes, or a text as ``--spec`` takes it; a mesh may be a text as well. If the mesh
is given, the object may also be ``parameters`` alone.

A file may have 16 MiB: more than 100,000 parameters.
"""

from __future__ import annotations

import json
import reprlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from gda.layout.spec import check_spec
from gda.layout.strict_json import parse_json
from gda.layout.text import counted, did_you_mean, format_mesh, nearest
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
_SHOWN = 20
_KEYS_SHOWN = 8
_EXPECTED = 'expected is {"mesh": {...}, "parameters": {NAME: {"shape": [...], ...}, ...}}'
_OF_A_MODEL = ("about", "mesh", "dtype", "spec", "parameters")
_OF_A_PARAMETER = ("shape", "dtype", "spec", "memory_kind")


class ModelArray(NamedTuple):
    """An array of a file, not yet checked against a mesh."""

    name: str
    shape: Shape
    dtype: np.dtype[Any]
    spec: tuple[SpecEntry, ...]
    memory_kind: str | None = None


@dataclass(frozen=True)
class Parameter(TypedGrid):
    """An array of a model on a mesh."""

    name: str
    memory_kind: str | None = None


class Mistakes:
    """The mistakes of a file, collected for one message."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._by_message: dict[str, list[str]] = defaultdict(list)

    def add(self, message: str, name: str = "") -> None:
        """Add a mistake; ``name`` is the parameter that has it."""
        self._by_message[message].append(name)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Add the mistakes of a parameter that the block raises."""
        try:
            yield
        except MistakesError as error:
            for message in error.lines:
                self.add(message, name)

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
        more = (
            [f"  … and {len(lines) - _SHOWN} more lines like these"] if len(lines) > _SHOWN else []
        )
        kind = "a mistake" if count == 1 else f"{count:,} mistakes"
        raise MistakesError(f"{self._path} has {kind}:", *lines[:_SHOWN], *more)


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
    """Return the arrays of a file, for any mesh.

    The mesh of the file is not read, and the specs are not checked against a mesh.
    """
    mistakes = Mistakes(file.path)
    model = _model_of(file, mistakes)
    defaults = _defaults_of(model, mistakes)
    arrays = []
    for name, entry in model["parameters"].items():
        with mistakes.of(name):
            arrays.append(_array(name, entry, defaults))
    mistakes.check()
    return arrays


def read_model(
    file: ModelText, mesh: Mapping[str, int] | None, *, pad: bool
) -> tuple[dict[str, int], list[Parameter]]:
    """Return the mesh and the parameters of a model; an error names each parameter with a mistake.

    ``mesh``, of the option ``--mesh``, overrides the mesh of the file.
    """
    mistakes = Mistakes(file.path)
    model = _model_of(file, mistakes)
    sizes = _mesh_of(model, mesh, mistakes)
    mistakes.check()
    defaults = _defaults_of(model, mistakes)
    arrays, parameters = [], []
    for name, entry in model["parameters"].items():
        with mistakes.of(name):
            array = _array(name, entry, defaults)
            arrays.append(array)
            grid = plan_grid(array.shape, array.dtype, sizes, array.spec, pad=pad)
            parameters.append(Parameter(grid, array.dtype, name, array.memory_kind))
    if mesh is not None:
        _check_axes(arrays, sizes, model.get("mesh"), file.path)
    mistakes.check()
    return sizes, parameters


def _model_of(file: ModelText, mistakes: Mistakes) -> dict[str, Any]:
    """Return the object of a file, with ``parameters``."""
    try:
        document = parse_json(file.text)
    except ValueError as error:
        raise MistakesError(f"{file.path} cannot be read as JSON: {error}") from None
    if not isinstance(document, dict):
        raise MistakesError(f"{file.path} is {_kind(document)}; {_EXPECTED}")
    if "parameters" not in document and not {"mesh", "about"} & document.keys():
        return {"parameters": document}
    if not isinstance(document.get("parameters"), dict):
        found = "parameters" in document
        given = f"is {_kind(document['parameters'])}" if found else "is missing"
        mistakes.add(f'"parameters" {given}; {_EXPECTED}')
    for message in _unknown_keys(document, _OF_A_MODEL, ' (names go into "parameters")'):
        mistakes.add(message)
    return {"parameters": {}, **document}


def _mesh_of(
    model: Mapping[str, Any], mesh: Mapping[str, int] | None, mistakes: Mistakes
) -> dict[str, int]:
    try:
        sizes = _mesh_from(model.get("mesh")) if mesh is None else dict(mesh)
        check_shape_and_mesh((), sizes)
    except (MisreadError, MistakesError) as error:
        mistakes.add(f"mesh: {error}")
        return {}
    return sizes


def _mesh_from(given: Any) -> dict[str, int]:
    expected = 'sizes by axis such as {"data": 16, "model": 4}'
    if given is None:
        raise MistakesError(f"there is none; give {expected}, or --mesh data=16,model=4")
    if isinstance(given, str):
        return parse_mesh(given)
    if not isinstance(given, dict) or not given:
        raise MistakesError(f"expected are {expected}, not {_short(given)}")
    for name, size in given.items():
        if not name or name in NOT_SHARDED:
            raise MistakesError(f"an axis cannot have the name {name!r}")
        if type(size) is not int or size < 1:
            raise MistakesError(f"axis {name!r} has the size {_short(size)}; it must be 1 or more")
    return given


def _defaults_of(model: Mapping[str, Any], mistakes: Mistakes) -> dict[str, Any]:
    """Return the dtype, which may be None, and the spec of the parameters without their own."""
    given = {key: model[key] for key in ("dtype", "spec") if model.get(key) is not None}
    values, wrong = _read(given)
    for message in wrong:
        mistakes.add(message)
    return {"dtype": values.get("dtype"), "spec": values.get("spec") or ()}


def _read(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the shape, the dtype and the spec that can be read, and the mistakes in the others."""
    values, wrong = {}, []
    readers = {"shape": _shape_of, "dtype": _dtype_of, "spec": _spec_of, "memory_kind": _kind_of}
    for key, read in readers.items():
        try:
            if key in given:
                values[key] = read(given[key])
        except MistakesError as error:
            wrong += error.lines
    return values, wrong


def _array(name: str, entry: Any, defaults: Mapping[str, Any]) -> ModelArray:
    if not isinstance(entry, dict):
        raise MistakesError(f'expected is {{"shape": [...], ...}}, not {_short(entry)}')
    given = {key: value for key, value in entry.items() if (key, value) != ("dtype", None)}
    values, wrong = _read(given)
    values = {**defaults, **values}
    wrong = _unknown_keys(entry, _OF_A_PARAMETER) + wrong
    if "shape" not in given:
        wrong.append('there is no "shape"')
    if "dtype" not in given and defaults["dtype"] is None:
        wrong.append('there is no "dtype", here or for all parameters')
    if wrong:
        raise MistakesError(*wrong)
    return ModelArray(name, **values)


def _check_axes(
    arrays: Sequence[ModelArray], mesh: Mapping[str, int], of_file: Any, path: str
) -> None:
    """Check that the mesh has all axes of the specs; an error has a line for each other axis."""
    lacking: dict[str, list[str]] = defaultdict(list)
    for array in arrays:
        for entry in array.spec:
            for axis in (entry,) if isinstance(entry, str) else entry or ():
                if axis not in mesh:
                    lacking[axis].append(array.name)
    if not lacking:
        return
    hint = f"; the mesh of the file is {_short(of_file)}" if of_file is not None else ""
    lines = [
        f"--mesh: {format_mesh(mesh)} has no axis {axis!r}, which shards "
        f"{counted(len(names), 'parameter')} of {path}, such as {names[0]}{hint}"
        for axis, names in lacking.items()
    ]
    raise MistakesError(*lines[:_SHOWN])


def _shape_of(given: Any) -> Shape:
    if not isinstance(given, list) or not all(type(size) is int for size in given):
        raise MistakesError(f'"shape" must be a list of integers, not {_short(given)}')
    check_dimensions("shape", given)
    if any(not 0 <= size < 2**63 for size in given):
        raise MistakesError(f'"shape" is {_short(given)}; sizes are from 0 to 2**63 - 1')
    return tuple(given)


def _dtype_of(given: Any) -> np.dtype[Any]:
    if not isinstance(given, str):
        raise MistakesError(f'"dtype" must be a name such as "bfloat16", not {_short(given)}')
    try:
        return _known_dtype(given)
    except MisreadError as error:
        raise MistakesError(f'"dtype" {error}') from None


def _kind_of(given: Any) -> str | None:
    if given is not None and not isinstance(given, str):
        raise MistakesError(
            f'"memory_kind" must be a name such as "pinned_host", not {_short(given)}'
        )
    return given


_known_dtype = lru_cache(maxsize=256)(parse_dtype)


def _spec_of(given: Any) -> tuple[SpecEntry, ...]:
    if given is None:
        return ()
    for value in (given, *given) if isinstance(given, list) else ():
        if isinstance(value, list):
            check_dimensions("spec", value)
    try:
        if isinstance(given, str):
            return parse_spec(given)
        entries = check_spec(given, (0,) * len(given) if isinstance(given, list) else ())
    except (MisreadError, MistakesError) as error:
        raise MistakesError(f'"spec" {error}') from None
    except (TypeError, ValueError) as error:
        raise MistakesError(str(error)) from None
    for word in NOT_SHARDED:
        if any(word in (entry if isinstance(entry, tuple) else (entry,)) for entry in entries):
            raise MistakesError(
                f'"spec" is {_short(given)}; in a list, a dimension that is not sharded is null, '
                f'not "{word}"'
            )
    return entries


# Words.


def _unknown_keys(given: Mapping[str, Any], known: Sequence[str], hint: str = "") -> list[str]:
    """Return a message for each key that is not known, in the order of the file; the last for many.

    A file may have a million.
    """
    keys = [key for key in given if key not in known]
    messages = []
    for key in keys[:_KEYS_SHOWN]:
        near = did_you_mean([_named([each]) for each in nearest(key, known)])
        what = near or f"; known are {_named(known)}{hint}"
        messages.append(f"{_named([key])} is not known{what}")
    if rest := keys[_KEYS_SHOWN:]:
        messages.append(f"{_named(rest)} are not known")
    return messages


def _named(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _KEYS_SHOWN:,} more" if len(keys) > _KEYS_SHOWN else ""
    return ", ".join(json.dumps(key[:60]) for key in keys[:_KEYS_SHOWN]) + more


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text"}
    return kinds.get(type(value), _short(value))


def _short(value: Any) -> str:
    """Return a value in a few characters; null, true and false as in JSON."""
    is_word = value is None or isinstance(value, bool)
    return json.dumps(value) if is_word else reprlib.repr(value)
