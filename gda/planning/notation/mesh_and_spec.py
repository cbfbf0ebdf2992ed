"""The parsers for a mesh and a spec on a command line.

A text that cannot be read raises ``MisreadError``. ``ShardGrid`` checks that a spec fits a shape
and a mesh.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gda.planning.notation.mistakes import MisreadError
from gda.planning.notation.numbers import inside_brackets, number_in

if TYPE_CHECKING:
    from gda.layout.spec import SpecEntry

# A dimension without axes in a spec: here, in Python and in JSON. No axis can have such a name.
NOT_SHARDED = ("_", "None", "null")

_MOST_LETTERS = 10_000
_NAME = r"[^\s()\[\]{},+=:'\"]+"
_QUOTED = r"""(?:'[^']+'|"[^"]+")"""
_AXIS = re.compile(rf"""\s*(['"]?)(?P<name>{_NAME})\1\s*[=:](?P<size>.*)""", re.DOTALL)
_PASTED = re.compile(r"\s*(?:[\w.]*\.)?(?:P|PartitionSpec)\s*\((?P<entries>.*)\)\s*", re.DOTALL)
_ITEMS = rf"(?:\s*{_QUOTED}\s*(?:,|(?=[)\]])))*\s*"
_PASTED_ENTRY = re.compile(rf"\s*(?:None|{_QUOTED}|\({_ITEMS}\)|\[{_ITEMS}\])\s*(?:,|\Z)")


def parse_mesh(text: str) -> dict[str, int]:
    """Return the sizes of mesh axes by name: ``data=64,model=16``, also with ``:`` as in Python."""
    mesh: dict[str, int] = {}
    _check_length(text)
    start, inside = inside_brackets(text, "{")
    for at, part in _parts(text, start, inside.rstrip().removesuffix(",")):
        axis = _AXIS.fullmatch(part)
        if axis is None:
            raise MisreadError("an axis with its size was expected, such as data=64", text, at)
        name = axis["name"]
        if name in NOT_SHARDED:
            reason = f"no axis can have the name {name}: in a spec it means 'not sharded'"
            raise MisreadError(reason, text, at)
        if name in mesh:
            reason = f"axis {name!r} is given twice; every axis has one size"
            raise MisreadError(reason, text, at)
        mesh[name] = number_in(text, axis["size"], at + axis.start("size"), "size", least=1)
    return mesh


def parse_spec(text: str) -> tuple[SpecEntry, ...]:
    """Return a spec: one entry for each dimension, between commas.

    An entry is an axis (``data``), several that shard one dimension (``data+model``), or ``_`` for
    a dimension that is not sharded. Dimensions at the end may be omitted; an empty text shards
    none. ``P(...)`` of Python may be pasted.
    """
    _check_length(text)
    if pasted := _PASTED.fullmatch(text):
        return tuple(_pasted_entries(text, *pasted.span("entries")))
    parts = _parts(text, 0, text) if text.strip() else ()
    return tuple(_entry(text, at, part) for at, part in parts)


def _check_length(text: str) -> None:
    if len(text) > _MOST_LETTERS:
        raise MisreadError(f"it has more than {_MOST_LETTERS:,} characters", text, len(text))


def _parts(text: str, start: int, inside: str) -> Iterator[tuple[int, str]]:
    """Yield the parts between commas, without spaces, each after its position in the text."""
    for part in inside.split(","):
        yield start + len(part) - len(part.lstrip()), part.strip()
        start += len(part) + 1


def _entry(text: str, at: int, part: str) -> SpecEntry:
    if part == "_":
        return None
    names = part.split("+")
    for name in names:
        if not re.fullmatch(rf"\s*{_NAME}\s*", name) or name.strip() in NOT_SHARDED:
            reason = (
                "axes have no quotes and no brackets, except in P('data', None): write data,model, "
                "or data+model if both shard one dimension"
                if re.search(r"['\"()\[\]]", name)
                else "the name of a mesh axis was expected, or _ for a dimension that is not "
                "sharded, with commas between dimensions"
            )
            raise MisreadError(reason, text, at)
        at += len(name) + 1
    return names[0].strip() if len(names) == 1 else tuple(name.strip() for name in names)


def _pasted_entries(text: str, start: int, end: int) -> Iterator[SpecEntry]:
    while text[start:end].strip():
        entry = _PASTED_ENTRY.match(text, start, end)
        names = [] if entry is None else [name[1:-1] for name in re.findall(_QUOTED, entry[0])]
        if entry is None or {*NOT_SHARDED} & {*names}:
            at = start + len(text[start:end]) - len(text[start:end].lstrip())
            reason = "in P(...), the name of a mesh axis in quotes was expected, or None"
            raise MisreadError(reason, text, at)
        yield names[0] if len(names) == 1 else tuple(names) or None
        start = entry.end()
