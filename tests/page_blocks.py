"""Pages: their fenced blocks, and the tables that test programs write."""

from collections.abc import Iterable, Sequence


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
