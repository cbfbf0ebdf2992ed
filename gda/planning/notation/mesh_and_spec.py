"""The parsers for a mesh and a spec on a command line.

A text that cannot be read raises ``MisreadError``. ``ShardGrid`` checks that a spec fits a shape
and a mesh, and suggests specs that do.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar

from gda.planning.notation.mistakes import MisreadError
from gda.planning.notation.numbers import number_in

if TYPE_CHECKING:
    from gda.layout.spec import SpecEntry

T = TypeVar("T")

# A dimension without axes in a spec: here, in Python and in JSON. No axis can have such a name.
NOT_SHARDED = ("_", "None", "null")

_MOST_LETTERS = 10_000
_CALLS = ("P", "PartitionSpec")
_CLOSING = {"(": ")", "[": "]"}


def parse_mesh(text: str) -> dict[str, int]:
    """Return the sizes of mesh axes by name: ``data=64,model=16``, also with ``:`` as in Python."""
    scan = _Scanner(text)
    mesh: dict[str, int] = {}
    closing = "}" if scan.skip("{") else ""
    while True:
        name = scan.next
        if not name.text or name.kind == "mark":
            scan.fail("an axis with its size was expected, such as data=64")
        if name.text in NOT_SHARDED:
            scan.fail(f"no axis can have the name {name.text}: in a spec it means 'not sharded'")
        if name.text in mesh:
            scan.fail(f"axis {name.text!r} is given twice; every axis has one size")
        scan.advance()
        if not (scan.skip("=") or scan.skip(":")):
            scan.fail(f"the size of axis {name.text!r} was expected, such as {name.text}=8")
        size = scan.next
        mesh[name.text] = number_in(text, size.text, size.position, "size", least=1)
        scan.advance()
        comma = scan.skip(",")
        if (closing and scan.skip(closing)) or (not closing and scan.is_done):
            break
        if not comma:
            scan.fail("a comma and the next axis were expected, such as data=64,model=16")
    if not scan.is_done:
        scan.fail("the mesh ends before this; omit the rest")
    return mesh


def parse_spec(text: str) -> tuple[SpecEntry, ...]:
    """Return a spec: one entry for each dimension, between commas.

    An entry is an axis (``data``), several that shard one dimension (``data+model``), or ``_`` for
    a dimension that is not sharded. Dimensions at the end may be omitted; an empty text shards
    none. ``P(...)`` of Python may be pasted.
    """
    scan = _Scanner(text)
    entries = () if scan.is_done else _pasted(scan) if scan.is_call else _entries(scan)
    if not scan.is_done:
        scan.fail("the spec ends before this; entries have a comma between them")
    return entries


def _entries(scan: _Scanner) -> tuple[SpecEntry, ...]:
    entries = [_entry(scan)]
    while scan.skip(","):
        entries.append(_entry(scan))
    return tuple(entries)


def _entry(scan: _Scanner) -> SpecEntry:
    if scan.skip("_"):
        if scan.next.is_mark("+"):
            scan.fail("a dimension that is not sharded has no axis")
        return None
    names = [_name(scan)]
    while scan.skip("+"):
        names.append(_name(scan))
    return names[0] if len(names) == 1 else tuple(names)


def _name(scan: _Scanner) -> str:
    name = scan.next
    if name.is_quoted or scan.is_opening:
        scan.fail(
            "axes have no quotes and no brackets, except in P('data', None): write data,model, or "
            "data+model if both shard one dimension"
        )
    if name.kind != "word" or name.text in NOT_SHARDED:
        scan.fail("the name of a mesh axis was expected, or _ for a dimension that is not sharded")
    scan.advance()
    return name.text


def _pasted(scan: _Scanner) -> tuple[SpecEntry, ...]:
    scan.advance()
    return tuple(_items(scan, _pasted_entry))


def _pasted_entry(scan: _Scanner) -> SpecEntry:
    if scan.is_opening:
        names = _items(scan, _quoted_name)
        return names[0] if len(names) == 1 else tuple(names) or None
    return None if scan.skip("None") else _quoted_name(scan)


def _items(scan: _Scanner, item: Callable[[_Scanner], T]) -> list[T]:
    closing = _CLOSING[scan.next.text]
    scan.advance()
    items: list[T] = []
    while not scan.skip(closing):
        items.append(item(scan))
        if not scan.skip(",") and not scan.next.is_mark(closing):
            scan.fail(f"a comma or {closing} was expected")
    return items


def _quoted_name(scan: _Scanner) -> str:
    name = scan.next
    if not name.is_quoted or not name.text or name.text in NOT_SHARDED:
        scan.fail("in P(...), the name of a mesh axis in quotes was expected, or None")
    scan.advance()
    return name.text


class _Token(NamedTuple):
    """A part of a text: its ``kind`` is ``mark``, ``word``, ``quoted`` or ``end``."""

    text: str
    position: int
    kind: str

    @property
    def is_quoted(self) -> bool:
        return self.kind == "quoted"

    def is_mark(self, mark: str) -> bool:
        return self.kind == "mark" and self.text == mark


_TOKEN = re.compile(
    r"""\s*(?:(?P<mark>[()\[\]{},+=:])|(?P<quote>['"])(?P<quoted>.*?)(?P=quote)|"""
    r"""(?P<word>[^\s()\[\]{},+=:'"]+)|(?P<stray>['"])|$)""",
    re.DOTALL,
)


class _Scanner:
    """Marks, names and quoted names of a text, one after the other."""

    def __init__(self, text: str) -> None:
        if len(text) > _MOST_LETTERS:
            raise MisreadError(f"it has more than {_MOST_LETTERS:,} characters", text, len(text))
        self.text = text
        self.tokens: list[_Token] = []
        for match in _TOKEN.finditer(text):
            kind = match.lastgroup
            if kind == "stray":
                raise MisreadError("this quote is not closed", text, match.start(kind))
            if kind:
                at = match.start(kind) - (kind == "quoted")  # of the quote
                self.tokens.append(_Token(match[kind], at, kind))
        self._end = _Token("", len(text.rstrip()), "end")
        self._at = 0

    @property
    def next(self) -> _Token:
        return self.tokens[self._at] if self._at < len(self.tokens) else self._end

    @property
    def is_done(self) -> bool:
        return self.next is self._end

    @property
    def is_opening(self) -> bool:
        """A bracket of a tuple or a list comes next."""
        return self.next.kind == "mark" and self.next.text in _CLOSING

    @property
    def is_call(self) -> bool:
        """The text begins like ``P(``."""
        name, bracket = [*self.tokens, self._end, self._end][:2]
        return name.text.rpartition(".")[2] in _CALLS and bracket.is_mark("(")

    def advance(self) -> None:
        self._at += 1

    def skip(self, text: str) -> bool:
        """Pass over a mark, or a word without quotes, if it comes next; return True if it did."""
        found = self.next.text == text and not self.next.is_quoted
        self._at += found
        return found

    def fail(self, message: str) -> NoReturn:
        raise MisreadError(message, self.text, self.next.position)
