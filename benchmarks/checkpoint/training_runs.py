"""Steps of a training that are saved, kept and resumed: gda's Run and Orbax's CheckpointManager.

All arrays change between two steps, and two steps are kept, so every save removes one too.
"""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.arrays.building import MIB
from benchmarks.checkpoint.checkpointers import Like, Tree
from benchmarks.checkpoint.checkpoints import MEDIUM, ROWS, Scale, Scratch, arrays_of, delete
from benchmarks.pairs import Side
from benchmarks.work import Work
from gda.checkpoint import Run

OURS, ORBAX = "gda, Run", "Orbax, CheckpointManager"


class _Steps(NamedTuple):
    """The steps of one folder."""

    path: Path
    save: Callable[[int, Tree], object]
    wait: Callable[[], None]


def _gda(path: Path) -> _Steps:
    run = Run(path, every=1, keep=2)
    run.resume({})
    return _Steps(path, run.save, run.wait)


def _orbax_manager(path: Path) -> Any:
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(save_interval_steps=1, max_to_keep=2)
    manager = ocp.CheckpointManager(path, options=options)
    atexit.register(manager.close)
    return manager


def _orbax(path: Path) -> _Steps:
    import orbax.checkpoint as ocp

    manager = _orbax_manager(path)

    def save(step: int, tree: Tree) -> None:
        manager.save(step, args=ocp.args.StandardSave(tree))

    return _Steps(path, save, manager.wait_until_finished)


def _gda_resumed(path: Path, like: Like) -> Any:
    return Run(path, every=1, keep=2).resume(like)[0]


def _orbax_resumed(path: Path, like: Like) -> Any:
    import orbax.checkpoint as ocp

    manager = _orbax_manager(path)
    return manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(like))


def _saving(scale: Scale, waits: bool) -> list[Side]:
    scratch, tree = Scratch(), arrays_of(scale, ROWS)

    def side(begin: Callable[[Path], _Steps]) -> Side:
        steps, numbers = begin(scratch.another()), itertools.count(1)

        def fresh() -> tuple[int, Tree]:
            scratch.keep()
            number = next(numbers)
            changed = {name: each + number for name, each in tree.items()}
            return number, jax.block_until_ready(changed)

        def run(number: int, changed: Tree) -> None:
            steps.save(number, changed)
            if waits:
                steps.wait()

        return Side(run, fresh, done=lambda _: steps.wait())

    return [side(_gda), side(_orbax)]


def _resuming(scale: Scale) -> list[Side]:
    scratch, tree = Scratch(), arrays_of(scale, ROWS)
    like = {
        name: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding)
        for name, each in tree.items()
    }

    def side(begin: Callable[[Path], _Steps], resumed: Callable[[Path, Like], Any]) -> Side:
        steps = begin(scratch.another())
        steps.save(1, tree)
        steps.wait()
        again = partial(resumed, steps.path, like)
        return Side(lambda: jax.block_until_ready(again()), scratch.keep, done=delete)

    return [side(_gda, _gda_resumed), side(_orbax, _orbax_resumed)]


def _writing(scale: Scale) -> list[Side]:
    scratch, tree = Scratch(), arrays_of(scale, ROWS)

    def side(begin: Callable[[Path], _Steps]) -> Side:
        steps = begin(scratch.another())
        steps.save(1, tree)
        steps.wait()
        nbytes = sum(each.stat().st_size for each in steps.path.rglob("*") if each.is_file())
        return Side(lambda: nbytes / MIB, times_itself=True)

    return [side(_gda), side(_orbax)]


def works(quick: bool) -> list[Work]:
    """Return the works; if ``quick``, with small arrays."""
    scale = MEDIUM.smaller() if quick else MEDIUM
    what = f"a step of {scale.name}, of which 2 are kept"
    held = partial(_saving, scale, waits=False)
    durable = partial(_saving, scale, waits=True)
    return [
        Work(f"how long the loop is held by {what}", held, {ORBAX: None}, ours=OURS, seconds=8),
        Work(f"save {what}, until it is durable", durable, {ORBAX: None}, ours=OURS, seconds=8),
        Work(f"resume at {what}", partial(_resuming, scale), {ORBAX: None}, ours=OURS, seconds=8),
        Work(
            f"written by {what}",
            partial(_writing, scale),
            {ORBAX: None},
            ours=OURS,
            seconds=0,
            unit="MiB",
        ),
    ]
