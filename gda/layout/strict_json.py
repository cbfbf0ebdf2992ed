"""Strict JSON: the one reader of files that may be hostile.

Python's parser also accepts NaN, takes the last of two entries of one name, and needs up to 24
bytes of memory for a byte of text.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from gda.layout.text import join_some

_MOST_BYTES = 2**30  # of Python's objects: the manifest of 300,000 small arrays
# Of lists and objects in any text, and for each of its bytes; in a manifest they take 5 to 11.
_CONTAINER_BYTES = 2**26
_CONTAINER_BYTES_PER_BYTE = 16


def parse_json(text: str) -> Any:
    """Return the value of a text in JSON.

    Raises:
      ValueError: it is not JSON, has NaN or an infinity, an object has a name twice, it is nested
        too deeply for Python, or ``check_memory`` refuses it.
    """
    check_memory(text)
    if pointer := pointer_in(text[:64].encode()):
        raise ValueError(f"it {pointer}")
    try:
        return json.loads(
            text,
            parse_constant=_refuse,
            object_pairs_hook=_unrepeated,
            parse_int=_number if "-0" in text else None,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


_POINTERS = {
    b"version https://git-lfs.github.com/": ("Git LFS", "git lfs pull"),
    b"/annex/objects/": ("git-annex", "git annex get"),
}


def pointer_in(file: bytes) -> str | None:
    """Return the fault of a pointer to a file that was not fetched; None for any other file."""
    for begin, (tool, command) in _POINTERS.items():
        if file.startswith(begin):
            return f"is a pointer of {tool} and not the file itself; run {command}"
    return None


def _number(digits: str) -> int | float:
    return -0.0 if digits == "-0" else int(digits)  # as in other languages, and no size


def check_memory(text: str) -> None:
    """Raise ``ValueError`` if the values in a text in JSON may take too much memory.

    All values may take 1 GiB. The lists and objects may take 64 MiB, or 16 bytes for a byte of the
    text if that is more: a text that consists of empty ones takes more.
    """
    # An empty list is three bytes of JSON with its comma, and takes 80 bytes of memory.
    containers = 80 * text.count("[") + 256 * text.count("{")
    most_containers = max(_CONTAINER_BYTES, _CONTAINER_BYTES_PER_BYTE * len(text))
    needed = containers + 64 * text.count(",")
    if needed > _MOST_BYTES:
        raise ValueError(
            f"it has so many values that they may take {needed} bytes of memory; expected are at "
            f"most {_MOST_BYTES}"
        )
    if containers > most_containers:
        raise ValueError(
            f"it has so many lists and objects that they may take {containers} bytes of memory; "
            f"expected are at most {most_containers} in a text of this size"
        )


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of JSON")


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = [f"{name!r:.80}" for name, count in counts.items() if count > 1]
        raise ValueError(f"one object has these names twice: {join_some(twice)}")
    return entries
