"""The figures of a text, and those of ``benchmarks/RESULTS.md``."""

import re

UNITS = ["times", "ns", "µs", "us", "ms", "s", "seconds", "minutes", "bytes", "KiB", "MiB", "GiB"]
UNITS += ["KB", "MB", "GB", "GiB/s", "GB/s", "MiB/s", "MB/s", "%", "x", "\u00d7"]
NUMBER = r"(?<![\w.,])\d(?:[\d.,]*\d)?"
UNIT = rf"[ \u00a0]?({'|'.join(map(re.escape, sorted(UNITS, key=len, reverse=True)))})(?!\w)"


def figures_of(text: str) -> list[tuple[str, str]]:
    """Return numbers with the unit that follows, and without one those alone in a table's cell."""
    figures = []
    for first, second, unit, alone in re.findall(
        rf"({NUMBER})(?: ?(?:-|\u2013|to|and|or) ?({NUMBER}))?{UNIT}|\| *\**({NUMBER})\** *(?=\|)",
        text,
    ):
        figures += [(number, unit) for number in (first, second, alone) if number]
    return figures


def is_in(figure: tuple[str, str], results: str) -> bool:
    number, unit = figure
    alone = rf"\| *\**{re.escape(number)}\** *\|"
    found = re.findall(rf"({NUMBER})(?:{UNIT})?", results)
    if unit and not re.search(alone, results):
        return (number, unit) in found
    return number in [other for other, _ in found]
