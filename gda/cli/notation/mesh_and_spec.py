"""The parsers for a mesh and a spec on a command line.

A text that cannot be read raises ``MisreadError``. ``ShardGrid`` checks that a spec fits a shape
and a mesh.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gda.cli.notation.mistakes import MisreadError
from gda.cli.notation.numbers import number_in

if TYPE_CHECKING:
    from gda.layout.spec import SpecEntry

_NAME = r"[^\s()\[\]{},+=:'\"]+"
_AXIS = re.compile(rf"\s*(?P<name>{_NAME})\s*=(?P<size>.*)", re.DOTALL)
_PASTED = re.compile(r"\s*(?:[\w.]*\.)?(?:P|PartitionSpec)\s*\((?P<entries>.*)\)\s*", re.DOTALL)


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
        try:
            return tuple(ast.literal_eval(f"[{pasted['entries']}]"))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            reason = "in P(...), the names of mesh axes in quotes were expected, or None"
            raise MisreadError(reason, text, pasted.start("entries")) from None
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
