"""The first save and the first restore of a large tree in a process, as most programs call them.

The process has saved or restored a small tree before, so that no way pays for its imports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import fresh
from benchmarks.checkpoint.checkpointers import (
    GDA,
    SAFETENSORS,
    SAVEZ,
    TENSORSTORE,
    TORCH,
    UNCOMPRESSED,
    WAYS,
    read,
    write,
)
from benchmarks.checkpoint.checkpoints import (
    COLUMNS,
    MEDIUM,
    READ,
    ROWS,
    WRITE,
    Scale,
    Scratch,
    arrays_of,
    blocks_of,
    delete,
    like_of,
)
from benchmarks.pairs import Side
from benchmarks.work import AtMost, Target, Work

_INSTEAD = [UNCOMPRESSED, SAFETENSORS, SAVEZ, *([TORCH] if TORCH in WAYS else [])]


def saving(way: str, scale: Scale, path: Path) -> Callable[[], Any]:
    """Prepare the first large save of a process."""
    if way == WRITE:
        return partial(write, path, blocks_of(scale))
    save, own = WAYS[way].save, WAYS[way].own
    save(path.with_name("small"), own(arrays_of(scale.smaller(), ROWS)))
    return partial(save, path, own(arrays_of(scale, ROWS)))


def restoring(way: str, scale: Scale, path: Path, small: Path) -> Callable[[], Any]:
    """Prepare the first large restore of a process."""
    if way == READ:
        return partial(read, path)
    restore = WAYS[way].restore
    restore(small, like_of(scale.smaller(), COLUMNS))
    return partial(restore, path, like_of(scale, COLUMNS))


def _saving(scale: Scale, ways: Sequence[str]) -> list[Side]:
    scratch = Scratch()
    return [fresh.side(partial(saving, way, scale), scratch.fresh) for way in ways]


def _restoring(scale: Scale, ways: Sequence[str]) -> list[Side]:
    scratch = Scratch()

    def side(way: str) -> Side:
        paths = []
        for each in (scale, scale.smaller()):
            tree, path = arrays_of(each, ROWS), scratch.another()
            if way == READ:
                write(path, blocks_of(each))
            else:
                WAYS[way].save(path, WAYS[way].own(tree))
            delete(tree)
            paths.append(path)
        return fresh.side(partial(restoring, way, scale, *paths), scratch.keep)

    return [side(way) for way in ways]


def works(quick: bool) -> list[Work]:
    """Return the works; if ``quick``, with small arrays, only to see that everything runs."""
    scale = MEDIUM.smaller() if quick else MEDIUM

    def work(
        name: str,
        prepare: Callable[[Scale, Sequence[str]], list[Side]],
        targets: Mapping[str, Target | None],
        raw: str,
    ) -> Work:
        ways: Mapping[str, Target | None] = {**dict.fromkeys(_INSTEAD), **targets, raw: None}
        return Work(
            f"{name} in a fresh process",
            partial(prepare, scale, [GDA, *ways]),
            ways,
            raw=raw,
            seconds=20,
        )

    plain: Mapping[str, Target | None] = {UNCOMPRESSED: AtMost(0.9)}
    return [
        work(f"save {scale.name}", _saving, plain, WRITE),
        work(f"restore {scale.name} onto another layout", _restoring, {TENSORSTORE: None}, READ),
    ]
