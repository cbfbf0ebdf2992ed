"""Amounts and texts as people read them, on a terminal and in messages."""

from __future__ import annotations

from collections.abc import Sequence

MOST_NAMED = 8  # of many differences, a message names so many


def format_bytes(nbytes: int) -> str:
    """Return a size as people read it.

    >>> format_bytes(1536), format_bytes(3)
    ('1.5 KiB', '3 B')
    """
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{nbytes} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def counted(count: int, thing: str, things: str | None = None) -> str:
    """Return how many there are of a thing.

    >>> counted(1, 'block'), counted(4096, 'block'), counted(2, 'process', 'processes')
    ('1 block', '4,096 blocks', '2 processes')
    """
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


def printable(text: str) -> str:
    """Return a text of unknown origin without what makes a terminal do things.

    >>> print(printable(chr(27) + "[2J"))
    \\x1b[2J
    """
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def join_some(parts: Sequence[str]) -> str:
    """Return the first few of many parts of a message, and how many more there are.

    >>> join_some(list("abcdefghij"))
    'a; b; c; d; e; f; g; h; and 2 more'
    """
    more = len(parts) - MOST_NAMED
    shown = [*parts[:MOST_NAMED], *([f"and {more} more"] if more > 0 else [])]
    return "; ".join(shown)
