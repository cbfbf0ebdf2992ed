"""Saves that link what did not change since the checkpoint before, their base.

Frozen arrays and an adapter are the state of a fine-tuning that trains a hundredth of the weights.
A save of which everything changed shows the cost of the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.arrays.building import MIB
from benchmarks.checkpoint.checkpointers import (
    ORBAX,
    Tree,
    gda_begin,
    gda_save,
    orbax_begin,
    orbax_save,
    write,
)
from benchmarks.checkpoint.checkpoints import (
    LARGE,
    ROWS,
    WRITE,
    Scale,
    Scratch,
    arrays_of,
    blocks_of,
)
from benchmarks.pairs import Side
from benchmarks.work import AtMost, Faster, Within, WithinMiB, Work
from gda import checkpoint

OURS, WHOLE = "gda, with a base", "gda, without a base"
FROZEN = Scale("1 GiB", 4, 8192)
ADAPTER = Scale("10 MiB", 10, 512)

Save = Callable[..., Callable[[], object] | None]  # returns what waits until it is durable


def _changed(tree: Tree) -> Tree:
    return {name: array + 1 for name, array in tree.items()}


def _sides(before: Tree, tree: Tree, linking: Save, others: Sequence[Save]) -> list[Side]:
    """Return a side for each way to save a tree; the first one gets the base."""
    base, scratch = Scratch(), Scratch()
    path = base.another()
    gda_save(path, before)
    base.keep()

    def linked(new: Path, base: Scratch = base) -> Callable[[], object] | None:
        return linking(new, tree, base=path)

    def wait(result: Callable[[], object] | None) -> None:
        if result is not None:
            result()

    whole = [Side(partial(_saved, other, tree), scratch.fresh, done=wait) for other in others]
    return [Side(linked, scratch.fresh, done=wait), *whole]


def _saved(save: Save, tree: Tree, path: Path) -> Callable[[], object] | None:
    return save(path, tree)


def _all_changed(scale: Scale) -> list[Side]:
    before = arrays_of(scale, ROWS)
    sides = _sides(before, _changed(before), checkpoint.save, [gda_save])
    return [*sides, replace(sides[1], run=partial(write, blocks=blocks_of(scale)))]


def _adapter_changed(
    linking: Save, others: Sequence[Save], frozen: Scale, adapter: Scale
) -> list[Side]:
    kept = {f"frozen{name}": array for name, array in arrays_of(frozen, ROWS).items()}
    trained = arrays_of(adapter, ROWS)
    return _sides({**kept, **trained}, {**kept, **_changed(trained)}, linking, others)


def _saving(frozen: Scale, adapter: Scale) -> list[Side]:
    return _adapter_changed(checkpoint.save, [gda_save, orbax_save], frozen, adapter)


def _begin(path: Path, tree: Tree, base: Path) -> Callable[[], object]:
    return checkpoint.save_async(path, tree, base=base).result


def _beginning(frozen: Scale, adapter: Scale) -> list[Side]:
    return _adapter_changed(_begin, [gda_begin, orbax_begin], frozen, adapter)


def _writing(frozen: Scale, adapter: Scale) -> list[Side]:
    def written(side: Side) -> float:
        (path,) = side.fresh()
        side.run(path)
        files = [each.stat() for each in path.rglob("*") if each.is_file()]
        return sum(each.st_size for each in files if each.st_nlink == 1) / MIB

    return [Side(partial(written, side), times_itself=True) for side in _saving(frozen, adapter)]


def works(quick: bool) -> list[Work]:
    """Return the works; if ``quick``, with small arrays."""
    large, frozen, adapter = (
        replace(each, side=each.side // 16) if quick else each for each in (LARGE, FROZEN, ADAPTER)
    )
    what = f"{frozen.name} of frozen arrays and {adapter.name} that changed"
    ours: dict[str, Any] = {"ours": OURS, "seconds": 12}
    held = "how long the caller is held while"
    saving, beginning, writing = (
        partial(each, frozen, adapter) for each in (_saving, _beginning, _writing)
    )
    others = {WHOLE: None, ORBAX: None}
    all_changed = f"save {large.name}, all changed since the base"
    to_beat = {WHOLE: AtMost(1.03), WRITE: None}
    return [
        Work(all_changed, partial(_all_changed, large), to_beat, raw=WRITE, **ours),
        Work(f"save {what}", saving, others | {ORBAX: Faster(5)}, **ours),
        Work(f"{held} {what} are saved behind it", beginning, others, Within(2), **ours),
        Work(
            f"written by a save of {what}",
            writing,
            others,
            WithinMiB(11),
            ours=OURS,
            seconds=0,
            unit="MiB",
        ),
    ]
