"""Records of the types that their fields declare, from documents in JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def record_of(kind: type[T], document: Mapping[str, Any], place: str = "") -> T:
    """Return a dataclass or named tuple of the entries of a document; others are ignored.

    ``place`` is the path of the document in a larger one, for messages.

    Raises:
      ValueError: an entry is absent and its field has no default, or a value has another type than
        its field.
    """
    hints, fields = get_type_hints(kind), dict(_fields(kind))
    for name, has_default in fields.items():
        if name not in document and not has_default:
            raise ValueError(f"the document of a rehearsal has no {_joined(place, name)!r}")
    return kind(
        **{
            name: _value(hints[name], document[name], _joined(place, name))
            for name in fields
            if name in document
        }
    )


def _fields(kind: Any) -> Iterator[tuple[str, bool]]:
    """Yield the fields of a class, with True for those that have a default."""
    if not dataclasses.is_dataclass(kind):
        yield from ((name, name in kind._field_defaults) for name in kind._fields)
        return
    for each in dataclasses.fields(kind):
        yield each.name, each.default is not dataclasses.MISSING


def _value(hint: Any, given: Any, place: str) -> Any:
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _one_of(inside, given, place)
    if origin is tuple and isinstance(given, list | tuple):
        if inside[-1] is Ellipsis:
            inside = inside[:1] * len(given)
        if len(inside) == len(given):
            pairs = enumerate(zip(inside, given, strict=True))
            return tuple(_value(each, one, f"{place}[{n}]") for n, (each, one) in pairs)
    elif origin is dict and isinstance(given, Mapping):
        return {name: _value(inside[1], each, f"{place}[{name!r}]") for name, each in given.items()}
    elif _is_record(hint) and isinstance(given, Mapping):
        return record_of(hint, given, place)
    elif type(given) is hint or (hint is float and type(given) is int):
        return given
    raise ValueError(
        f"{place} of the document of a rehearsal is {given!r:.80}, but {_words(hint)} was expected"
    )


def _is_record(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or hasattr(hint, "_fields")


def _one_of(kinds: tuple[Any, ...], given: Any, place: str) -> Any:
    if given is None and NoneType in kinds:
        return None
    first, *others = [kind for kind in kinds if kind is not NoneType]
    for kind in others:
        try:
            return _value(kind, given, place)
        except ValueError:
            continue
    return _value(first, given, place)


def _words(hint: Any) -> str:
    words = {tuple: "a list", dict: "an object", int: "an integer", str: "a string"}
    words |= {bool: "true or false", float: "a number"}
    return words.get(get_origin(hint) or hint, "an object")


def _joined(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
