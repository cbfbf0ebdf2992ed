"""Shapes, meshes, specs and dtypes as people write them on a command line.

What cannot be read raises ``MisreadError``, which knows the place. Whether a spec goes with a shape
and a mesh is not asked here: ``ShardGrid`` says that, and says what would.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from gda.wording import printable

if TYPE_CHECKING:
    import numpy as np

    from gda.spec import Shape, SpecEntry

T = TypeVar("T")

# What stands for no axis in a spec.
NOT_CUT = ("_", "None", "null")

_SHOWN = 72  # characters of a text that fit beside its caret

# JAX's short names and those of other tools. Not here: i8, u8, i4, u4, f8, c8, c16, which count
# bits to JAX and bytes to NumPy.
_SHORT_DTYPES = {
    "bf16": "bfloat16",
    "pred": "bool",
    **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"fp{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"{short}{bits}": f"int{bits}" for short in "is" for bits in (16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (16, 32, 64)},
    **{f"c{bits}": f"complex{bits}" for bits in (64, 128)},
}
_NUMPY_DTYPES = {"bool", *_SHORT_DTYPES.values(), "int8", "uint8"} - {"bfloat16"}
_OF_ML_DTYPES = re.compile(r"(b?float|u?int)\d\w*")
_BITS_OR_BYTES = {
    "i8": ("int8", "int64"),
    "u8": ("uint8", "uint64"),
    "i4": ("int4", "int32"),
    "u4": ("uint4", "uint32"),
    "i2": ("int2", "int16"),
    "u2": ("uint2", "uint16"),
}


class MisreadError(ValueError):
    """A text cannot be read; ``message`` says why, ``position`` is the character where."""

    def __init__(self, message: str, text: str, position: int) -> None:
        where = f" at {text[position:][:20]!r}" if text[position:].strip() else ""
        quoted = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
        super().__init__(f"{quoted!r} cannot be read{where}: {message}")
        self.message = message
        self.text = text
        self.position = position

    def lines(self, name: str) -> list[str]:
        """Return what to say of the option ``name``: the reason, the text and a caret below it.

        >>> print(*MisreadError('a size was expected', '8xx2', 2).lines('--shape'), sep='\\n')
        --shape: a size was expected
          8xx2
            ^
        """
        before, after = printable(self.text[: self.position]), printable(self.text[self.position :])
        if len(before) > _SHOWN // 2:
            before = f"…{before[1 - _SHOWN // 2 :]}"
        if len(after) > _SHOWN - len(before):
            after = f"{after[: _SHOWN - 1 - len(before)]}…"
        return [f"{name}: {self.message}", f"  {before}{after}", f"  {' ' * len(before)}^"]


class MistakesError(ValueError):
    """What is wrong with a command, in ``lines`` for a terminal."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


def read_option(name: str, text: str, parse: Callable[[str], T]) -> T:
    """Return ``parse(text)``; what cannot be read becomes the lines to say of the option.

    Raises:
      MistakesError: the text cannot be read.
    """
    try:
        return parse(text)
    except MisreadError as error:
        raise MistakesError(*error.lines(name)) from None


# Numbers.


def parse_shape(text: str) -> Shape:
    """Return a shape: ``65536x8192``, ``65536,8192`` or ``(65536, 8192)``; ``()`` or ``scalar``.

    Raises:
      MisreadError: it is none of these, or a size is negative or not below 2**63.

    >>> parse_shape('65536x8192'), parse_shape('(65_536,)'), parse_shape('scalar')
    ((65536, 8192), (65536,), ())
    """
    if text.strip() == "scalar":
        return ()
    return _parse_numbers(text, "size", "a shape such as 65536x8192, or () for a scalar")


def parse_point(text: str) -> tuple[int, ...]:
    """Return the coordinates of an element: ``5,7`` or ``(5, 7)``; ``()`` of a scalar.

    Raises:
      MisreadError: it is none of these, or a coordinate is negative or not below 2**63.

    >>> parse_point('5,7')
    (5, 7)
    """
    return _parse_numbers(text, "coordinate", "an element such as 5,7, or () of a scalar")


def parse_number(text: str) -> int:
    """Return an integer from 0 to 2**63 - 1: ``128`` or ``65_536``.

    Raises:
      MisreadError: it is none.

    >>> parse_number('65_536')
    65536
    """
    return _number(text, text, 0, "number")


def _parse_numbers(text: str, one: str, expected: str) -> tuple[int, ...]:
    start, stop = _inside_brackets(text)
    if not text[start:stop].strip():
        if start == len(text) - len(text.lstrip()):
            raise MisreadError(f"{expected} was expected", text, start)
        return ()
    numbers = []
    for match in re.finditer(r"([^x,]*)([x,]|$)", text[start:stop]):
        part, separator = match.groups()
        at = start + match.start()
        if numbers and not separator and not part.strip() and text[at - 1] == ",":
            break  # as in (8,)
        numbers.append(_number(text, part, at, one))
        if not separator:
            break
    return tuple(numbers)


def _inside_brackets(text: str) -> tuple[int, int]:
    """Return where the text within one pair of brackets around all of it begins and ends."""
    stripped = text.strip()
    start = len(text) - len(text.lstrip())
    stop = start + len(stripped)
    if stripped[:1] + stripped[-1:] in ("()", "[]") and len(stripped) > 1:
        return start + 1, stop - 1
    return start, stop


def _number(text: str, part: str, at: int, one: str) -> int:
    at += len(part) - len(part.lstrip())
    part = part.strip()
    if re.fullmatch(r"[0-9]+(_[0-9]+)*", part):
        digits = part.replace("_", "").lstrip("0")
        if len(digits) <= 19 and int(digits or 0) < 2**63:
            return int(digits or 0)
        raise MisreadError(f"this {one} is too large; it must be below 2**63", text, at)
    if re.fullmatch(r"-[0-9_]+", part):
        raise MisreadError(f"this {one} is negative; it must be 0 or more", text, at)
    if re.fullmatch(r"[0-9_.]+ ?[kKmMgG]i?[bB]?", part):
        raise MisreadError(
            f"a {one} is written out, such as 65536 or 65_536: k could be 1000 or 1024", text, at
        )
    raise MisreadError(f"a {one} was expected, an integer such as 8192 or 8_192", text, at)


# Meshes and specs.


def parse_mesh(text: str) -> dict[str, int]:
    """Return the sizes of mesh axes by name: ``data=64,model=16``, also with ``:``, as in Python.

    Raises:
      MisreadError: it is none of these, names an axis twice, or has a size of 0.

    >>> parse_mesh('data=64,model=16') == parse_mesh("{'data': 64, 'model': 16}")
    True
    """
    scan = _Scanner(text)
    mesh: dict[str, int] = {}
    closing = "}" if scan.skip("{") else ""
    while True:
        name = scan.next
        if not name.is_name:
            scan.fail("an axis with its size was expected, such as data=64")
        if name.text in NOT_CUT and not name.is_quoted:
            scan.fail(f"no axis can have the name {name.text}: in a spec it says 'not cut'")
        if name.text in mesh:
            scan.fail(f"axis {name.text!r} is given twice; every axis has one size")
        scan.advance()
        if not (scan.skip("=") or scan.skip(":")):
            scan.fail(f"the size of axis {name.text!r} was expected, such as {name.text}=8")
        size = scan.next
        mesh[name.text] = _number(text, size.text, size.position, "size")
        if not mesh[name.text]:
            scan.fail("an axis has at least one device")
        scan.advance()
        comma = scan.skip(",")
        if (closing and scan.skip(closing)) or (not closing and scan.is_done):
            break
        if not comma:
            scan.fail("a comma and the next axis were expected, such as data=64,model=16")
    if not scan.is_done:
        scan.fail("this comes after the end of the mesh")
    return mesh


_CALLS = ("P", "PartitionSpec")


def parse_spec(text: str) -> tuple[SpecEntry, ...]:
    """Return a spec: one entry for each dimension, between commas.

    An entry is an axis (``data``), several that cut one dimension (``(data,model)`` or, without the
    need of quotes in a shell, ``data+model``), or not cut (``_`` or ``None``). Dimensions at the
    end may be left out; an empty text cuts none. ``P('data', None)`` from Python is read as well.

    Raises:
      MisreadError: it is none of these.

    >>> parse_spec('data,model'), parse_spec('(data,model),_'), parse_spec("P('data', None)")
    (('data', 'model'), (('data', 'model'), None), ('data', None))
    >>> parse_spec('_,data+model'), parse_spec('')
    ((None, ('data', 'model')), ())
    """
    scan = _Scanner(text)
    is_call = scan.next.text.rpartition(".")[2] in _CALLS and scan.after_next.is_mark("(")
    if is_call:
        scan.advance()
        scan.advance()
    entries: list[SpecEntry] = []

    def is_at_end() -> bool:
        return scan.next.is_mark(")") if is_call else scan.is_done

    while not is_at_end():
        entries.append(_parse_entry(scan))
        if not scan.skip(",") and not is_at_end():
            scan.fail(f"a comma {'or )' if is_call else 'and the next entry'} was expected")
    if is_call:
        scan.advance()
        if not scan.is_done:
            scan.fail("this comes after the end of the spec")
    return tuple(entries)


def _parse_entry(scan: _Scanner) -> SpecEntry:
    opening = scan.next
    for brackets in ("()", "[]"):
        if scan.skip(brackets[0]):
            names = _parse_group(scan, brackets[1])
            return names[0] if len(names) == 1 else tuple(names) or None
    if opening.is_name and opening.text in NOT_CUT and not opening.is_quoted:
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
    if name.is_name and (name.is_quoted or name.text not in NOT_CUT):
        scan.advance()
        return name.text
    if is_in_group:
        scan.fail(
            "brackets are around axes that cut one dimension together, and a name was expected; "
            "one entry per dimension is written without them, such as data,_"
        )
    return scan.fail("the name of a mesh axis was expected, or _ for a dimension that is not cut")


class _Token(NamedTuple):
    text: str
    position: int
    kind: str

    @property
    def is_name(self) -> bool:
        return self.kind in ("word", "quoted") and bool(self.text)

    @property
    def is_quoted(self) -> bool:
        return self.kind == "quoted"

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
            if kind in ("one", "two"):
                self._tokens.append(_Token(match[kind], match.start(kind) - 1, "quoted"))
            elif kind:
                self._tokens.append(_Token(match[kind], match.start(kind), kind))
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

    def advance(self) -> None:
        self._at += 1

    def skip(self, mark: str) -> bool:
        """Whether this mark comes next; it is passed over."""
        found = self.next.is_mark(mark)
        self._at += found
        return found

    def fail(self, message: str) -> NoReturn:
        raise MisreadError(message, self._text, self.next.position)


# Types of elements.


def parse_dtype(text: str) -> np.dtype[Any]:
    """Return a dtype that JAX has, by its name or a short one: ``bfloat16``, ``bf16``, ``f32``.

    Those of less than a byte, such as ``int4``, take a byte an element, as NumPy stores them.

    Raises:
      MisreadError: there is none of this name; the message has similar ones.

    >>> parse_dtype('f32'), parse_dtype('bfloat16').itemsize
    (dtype('float32'), 2)
    """
    import numpy as np

    start = len(text) - len(text.lstrip())
    name = text.strip().rpartition(".")[2].lower()  # of jnp.bfloat16, and of BF16 in safetensors
    if name in _BITS_OR_BYTES:
        in_jax, in_numpy = _BITS_OR_BYTES[name]
        raise MisreadError(
            f"{name} is {in_jax} to JAX and {in_numpy} to NumPy; write the one you mean",
            text,
            start,
        )
    name = _SHORT_DTYPES.get(name, name)
    if name in _NUMPY_DTYPES:
        return np.dtype(name)
    import ml_dtypes  # not before, as it takes time

    known = {each.replace("_", ""): each for each in _names_of_ml_dtypes()}
    if (found := known.get(name.replace("_", ""))) is None:
        raise MisreadError(_unknown_dtype(name, sorted({*_NUMPY_DTYPES, *known.values()})), text, 0)
    return np.dtype(getattr(ml_dtypes, found))


def _names_of_ml_dtypes() -> Sequence[str]:
    import ml_dtypes

    return [name for name in dir(ml_dtypes) if _OF_ML_DTYPES.fullmatch(name)]


def _unknown_dtype(name: str, known: Sequence[str]) -> str:
    import difflib

    words = {**{each: each for each in known}, **_SHORT_DTYPES}
    near = difflib.get_close_matches(name[:40], words, n=3)
    if not near:
        return "the name of a dtype was expected, such as float32, bfloat16 or int8"
    either = " or ".join(dict.fromkeys(words[word] for word in near))
    return f"the name of a dtype was expected; did you mean {either}?"
