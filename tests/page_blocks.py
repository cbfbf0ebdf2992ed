"""Pages: their fenced blocks, and the tables that test programs write and tests compare."""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


def blocks_of(text: str) -> list[tuple[str, str, int]]:
    """Return language, text and number of the first line of every fenced block."""
    blocks, language, lines, first = [], None, [], 0
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("```") and language is None:
            language, lines, first = line.removeprefix("```"), [], number + 1
        elif line == "```":
            blocks.append((language, "\n".join(lines) + "\n", first))
            language = None
        elif language is not None:
            lines.append(line)
    assert language is None, f"the block that begins in line {first} has no end"
    return blocks


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown has it."""
    first, *others = (f"| {' | '.join(cells)} |\n" for cells in (head, *rows))
    return "".join([first, "|---" * len(head) + "|\n", *others])


def write(page: Path, text_of: Callable[[], str]) -> None:
    """Write a page whose text is found with 8 devices; the end of a test program."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    page.write_text(text_of(), encoding="utf-8")
