"""The parsers for meshes and specs on a command line.

A text that cannot be read raises ``MisreadError``. ``ShardGrid`` checks that a spec fits a shape
and a mesh, and suggests specs that do.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar

from gda.planning.notation.mistakes import MisreadError
from gda.planning.notation.numbers import number_in, parse_shape

if TYPE_CHECKING:
    from gda.layout.spec import SpecEntry

T = TypeVar("T")

# A dimension without axes in a spec: here, in Python and in JSON. No axis can have such a name.
NOT_SHARDED = ("_", "None", "null")

_CALLS = ("P", "PartitionSpec")
_LONGEST = 72  # characters of a suggestion
_CLOSING = {"(": ")", "[": "]"}
_AXES = "xyzw"  # in suggestions


def parse_mesh(text: str) -> dict[str, int]:
    """Return the sizes of mesh axes by name: ``data=64,model=16``, also with ``:`` as in Python."""
    scan = _Scanner(text)
    if proposed := _with_names(text):
        scan.fail(f"an axis with its size was expected; did you mean {proposed}?")
    mesh: dict[str, int] = {}
    closing = "}" if scan.skip("{") else ""
    while True:
        name = scan.next
        if not name.is_name:
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


def _with_names(text: str) -> str:
    """Return a mesh of these sizes, ``x=4,y=2`` for ``4x2``; empty if it has more than sizes."""
    try:
        sizes = parse_shape(text)
    except MisreadError:
        return ""
    if len(sizes) > len(_AXES) or 0 in sizes:
        return ""
    return ",".join(f"{name}={size}" for name, size in zip(_AXES, sizes, strict=False))


def parse_spec(text: str) -> tuple[SpecEntry, ...]:
    """Return a spec: one entry for each dimension, between commas.

    An entry is an axis (``data``), several that shard one dimension (``data+model``), or ``_`` for
    a dimension that is not sharded. Dimensions at the end may be omitted; an empty text shards
    none. Literals of Python and JSON are read as well; in these, names are in quotes. The error
    suggests a spec if one is likely.
    """
    scan = _Scanner(text)
    try:
        return _literal(scan) if scan.is_call or scan.is_opening else _entries(scan)
    except MisreadError as error:
        message = f"{error.message}{_right_way(text)}"
        raise MisreadError(message, text, error.position) from None


def _entries(scan: _Scanner) -> tuple[SpecEntry, ...]:
    if scan.is_done:
        return ()
    entries = [_entry(scan)]
    while scan.skip(","):
        entries.append(_entry(scan))
    if not scan.is_done:
        scan.fail("a comma and the next entry were expected")
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
    if name.is_quoted:
        scan.fail("a name in quotes must be in brackets, as in Python and JSON")
    if name.kind != "word" or name.text in NOT_SHARDED:
        scan.fail("the name of a mesh axis was expected, or _ for a dimension that is not sharded")
    scan.advance()
    return name.text


def _literal(scan: _Scanner) -> tuple[SpecEntry, ...]:
    start = scan.next
    if scan.is_call:
        scan.advance()
    entries = _items(scan, _literal_entry)
    if not scan.is_done:
        scan.fail("the spec ends before this")
    if start.is_mark("(") and len(entries) == 1 and not scan.tokens[-2].is_mark(","):
        raise MisreadError("this is not a tuple in Python", scan.text, start.position)
    return tuple(entries)


def _items(scan: _Scanner, item: Callable[[_Scanner], T]) -> list[T]:
    closing = _CLOSING[scan.next.text]
    scan.advance()
    items: list[T] = []
    while not scan.skip(closing):
        items.append(item(scan))
        if not scan.skip(",") and not scan.next.is_mark(closing):
            scan.fail(f"a comma or {closing} was expected")
    return items


def _literal_entry(scan: _Scanner) -> SpecEntry:
    if scan.is_opening:
        names = _items(scan, _quoted_name)
        return names[0] if len(names) == 1 else tuple(names) or None
    if scan.skip("null" if _is_json(scan.text) else "None"):
        return None
    return _quoted_name(scan)


def _quoted_name(scan: _Scanner) -> str:
    name = scan.next
    if not name.is_quoted or not name.text or name.text in NOT_SHARDED:
        scan.fail("in brackets, the name of a mesh axis in quotes was expected, or None")
    scan.advance()
    return name.text


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _right_way(text: str) -> str:
    """Return a hint with the likely spec for a text that cannot be read, if there is one."""
    scan = _Scanner(text)
    tokens = scan.tokens[scan.is_call :]
    steps = [(token.text in _CLOSING) - (token.text in _CLOSING.values()) for token in tokens]
    depths = list(itertools.accumulate(steps))
    is_around = bool(tokens) and depths[0] == 1 and 0 not in depths[:-1]
    ways = [_in_notation(tokens, depths, outermost=int(is_around))]
    if is_around and tokens[0].is_mark("(") and max(depths) == 1 and not scan.is_call:
        ways.insert(0, _in_notation(tokens, depths, outermost=0))
    ways = [way for way in dict.fromkeys(ways) if way and way != text.strip()]
    uses = ("if all of these shard one dimension", "if each shards its own")
    if len(ways) == 2:
        ways = [f"{way} {use}" for way, use in zip(ways, uses, strict=True)]
    return f"; write {', or '.join(ways)}" if ways else ""


def _in_notation(tokens: Sequence[_Token], depths: Sequence[int], outermost: int) -> str:
    """Return the spec whose entries end at commas in at most ``outermost`` brackets, or nothing."""
    entries: list[list[str]] = []
    before = ","
    for token, depth in zip(tokens, depths, strict=True):
        if token.kind != "mark":
            if before != "+" or not entries:  # also where a comma is missing
                entries.append([])
            entries[-1] += [token.text] if token.text not in NOT_SHARDED else []
            before = "a name"
        elif token.text in ",+":
            separates = token.text == "," and depth <= outermost
            if separates and before == ",":
                entries.append([])  # between two commas
            before = "," if separates else "+"
        elif token.text in "{}=:":
            return ""
    text = ",".join("+".join(names) or "_" for names in entries)
    try:
        _entries(_Scanner(text))
    except MisreadError:
        return ""
    return text if text.isprintable() and len(text) <= _LONGEST else ""


class _Token(NamedTuple):
    text: str
    position: int
    kind: str

    @property
    def is_quoted(self) -> bool:
        return self.kind in ("one", "two")

    @property
    def is_name(self) -> bool:
        return (self.is_quoted or self.kind == "word") and bool(self.text)

    def is_mark(self, mark: str) -> bool:
        return self.kind == "mark" and self.text == mark


_TOKEN = re.compile(
    r"""\s*(?:(?P<mark>[()\[\]{},+=:])|'(?P<one>[^']*)'|"(?P<two>[^"]*)"|"""
    r"""(?P<word>[^\s()\[\]{},+=:'"]+)|(?P<stray>['"])|$)"""
)


class _Scanner:
    """Marks, names and quoted names of a text, one after the other."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[_Token] = []
        for match in _TOKEN.finditer(text):
            kind = match.lastgroup
            if kind == "stray":
                raise MisreadError("this quote is not closed", text, match.start(kind))
            if kind:
                at = match.start(kind) - (kind in ("one", "two"))  # of the quote
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
