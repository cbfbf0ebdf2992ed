"""Strict JSON: Python's parser also accepts NaN, and takes the last of two entries of one name."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from gda.layout.text import join_some


def parse_json(text: str) -> Any:
    """Return the value of a text in JSON.

    Raises:
      ValueError: it is not JSON, has NaN or an infinity, an object has a name twice, or it is
        nested too deeply for Python.

    >>> parse_json('{"w": 1, "w": 2}')
    Traceback (most recent call last):
    ValueError: one object has these names twice: 'w'
    """
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_unrepeated)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of JSON")


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = [f"{name!r:.80}" for name, count in counts.items() if count > 1]
        raise ValueError(f"one object has these names twice: {join_some(twice)}")
    return entries
