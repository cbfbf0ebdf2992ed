"""The parsers for a mesh and a spec on a command line.

A text that cannot be read raises ``MisreadError``. ``ShardGrid`` checks that a spec fits a shape
and a mesh.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gda.planning.notation.mistakes import MisreadError
from gda.planning.notation.numbers import number_in

if TYPE_CHECKING:
    from gda.layout.spec import SpecEntry

_NAME = r"[^\s()\[\]{},+=:'\"]+"
_QUOTED = r"""(?:'[^']+'|"[^"]+")"""
_AXIS = re.compile(rf"\s*(?P<name>{_NAME})\s*=(?P<size>.*)", re.DOTALL)
_PASTED = re.compile(r"\s*(?:[\w.]*\.)?(?:P|PartitionSpec)\s*\((?P<entries>.*)\)\s*", re.DOTALL)
_ITEMS = rf"(?:\s*{_QUOTED}\s*(?:,|(?=[)\]])))*\s*"
_PASTED_ENTRY = re.compile(rf"\s*(?:None|{_QUOTED}|\({_ITEMS}\)|\[{_ITEMS}\])\s*(?:,|\Z)")


def parse_mesh(text: str) -> dict[str, int]:
    """Return the sizes of mesh axes by name: ``data=64,model=16``."""
    mesh: dict[str, int] = {}
    for at, part in _parts(text):
        axis = _AXIS.fullmatch(part)
        if axis is None or axis["name"] == "_" or axis["name"] in mesh:
            reason = "an axis with its size was expected, such as data=64, each once"
            raise MisreadError(reason, text, at)
        size = number_in(text, axis["size"], at + axis.start("size"), "size", least=1)
        mesh[axis["name"]] = size
    return mesh


def parse_spec(text: str) -> tuple[SpecEntry, ...]:
    """Return a spec: one entry for each dimension, between commas.

    An entry is an axis (``data``), several that shard one dimension (``data+model``), or ``_`` for
    a dimension that is not sharded. Dimensions at the end may be omitted; an empty text shards
    none. ``P(...)`` of Python may be pasted.
    """
    if pasted := _PASTED.fullmatch(text):
        return tuple(_pasted_entries(text, *pasted.span("entries")))
    parts = _parts(text) if text.strip() else ()
    return tuple(_entry(text, at, part) for at, part in parts)


def _parts(text: str) -> Iterator[tuple[int, str]]:
    """Yield the parts between commas, without spaces, each after its position in the text."""
    start = 0
    for part in text.split(","):
        yield start + len(part) - len(part.lstrip()), part.strip()
        start += len(part) + 1


def _entry(text: str, at: int, part: str) -> SpecEntry:
    if part == "_":
        return None
    names = part.split("+")
    for name in names:
        if not re.fullmatch(rf"\s*{_NAME}\s*", name) or name.strip() == "_":
            reason = (
                "the name of a mesh axis was expected, or _ for a dimension that is not sharded: "
                "write data,model, or data+model if both shard one dimension"
            )
            raise MisreadError(reason, text, at)
        at += len(name) + 1
    return names[0].strip() if len(names) == 1 else tuple(name.strip() for name in names)


def _pasted_entries(text: str, start: int, end: int) -> Iterator[SpecEntry]:
    while text[start:end].strip():
        entry = _PASTED_ENTRY.match(text, start, end)
        if entry is None:
            at = start + len(text[start:end]) - len(text[start:end].lstrip())
            reason = "in P(...), the name of a mesh axis in quotes was expected, or None"
            raise MisreadError(reason, text, at)
        names = [name[1:-1] for name in re.findall(_QUOTED, entry[0])]
        yield names[0] if len(names) == 1 else tuple(names) or None
        start = entry.end()
