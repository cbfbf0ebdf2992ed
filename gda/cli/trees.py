"""Files that describe a model: names with shapes, dtypes and specs; the format of ``--tree``.

The file is one JSON object, with

- ``parameters``: for each name ``{"shape": [...], "dtype": ..., "spec": ...}``;
- ``mesh``: sizes of the axes by name, in mesh order, unless ``--mesh`` says them;
- ``dtype`` and ``spec``: of the parameters that have none of their own. Where there is no spec at
  all, a parameter is not cut;
- ``about``: whatever a reader should know.

A shape is a list of integers, a dtype a name as ``--dtype`` takes it; a spec is a list of null,
axes and lists of axes, or a text as ``--spec`` takes it; a mesh may be a text as well. A file that
has only names with their parameters is read too, with ``--mesh``.
"""

from __future__ import annotations

import difflib
import json
import reprlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from gda.cli.arrays import check_shape_and_mesh, plan_grid
from gda.cli.names import with_ranges
from gda.cli.words import NOT_CUT, MisreadError, MistakesError, parse_dtype, parse_mesh, parse_spec
from gda.spec import check_spec

if TYPE_CHECKING:
    import numpy as np

    from gda.grid import ShardGrid
    from gda.spec import Shape, SpecEntry

_SHOWN = 20
_EXPECTED = 'expected is {"mesh": {...}, "parameters": {NAME: {"shape": [...], ...}, ...}}'
_OF_A_MODEL = ("about", "mesh", "dtype", "spec", "parameters")
_OF_A_PARAMETER = ("shape", "dtype", "spec")


@dataclass(frozen=True)
class Parameter:
    """An array of a model."""

    name: str
    dtype: np.dtype[Any]
    grid: ShardGrid


class Mistakes:
    """All that is wrong with a file, so that it can be said together."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._by_message: dict[str, list[str]] = defaultdict(list)

    def add(self, message: str, name: str = "") -> None:
        """Add a mistake; ``name`` is the parameter that has it."""
        self._by_message[message].append(name)

    def check(self) -> None:
        """Raise ``MistakesError`` if there are any; parameters that share one are a line."""
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


def read_model(
    text: str, path: str, mesh: Mapping[str, int] | None
) -> tuple[dict[str, int], list[Parameter]]:
    """Return the mesh and the parameters of a model.

    Args:
      text: of the file.
      path: of the file, for messages.
      mesh: what ``--mesh`` says, which counts more than what the file says.

    Raises:
      MistakesError: all mistakes of the file, with the names of the parameters that have them.
    """
    mistakes = Mistakes(path)
    document = _parse_json(text, path, mistakes)
    if not isinstance(document, dict):
        raise MistakesError(f"{path} is {_kind(document)}; {_EXPECTED}")
    mistakes.check()
    model = _model_of(document, mistakes)
    sizes = _mesh_of(model, mesh, mistakes)
    mistakes.check()
    dtype = _default(model, "dtype", _dtype_of, mistakes)
    spec = _default(model, "spec", _spec_of, mistakes) or ()
    parameters = []
    for name, entry in model["parameters"].items():
        try:
            parameters.append(_parameter(name, entry, sizes, dtype, spec))
        except _WrongError as error:
            for message in error.args:
                mistakes.add(message, name)
    mistakes.check()
    return sizes, parameters


class _WrongError(Exception):
    """What is wrong with a parameter, message by message."""


def _parse_json(text: str, path: str, mistakes: Mistakes) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = sorted({name for name in names if names.count(name) > 1})
            mistakes.add(f"{_named(twice)} stands there twice")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise MistakesError(f"{path} is nested too deeply to be a model") from None
    except ValueError as error:
        raise MistakesError(f"{path} is not JSON: {error}") from None


def _model_of(document: dict[str, Any], mistakes: Mistakes) -> dict[str, Any]:
    if "parameters" not in document and not {"mesh", "about"} & document.keys():
        return {"parameters": document}
    if not isinstance(document.get("parameters"), dict):
        found = "parameters" in document
        given = f"is {_kind(document['parameters'])}" if found else "is missing"
        mistakes.add(f'"parameters" {given}; {_EXPECTED}')
    for key in document.keys() - {*_OF_A_MODEL}:
        mistakes.add(f'{_unknown_key(key, _OF_A_MODEL)}; parameters stand under "parameters"')
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
        if not name or name in NOT_CUT:
            raise MistakesError(f"an axis cannot have the name {name!r}")
        if type(size) is not int or size < 1:
            raise MistakesError(f"axis {name!r} has the size {_short(size)}; it must be 1 or more")
    return given


def _default(model: Mapping[str, Any], key: str, read: Any, mistakes: Mistakes) -> Any:
    if model.get(key) is None:
        return None
    try:
        return read(model[key])
    except _WrongError as error:
        mistakes.add(error.args[0])
        return None


def _parameter(
    name: str,
    entry: Any,
    mesh: Mapping[str, int],
    dtype: np.dtype[Any] | None,
    spec: Sequence[SpecEntry],
) -> Parameter:
    if not isinstance(entry, dict):
        raise _WrongError(f'expected is {{"shape": [...], ...}}, not {_short(entry)}')
    wrong = [_unknown_key(key, _OF_A_PARAMETER) for key in entry.keys() - {*_OF_A_PARAMETER}]
    values: dict[str, Any] = {"dtype": dtype, "spec": spec}
    for key, read in (("shape", _shape_of), ("dtype", _dtype_of), ("spec", _spec_of)):
        try:
            if key in entry:
                values[key] = read(entry[key])
        except _WrongError as error:
            wrong += error.args
    if "shape" not in entry:
        wrong.append('there is no "shape"')
    if "dtype" not in entry and dtype is None:
        wrong.append('there is no "dtype", here or for all parameters')
    if wrong:
        raise _WrongError(*wrong)
    try:
        grid = plan_grid(values["shape"], values["dtype"], mesh, values["spec"])
    except MistakesError as error:
        raise _WrongError(str(error)) from None
    return Parameter(name, values["dtype"], grid)


def _shape_of(given: Any) -> Shape:
    if not isinstance(given, list) or not all(type(size) is int for size in given):
        raise _WrongError(f'"shape" must be a list of integers, not {_short(given)}')
    if any(not 0 <= size < 2**63 for size in given):
        raise _WrongError(f'"shape" is {_short(given)}; sizes are from 0 to 2**63 - 1')
    return tuple(given)


def _dtype_of(given: Any) -> np.dtype[Any]:
    if not isinstance(given, str):
        raise _WrongError(f'"dtype" must be a name such as "bfloat16", not {_short(given)}')
    try:
        return _known_dtype(given)
    except MisreadError as error:
        raise _WrongError(f'"dtype" {error}') from None


_known_dtype = lru_cache(maxsize=256)(parse_dtype)


def _spec_of(given: Any) -> tuple[SpecEntry, ...]:
    if given is None:
        return ()
    try:
        if isinstance(given, str):
            return parse_spec(given)
        if isinstance(given, list):
            given = [None if entry == "_" else entry for entry in given]
        return check_spec(given, (0,) * len(given) if isinstance(given, list) else ())
    except MisreadError as error:
        raise _WrongError(f'"spec" {error}') from None
    except (TypeError, ValueError) as error:
        raise _WrongError(str(error)) from None


# Words.


def _unknown_key(key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {_named(near)}?" if near else f"known are {_named(known)}"
    return f"{_named([key])} is not known; {hint}"


def _named(keys: Iterable[str]) -> str:
    return ", ".join(json.dumps(key[:60]) for key in keys)


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", type(None): "null"}
    return kinds.get(type(value), _short(value))


def _short(value: Any) -> str:
    return reprlib.repr(value)
