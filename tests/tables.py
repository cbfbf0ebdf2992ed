"""Tables of pages, which test programs write and tests compare."""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown has it."""
    first, *others = (f"| {' | '.join(cells)} |\n" for cells in (head, *rows))
    return "".join([first, "|---" * len(head) + "|\n", *others])


def write(page: Path, text_of: Callable[[], str]) -> None:
    """Write a page whose text is found with 8 devices; the end of a test program."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    page.write_text(text_of(), encoding="utf-8")
