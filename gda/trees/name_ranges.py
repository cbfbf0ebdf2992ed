"""One name for several that differ only in numbers: ``layers.0-31.mlp.weight``."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from typing import TypeVar

_NUMBER = re.compile(r"([0-9]{1,18})")  # more digits are several numbers: int() has a limit

Numbers = tuple[str, ...]
K = TypeVar("K", bound=Hashable)


def with_ranges(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return names with ranges in them, each with the names that it stands for.

    If several numbers differ, such as those of layers and experts, one name stands for all
    combinations of its ranges; names that are no such product get several.

    >>> [name for name, _ in with_ranges(['a.0.w', 'a.1.w', 'a.3.w', 'b'])]
    ['a.0-1,3.w', 'b']
    """
    alike: dict[tuple[str, ...], list[Numbers]] = defaultdict(list)
    for name in dict.fromkeys(names):
        parts = _NUMBER.split(name)
        alike[tuple(parts[::2])].append(tuple(parts[1::2]))
    return [
        (_join(texts, map(_ranges, zip(*rows, strict=True))), [_join(texts, row) for row in rows])
        for texts, given in alike.items()
        for rows in _products(given)
    ]


def alike_in_ranges(named: Iterable[tuple[str, K]]) -> Iterator[tuple[str, list[str], K]]:
    """Yield the names of each value, with ranges in them, each with its names and the value."""
    alike: dict[K, list[str]] = defaultdict(list)
    for name, value in named:
        alike[value].append(name)
    for value, names in alike.items():
        yield from ((title, same, value) for title, same in with_ranges(names))


def counted_name(name: str, count: int) -> str:
    """Return a name with the number of names that it stands for, if it stands for several."""
    return f"{name} (x{count:,})" if count > 1 else name


def _join(texts: tuple[str, ...], numbers: Iterable[str]) -> str:
    between = [*numbers, ""]
    return "".join(text + number for text, number in zip(texts, between, strict=True))


def _products(rows: list[Numbers]) -> Iterator[list[Numbers]]:
    """Yield the rows in groups; each has all combinations of the numbers in its columns."""
    waiting = [rows]
    while waiting:
        rows = waiting.pop()
        columns = [set(column) for column in zip(*rows, strict=True)]
        if math.prod(map(len, columns)) == len(rows):
            yield sorted(rows, key=lambda row: [*map(_order, row)])
            continue
        first = next(i for i, column in enumerate(columns) if len(column) > 1)
        parts: dict[str, list[Numbers]] = defaultdict(list)
        for row in rows:
            parts[row[first]].append(row)
        waiting += [parts[number] for number in sorted(parts, key=_order, reverse=True)]


def _order(number: str) -> tuple[int, str]:
    return int(number), number


def _ranges(column: Iterable[str]) -> str:
    runs: list[list[str]] = []
    for number in sorted(set(column), key=_order):
        if runs and _follows(runs[-1][-1], number):
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(run) for run in runs)


def _follows(before: str, number: str) -> bool:
    has_same_zeros = len(before) == len(number) or not number.startswith("0")
    return has_same_zeros and int(number) == int(before) + 1
