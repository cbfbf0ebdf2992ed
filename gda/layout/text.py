"""Amounts, indices, processes, signals and meshes as text, for messages and pictures."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, zip_longest
from os.path import commonprefix

MOST_NAMED = 8  # the most differences that a message names
MOST_CHARACTERS = 640  # of them, which leave room for the places in a message of 1,000

# The most runs of numbers that are all written; of more, the first ones and the number of the rest.
_MOST_RUNS = 8
_FIRST_RUNS = 6
_FEWEST_STEPS = 4


def format_bytes(nbytes: int) -> str:
    """Return a size in words: ``1.5 KiB`` or ``3 B``."""
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{nbytes} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def counted(count: int, thing: str, things: str | None = None) -> str:
    """Return a number of things in words: ``1 block`` or ``4,096 blocks``."""
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


def printable(text: str) -> str:
    """Return a text of unknown origin with its control characters escaped."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def path_text(names: Iterable[object], within: str = "") -> str:
    """Return the path of a leaf, such as ``layers/0/w``, after the path ``within`` of its tree.

    A name with a slash is in quotation marks, so that no two leaves have one path.
    """
    texts = [name if name and "/" not in name else repr(name) for name in map(str, names)]
    return printable("/".join([within, *texts] if within else texts))


def join_some(parts: Sequence[str], most: float = math.inf) -> str:
    """Return the first few of many parts of a message, and the number of the others.

    They have at most ``most`` characters, unless the first alone has more.
    """
    shown = [*parts[:MOST_NAMED]]
    while len(shown) > 1 and len("; ".join(shown)) > most:
        shown.pop()
    more = len(parts) - len(shown)
    return "; ".join([*shown, *([f"and {more} more"] if more else [])])


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}…{text[1 - most // 2 :]}"


def where_they_differ(texts: Sequence[str], most: int) -> list[str]:
    """Return texts that differ, each with at most ``most`` characters from about where they do.

    Of texts of several lines it is the first line that differs, with its number.
    """
    if any("\n" in text for text in texts):
        lines = [text.split("\n") for text in texts]
        at = next(i for i, each in enumerate(zip_longest(*lines)) if len({*each}) > 1)
        found = [of[at].strip() if at < len(of) else "the end" for of in lines]
        return [f"line {at + 1:,}: {each}" for each in where_they_differ(found, most)]
    if max(map(len, texts)) <= most:
        return [*texts]
    start = max(len(commonprefix(texts)) - most // 3, 0)  # noqa: RUF071
    windows = [text[start : start + most - 2] for text in texts]
    return [
        f"{'…' * (start > 0)}{window}{'…' * (start + most - 2 < len(text))}"
        for window, text in zip(windows, texts, strict=True)
    ]


def listed(words: Sequence[str]) -> str:
    """Return words as a list in a sentence: ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def nearest(word: str, known: Iterable[str], most: int = 1) -> list[str]:
    # Imported here, because it takes long and only mistakes need it.
    from difflib import get_close_matches

    words = {each.lower(): each for each in known}
    return [words[near] for near in get_close_matches(word.lower()[:60], words, n=most)]


def did_you_mean(words: Sequence[str]) -> str:
    """Return a question to end a message with; empty without words."""
    return f"; did you mean {' or '.join(words)}?" if words else ""


def near_name(word: object, known: Iterable[object]) -> str:
    """Return a question about the name that a mistaken one is nearest to; empty if none is near."""
    return did_you_mean([*map(repr, nearest(str(word), map(str, known)))])


def unknown_options(given: Sequence[str], help_text: str) -> str:
    """Return a message about arguments of a command that its help does not have."""
    known = re.findall(r"--[a-z][\w-]+", help_text)
    options = [word.partition("=")[0] for word in given if word.startswith("--")]
    near = [name for option in options for name in nearest(option, known)]
    return f"unrecognized arguments: {' '.join(given)}{did_you_mean(near)}"


# Parts of an array, and their places.


def format_index(index: Sequence[slice]) -> str:
    """Return an index as in NumPy, ``[0:2, :]``."""
    return f"[{', '.join(map(_format_slice, index)) or '()'}]"


def _format_slice(part: slice) -> str:
    """Return ``0:2``, or ``:`` for the whole of a dimension."""
    return ":" if part.start is None and part.stop is None else f"{part.start or 0}:{part.stop}"


def typed_shape(dtype: object, shape: Iterable[int]) -> str:
    """Return a dtype and a shape as JAX prints them: ``float32[8,2]``."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def format_mesh(mesh_shape: Mapping[str, int]) -> str:
    """Return the sizes of a mesh, as the command line takes them: ``data=64,model=16``."""
    return printable(",".join(f"{name}={size}" for name, size in mesh_shape.items())) or "no axes"


def signal_name(number: int) -> str:
    """Return the name of a signal, or its number if it has none.

    >>> signal_name(9), signal_name(40)
    ('SIGKILL', 'signal 40')
    """
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal, which has a number only
        return f"signal {number}"


def format_processes(processes: Iterable[int]) -> str:
    """Return ``process 1`` or ``processes 0-3, 7``."""
    numbers = sorted(processes)
    return f"{'process' if len(numbers) == 1 else 'processes'} {format_numbers(numbers)}"


def format_numbers(numbers: Iterable[int]) -> str:
    """Return numbers in their order: runs as ``0-7``, equal steps as ``0, 8, … 56``.

    More than eight runs without a rule end in the number of omitted ones.
    """
    # Most blocks have a few devices, for which Python's lists are quicker than NumPy's arrays.
    values: list[int] = numbers.tolist() if hasattr(numbers, "tolist") else list(numbers)  # pyright: ignore
    if len(values) < 2:
        return "".join(map(str, values))
    starts = [i for i in range(len(values)) if not i or values[i] - values[i - 1] != 1]
    stops = [*starts[1:], len(values)]
    if len(starts) > _FEWEST_STEPS and _are_even(values, starts, stops):
        first, second, last = (_run(values, starts[i], stops[i], "-") for i in (0, 1, -1))
        return f"{first}, {second}, … {last}"
    written = len(starts) if len(starts) <= _MOST_RUNS else _FIRST_RUNS
    parts = [_run(values, starts[i], stops[i], ", ") for i in range(written)]
    left = len(values) - stops[written - 1]
    return ", ".join(parts) + (f", {format_more(left)}" if left else "")


def _are_even(values: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> bool:
    """Return True if runs are equally long and their starts equally far apart."""
    lengths = {stop - start for start, stop in zip(starts, stops, strict=True)}
    steps = {values[second] - values[first] for first, second in pairwise(starts)}
    return len(lengths) == len(steps) == 1


def _run(values: Sequence[int], start: int, stop: int, between_two: str) -> str:
    first, last = values[start], values[stop - 1]
    between = "-" if stop - start > 2 else between_two
    return str(first) if stop - start == 1 else f"{first}{between}{last}"


def format_more(count: int) -> str:
    return f"… {count:,} more"
