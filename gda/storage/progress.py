"""The display of the progress of a read or a write."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gda.layout.distribution import install_command
from gda.storage.options import ProgressLike

_SECONDS_BETWEEN = 0.1


@contextmanager
def shown(
    progress: ProgressLike, description: str, *, in_bytes: bool = True
) -> Iterator[Callable[[int, int], object]]:
    """Give the function ``(done, total)``, in bytes or in pieces, that shows the progress."""
    if progress is True:
        with _bar(description, in_bytes) as update:
            yield update
    elif progress is False:
        yield lambda done, total: None
    else:
        yield progress


@contextmanager
def counting(
    progress: ProgressLike, description: str, total: int
) -> Iterator[Callable[[int], object]]:
    """Give the function that adds bytes that are done, and shows the progress."""
    done = 0
    with shown(progress, description) as show:

        def add(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            show(done, total)

        yield add


@contextmanager
def _bar(description: str, in_bytes: bool) -> Iterator[Callable[[int, int], object]]:
    try:
        import rich.console
        import rich.progress as bars
    except ImportError as error:
        raise ImportError(
            f"progress=True needs rich: {install_command('progress')}, or pass a function "
            "(nbytes_done, nbytes_total)"
        ) from error
    # Bytes in powers of 1000, because TransferSpeedColumn has no others.
    amounts = [bars.DownloadColumn(), bars.TransferSpeedColumn()]
    columns = [
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        *(amounts if in_bytes else [bars.MofNCompleteColumn()]),
        bars.TimeRemainingColumn(),
    ]
    console = rich.console.Console(stderr=True)
    # Drawn when something is reported: rich's own refreshing is a thread that outlives its bar.
    with bars.Progress(*columns, console=console, auto_refresh=False) as bar:
        task = bar.add_task(description, total=None)
        drawn = 0.0

        def update(done: int, total: int) -> None:
            nonlocal drawn
            now = time.monotonic()
            is_due = done >= total or now - drawn >= _SECONDS_BETWEEN
            bar.update(task, completed=done, total=total, refresh=is_due)
            if is_due:
                drawn = now

        yield update
