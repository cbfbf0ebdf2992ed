"""Meshes and specs as people write them on a command line.

What cannot be read raises ``MisreadError``. Whether a spec goes with a shape and a mesh is not
asked here: ``ShardGrid`` says that, and says what would.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from gda.cli.mistakes import MisreadError
from gda.cli.numbers import number_in, parse_shape

if TYPE_CHECKING:
    from gda.layout.spec import SpecEntry

# What stands for no axis in a spec, in quotes too, as in the lists of JSON.
NOT_CUT = ("_", "None", "null")

_CALLS = ("P", "PartitionSpec")
_AXES = "xyzw"  # in proposals


def parse_mesh(text: str) -> dict[str, int]:
    """Return the sizes of mesh axes by name: ``data=64,model=16``, also with ``:``, as in Python.

    Raises:
      MisreadError: it is none of these, names an axis twice, or has a size below 1.

    >>> parse_mesh('data=64,model=16') == parse_mesh("{'data': 64, 'model': 16}")
    True
    """
    scan = _Scanner(text)
    if proposed := _with_names(text):
        scan.fail(f"an axis with its size was expected; did you mean {proposed}?")
    mesh: dict[str, int] = {}
    closing = "}" if scan.skip("{") else ""
    while True:
        name = scan.next
        if not name.is_name:
            scan.fail("an axis with its size was expected, such as data=64")
        if name.text in NOT_CUT:
            scan.fail(f"no axis can have the name {name.text}: in a spec it says 'not cut'")
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
        scan.fail("this comes after the end of the mesh")
    return mesh


def _with_names(text: str) -> str:
    """Return a mesh of some sizes, or nothing if a text is not sizes alone.

    >>> _with_names('4x2'), _with_names('x=4')
    ('x=4,y=2', '')
    """
    try:
        sizes = parse_shape(text)
    except MisreadError:
        return ""
    if len(sizes) > len(_AXES) or 0 in sizes:
        return ""
    return ",".join(f"{name}={size}" for name, size in zip(_AXES, sizes, strict=False))


def parse_spec(text: str) -> tuple[SpecEntry, ...]:
    """Return a spec: one entry for each dimension, between commas.

    An entry is an axis (``data``), several that cut one dimension (``(data,model)`` or, without the
    need of quotes in a shell, ``data+model``), or not cut (``_`` or ``None``). Dimensions at the
    end may be left out; an empty text cuts none. Around all entries may stand square brackets, as
    in JSON, or ``P(...)``, as in Python; round brackets are around the axes of one entry.

    Raises:
      MisreadError: it is none of these.

    >>> parse_spec('data,model'), parse_spec('(data,model),_'), parse_spec("P('data', None)")
    (('data', 'model'), (('data', 'model'), None), ('data', None))
    >>> parse_spec('_,data+model'), parse_spec('["data", "model"]'), parse_spec('')
    ((None, ('data', 'model')), ('data', 'model'), ())
    """
    scan = _Scanner(text)
    closing = ""
    if scan.next.text.rpartition(".")[2] in _CALLS and scan.after_next.is_mark("("):
        scan.advance()
        closing = ")"
    elif scan.is_in_square_brackets:
        closing = "]"
    if closing:
        scan.advance()
    entries: list[SpecEntry] = []

    def is_at_end() -> bool:
        return scan.next.is_mark(closing) if closing else scan.is_done

    while not is_at_end():
        entries.append(_parse_entry(scan))
        if not scan.skip(",") and not is_at_end():
            scan.fail(
                f"a comma {f'or {closing}' if closing else 'and the next entry'} was expected"
            )
    if closing:
        scan.advance()
        if not scan.is_done:
            scan.fail("this comes after the end of the spec")
    return tuple(entries)


def _parse_entry(scan: _Scanner) -> SpecEntry:
    for brackets in ("()", "[]"):
        if scan.skip(brackets[0]):
            names = _parse_group(scan, brackets[1])
            return names[0] if len(names) == 1 else tuple(names) or None
    if scan.next.is_name and scan.next.text in NOT_CUT:
        scan.advance()
        if scan.next.is_mark("+"):
            scan.fail("what is not cut cannot be cut by an axis too")
        return None
    names = [_parse_name(scan)]
    while scan.skip("+"):
        names.append(_parse_name(scan))
    return names[0] if len(names) == 1 else tuple(names)


def _parse_group(scan: _Scanner, closing: str) -> list[str]:
    names = []
    while not scan.skip(closing):
        names.append(_parse_name(scan, is_in_group=True))
        if not (scan.skip(",") or scan.skip("+") or scan.next.is_mark(closing)):
            scan.fail(f"a comma or {closing} was expected")
    return names


def _parse_name(scan: _Scanner, *, is_in_group: bool = False) -> str:
    name = scan.next
    if name.is_name and name.text not in NOT_CUT:
        scan.advance()
        return name.text
    if is_in_group:
        scan.fail(
            "brackets are around axes that cut one dimension together, and a name was expected; "
            "one entry per dimension is written without them, such as data,_"
        )
    return scan.fail("the name of a mesh axis was expected, or _ for a dimension that is not cut")


def is_bare_group(text: str) -> bool:
    """Whether a spec is one entry that looks like several: ``(data,model)``.

    Raises:
      MisreadError: it cannot be read.

    >>> is_bare_group('(data,model)'), is_bare_group('(data,model),_'), is_bare_group('data+model')
    (True, False, False)
    """
    entries = parse_spec(text)
    is_one = len(entries) == 1 and isinstance(entries[0], tuple)
    return is_one and text.strip().startswith("(") and "+" not in text


class _Token(NamedTuple):
    text: str
    position: int
    kind: str

    @property
    def is_name(self) -> bool:
        return self.kind in ("one", "two", "word") and bool(self.text)

    def is_mark(self, mark: str) -> bool:
        return self.kind == "mark" and self.text == mark


_TOKEN = re.compile(
    r"""\s*(?:(?P<mark>[()\[\]{},+=:])|'(?P<one>[^']*)'|"(?P<two>[^"]*)"|"""
    r"""(?P<word>[^\s()\[\]{},+=:'"]+)|(?P<stray>['"])|$)"""
)


class _Scanner:
    """Marks, names and quoted names of a text, one after the other."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[_Token] = []
        for match in _TOKEN.finditer(text):
            kind = match.lastgroup
            if kind == "stray":
                raise MisreadError("this quote is not closed", text, match.start(kind))
            if kind:
                at = match.start(kind) - (kind in ("one", "two"))  # where the quote is
                self._tokens.append(_Token(match[kind], at, kind))
        self._end = _Token("", len(text.rstrip()), "end")
        self._at = 0

    @property
    def next(self) -> _Token:
        return self._tokens[self._at] if self._at < len(self._tokens) else self._end

    @property
    def after_next(self) -> _Token:
        return self._tokens[self._at + 1] if self._at + 1 < len(self._tokens) else self._end

    @property
    def is_done(self) -> bool:
        return self.next is self._end

    @property
    def is_in_square_brackets(self) -> bool:
        """Whether a pair of them is around all of the text, not around its first entry only."""
        if not self._tokens or not self._tokens[0].is_mark("["):
            return False
        depth = 0
        for number, token in enumerate(self._tokens, 1):
            depth += token.is_mark("[") - token.is_mark("]")
            if not depth:
                return number == len(self._tokens)
        return False

    def advance(self) -> None:
        self._at += 1

    def skip(self, mark: str) -> bool:
        """Whether this mark comes next; it is passed over."""
        found = self.next.is_mark(mark)
        self._at += found
        return found

    def fail(self, message: str) -> NoReturn:
        raise MisreadError(message, self._text, self.next.position)
