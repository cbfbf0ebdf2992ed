"""The part of a run that process 0 does for all: it owns the folder, and begins and removes steps.

Nothing here communicates. A thread of a save calls ``before_commit`` and ``completed``.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

import jax
import numpy as np

from gda.checkpoint.saving import CommittedSave
from gda.checkpoint.step_folders.folder import (
    BEGUN,
    UNFINISHED,
    Owner,
    Rollbacks,
    RunFolder,
    StepFolder,
    below,
    name_of,
)
from gda.checkpoint.step_folders.rules import Rules
from gda.layout.text import counted, format_bytes, format_numbers, join_some
from gda.multihost.background import in_thread
from gda.storage.stores.directory import LOCK
from gda.trees.files.step_names import check_names_no_step, has_marks

log = logging.getLogger("gda")

_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class StepSave:
    """The save of a step."""

    number: int
    metrics: Mapping[str, Any]
    begun: float  # a time of the monotonic clock
    waited: float  # seconds, for the save before


@dataclass
class Keeper:
    """The owner of the folder of a run.

    Attributes:
      links: True to link unchanged arrays to those of the newest step.
      owner: this program, after ``own``.
      last_seconds: that the last save took.
    """

    folder: RunFolder
    rules: Rules
    links: bool = True
    on_complete: Callable[[int, Any], object] | None = None
    owner: Owner | None = None
    last_seconds: float = 0
    _hooks: dict[int, Future[Any]] = field(default_factory=dict)  # calls of on_complete, by step
    # The removals of folders that were taken out, by name, one after the other.
    _removals: dict[str, Future[Any]] = field(default_factory=dict)
    _knows_best: bool = False  # True after a look for the metric of keep_best

    def own(self, only: int | None, resumes: bool) -> tuple[str, list[tuple[int, str]]]:
        """Become the owner of the folder, and clean it; return its id, and the steps.

        ``only`` is the one step that may be the newest. Raises ``ValueError`` if a run that does
        not resume would save beside steps, or the folder is itself a checkpoint.
        """
        self._steps(only, resumes)
        owner = self._claimed()
        # In the background, because the other processes wait for this one.
        left = self._left_over(owner)
        self._remove(left, owner)
        # Only now: before, the former owner may have completed a step.
        steps, there = self._steps(only, resumes), self.folder.listed()
        for each in there.values():
            if each.is_complete and UNFINISHED in each.files:  # of a program that was killed
                self.folder.finish(each.name, owner)
        rest = {
            number: each.name
            for number, each in there.items()
            if each.is_without_manifest and number not in steps and each.name not in left
        }
        # Their files are late, or lost: a resume waits for them, or sets the step aside.
        lost = {
            number: name
            for number, name in rest.items()
            if resumes and only is None and number > max(steps, default=-1)
            # On a local disk, a lone first file is that of a copy.
            if there[number].files - {LOCK} != {BEGUN} or not self.folder.store().is_local
        }
        if others := [name for number, name in rest.items() if number not in lost]:
            log.warning(
                "%s of %s has no manifest, and this run did not begin to save or to remove it: it "
                "may be a copy that is not whole yet, and is left as it is",
                join_some(others),
                self.folder.url,
            )
        return owner.program, [*(steps | lost).items()]

    def start(self) -> tuple[dict[str, Any], int]:
        """Return the fields of the ``RunStart``, and the start that saved the newest step."""
        owner, complete = self.folder.check_owner(self._claimed()), self.folder.complete()
        history = sha256(repr(owner.rolled_back).encode()).hexdigest()[:16]
        fields = {"run": owner.run, "generation": owner.generation, "history": history}
        newest = complete[max(complete)].name if complete else None
        begun = {} if newest is None else self.folder.fields(f"{newest}/{BEGUN}")
        return fields, begun.get("generation", 0)

    def _steps(self, only: int | None, resumes: bool) -> dict[int, str]:
        """Return the complete steps and Orbax's newest; raise if this program may not use them."""
        complete, url = self.folder.complete(), self.folder.url
        check_names_no_step(url, self.folder.timeout)
        names = {number: each.name for number, each in complete.items()}
        steps = dict(sorted((self.folder.newest_of_orbax() | names).items()))
        if steps and not resumes:
            raise ValueError(
                f"{url} has steps up to {max(steps)}, and this run has not resumed: call "
                "run.resume(state) first, or give the run a folder of its own"
            )
        if not steps and has_marks(self.folder.store()):
            raise ValueError(
                f"{url} is a checkpoint, and a run is a folder of them: pass the folder above it, "
                "or a new one, and begin with this checkpoint by resume(state, start_from=...)"
            )
        if only is not None:
            if only not in steps:
                self.folder.step(only)  # raises
            if later := [number for number in steps if number > only]:
                raise ValueError(
                    f"{url} has later steps than {only}: {format_numbers(later)}; call "
                    f"run.rollback({only}, newest={later[-1]}) first"
                )
        return steps

    def _claimed(self) -> Owner:
        if self.owner is None:
            try:
                self.owner = self.folder.claim(self.rules.best)
            except OSError as error:
                former = self.folder.owner()
                if error.errno not in _FULL or former is None:
                    raise
                # The files of a killed save may fill the disk.
                _remove_rests(self.folder, self._left_over(former))
                self.owner = self.folder.claim(self.rules.best)
        ends = self.folder.check_owner(self.owner).ends
        if ends is not None:  # of a rollback that was killed, or failed
            self._remove_later(self.owner, ends)
        return self.owner

    def _left_over(self, owner: Owner) -> list[str]:
        """Take out the rests of saves and removals of former programs; return their names."""
        folders = [*self.folder.listed().values()]
        left = [each.name for each in folders if self.folder.is_left_over(each, owner)]
        return [*map(self.folder.take_out, left), *self.folder.taken_out()]

    def roll_back(self, step: int, newest: int | None = None) -> list[int]:
        """Remove the steps after one, and return them.

        With ``newest``, nothing happens if another step is the newest, or if this rollback was done
        and the newest step saved again.
        """
        later, removed = self._later(step, newest), list[int]()
        if not later:
            return []
        last = max(later)
        done = (step, last, self.folder.identity(later[last].name))
        for number in [*later, None]:
            try:
                owner = self._claimed()
                # Again, because before, the former owner may have completed a step.
                if not removed and not self._later(step, newest):
                    break
                removed += self._remove_later(owner, step, (done,))
                break
            except OSError as error:
                if error.errno not in _FULL or number is None:
                    raise
            # In this order: after a kill, the rollback is still to do, or done.
            log.warning("the disk of %s is full: step %d is removed first", self.folder.url, number)
            _remove_rests(self.folder, [self.folder.take_out(later[number].name)])
            removed.append(number)
        return removed

    def _later(self, step: int, newest: int | None) -> dict[int, StepFolder]:
        """Return the steps that a rollback removes.

        Raises ``CheckpointNotFoundError`` if there is no such step, and ``ValueError`` if a later
        one is held.
        """
        complete = self.folder.complete()
        if newest is not None and max(complete, default=None) != newest:
            return {}
        self.folder.step(step)
        later = {number: each for number, each in complete.items() if number > step}
        owner = self.folder.owner()
        if newest is not None and owner is not None and newest in later:
            before = [of for *pair, of in owner.rolled_back if pair == [step, newest]]
            if before and before != [self.folder.identity(later[newest].name)]:
                log.info(
                    f"{self.folder.url} was rolled back from step {newest} to step {step} before; "
                    f"the step {newest} that was saved after that stays: gda rollback removes it"
                )
                return {}
        if held := [number for number, each in later.items() if each.is_held]:
            raise ValueError(
                f"a rollback to step {step} of {self.folder.url} would remove {_steps(held)}, "
                "which run.hold keeps; remove held.json there first"
            )
        return later

    def _remove_later(self, owner: Owner, last: int, done: Rollbacks = ()) -> list[int]:
        """Remove the steps after ``last``; after a kill, the next owner goes on with it."""
        listed = self.folder.listed()
        later = {n: each for n, each in listed.items() if n > last and each.is_complete}
        begun = time.monotonic()
        self.folder.set_ends(owner, last, done)
        rests = [self.folder.take_out(each.name) for each in later.values()]
        self.folder.set_ends(owner, None)
        self._remove(rests, owner)
        removed, seconds = _steps(later) if later else "no step", time.monotonic() - begun
        log.info(
            f"rolled {self.folder.url} back to step {last}: removed {removed}, in {seconds:.1f} s"
        )
        return [*later]

    def has_time_for(self, number: int, before: int | None, seconds_left: float) -> bool:
        """Return False, and log it, if the program will be killed before a step is complete."""
        if self.last_seconds <= seconds_left:
            return True
        log.warning(
            f"step {number} of {self.folder.url} is not saved: a save takes "
            f"{self.last_seconds:.1f} s, and {max(seconds_left, 0):.1f} s of grace are left; the "
            f"steps after {before or 0} are lost"
        )
        return False

    def begin(self, step: StepSave, before: int | None) -> str | None:
        """Make the folder of a step; return that of the step to link to, or ``None``."""
        owner, number = self._claimed(), step.number
        step.metrics = begun_to_fetch(step.metrics)
        self._look_for_best(step)
        self._wait_for_removal(name_of(number))
        folders = self.folder.listed({number, number if before is None else before})
        there = folders.get(number)
        if there is not None and (there.is_complete or there.name == name_of(number)):
            self._make_way(there, owner)
        self.folder.begin(name_of(number), owner)
        newest = None if before is None else folders.get(before)
        is_linkable = self.links and not self.folder.store().is_remote
        is_whole = not is_linkable or self.rules.is_milestone(number, before)
        return None if is_whole or newest is None or newest.is_of_orbax else newest.name

    def _look_for_best(self, step: StepSave) -> None:
        """Warn if the first step lacks the metric of ``keep_best``."""
        best, self._knows_best = None if self._knows_best else self.rules.best, True
        if best is not None and best[0] not in step.metrics:
            has = (
                f"it has {join_some([*map(repr, step.metrics)])}" if step.metrics else "it has none"
            )
            log.warning(
                f"step {step.number} of {self.folder.url} has no metric {best[0]!r}, by which "
                f"keep_best keeps steps; {has}. Give it to run.save(..., metrics=), or to "
                "run.record before the step is removed"
            )

    def _make_way(self, there: StepFolder, owner: Owner) -> None:
        """Clear the folder of a step to save: remove data of this run, and set other data aside."""
        place = f"{self.folder.url}/{there.name}"
        if there.is_complete:
            raise FileExistsError(
                f"{place} is a complete step that this program neither saved nor resumed at; call "
                "run.resume(state), or move it elsewhere"
            )
        is_remote = self.folder.store().is_remote
        # The other files of a folder with its first one may be late.
        is_nothing = there.is_nothing and (is_remote or BEGUN not in there.files)
        is_left = is_nothing or self.folder.is_left_over(there, owner)
        if is_left or (is_remote and there.is_set_aside):
            self._remove([self.folder.take_out(there.name)], owner)
            self._wait_for_removal(there.name)
        elif there.is_without_manifest and not is_remote:
            aside = self.folder.set_aside(there.name, "it has no manifest")
            log.warning(
                "%s has no manifest, and this run did not begin it: it was set aside as %s, and "
                "the step is saved in its place",
                place,
                aside,
            )
        else:
            raise FileExistsError(
                f"{place} has files that this run did not begin; move them elsewhere"
            )

    def check_owner(self) -> None:
        """Raise ``TakenOverError`` if another program owns the run; a silent store is no error."""
        with suppress(OSError, ValueError):
            self._claimed()

    def before_commit(self, step: StepSave) -> None:
        """Write the metrics, and look if the run is still this program's."""
        if step.metrics:
            metrics = fetched(step.metrics)
            self._claimed()  # or this would make a folder again that another program has removed
            self.folder.set_metrics(name_of(step.number), metrics)
        self._claimed()

    def completed(self, step: StepSave, written: CommittedSave, free_since: float) -> None:
        """Log a complete step, tell the user's function, and remove what is no longer kept."""
        seconds = time.monotonic() - step.begun
        self.last_seconds = seconds - step.waited
        slowest = max(range(len(written.seconds)), key=written.seconds.__getitem__)
        log.info(
            f"saved step {step.number} of {self.folder.url}: the loop waited "
            f"{free_since - step.begun:.3f} s, of them {step.waited:.3f} s for the save before; "
            f"complete after {seconds:.1f} s; "
            f"{format_bytes(written.nbytes - written.nbytes_linked)} written, "
            f"{format_bytes(written.nbytes_linked)} linked; process {slowest} was slowest, "
            f"{written.seconds[slowest]:.1f} s"
        )
        if self.on_complete is not None:
            self._hooks = {n: each for n, each in self._hooks.items() if not each.done()}
            call = partial(self._call_hook, self.on_complete, step.number)
            self._hooks[step.number] = in_thread("gda-on-complete", call)
        try:
            self.folder.finish(name_of(step.number), self._claimed())
        except Exception as error:
            log.warning("step %d of %s: %s", step.number, self.folder.url, error)
        self._remove_old()

    def _remove_old(self) -> None:
        """Remove the steps that the rules do not keep, and that no ``on_complete`` uses.

        They are incomplete at once, and removed in the background. A failure is only logged.
        """
        try:
            owner = self._claimed()
            folders, best = self.folder.complete(), self.rules.best
            ranked = self.folder.best_first(*best) if best and self.rules.ranks else []
            kept = self.rules.kept(folders, ranked)
            kept.update(number for number, each in folders.items() if each.is_held)
            kept.update(number for number, call in self._hooks.items() if not call.done())
            removed: dict[int, str] = {}
            for number, each in folders.items():
                if number not in kept and each.is_begun:
                    try:
                        if (rest := self.folder.retire(each.name, owner)) is not None:
                            removed[number] = rest
                    except (OSError, RuntimeError, ValueError) as error:
                        log.warning(
                            "step %d of %s was not removed: %s", number, self.folder.url, error
                        )
            if removed:
                log.info("removed %s of %s", _steps(removed), self.folder.url)
                self._remove([*removed.values()], owner)
        except Exception as error:
            log.warning("old steps of %s were not removed: %s", self.folder.url, error)

    def failed(self, number: int) -> bool:
        """Remove the rest of a failed save; return True if the step is complete nevertheless."""
        with suppress(OSError, ValueError):  # a store that fails is perhaps the reason
            if self.owner is not None:
                self.folder.check_owner(self.owner)
                if there := self.folder.listed({number}).get(number):
                    if not there.is_complete and self.folder.is_left_over(there, self.owner):
                        self._remove([self.folder.take_out(there.name)], self.owner)
                    return there.is_complete
        return False

    def _call_hook(self, hook: Callable[[int, Any], object], number: int) -> None:
        try:
            hook(number, below(self.folder.path, name_of(number)))
        except Exception:
            log.exception("on_complete of step %d of %s failed", number, self.folder.url)

    def wait(self, seconds: float) -> None:
        """Wait ``seconds`` for the user's functions and removals; log those that still run."""
        limit = time.monotonic() + seconds
        wait(self._hooks.values(), seconds)
        for number in sorted(n for n, call in self._hooks.items() if not call.done()):
            log.warning(
                f"on_complete of step {number} of {self.folder.url} still runs after a wait of "
                f"{seconds:.1f} s; if the program ends now, it is killed. Give the run a longer "
                "grace"
            )
        if self._hooks:  # their steps were kept
            self._remove_old()
        wait(self._removals.values(), max(0.0, limit - time.monotonic()))
        if left := sum(not each.done() for each in self._removals.values()):
            log.warning(
                "%s of %s are still being removed; the next resume removes what is left",
                counted(left, "folder"),
                self.folder.url,
            )

    def _remove(self, names: Iterable[str], owner: Owner) -> None:
        """Remove folders that were taken out, in the background."""
        running = {name: each for name, each in self._removals.items() if not each.done()}
        # Each once: before a second removal, the step may have been saved again.
        if names := [name for name in names if name not in running]:
            work, last = partial(_remove_rests, self.folder, names, owner), [*running.values()][-1:]
            removal = in_thread("gda-remove", work, *last)
            self._removals = running | dict.fromkeys(names, removal)

    def _wait_for_removal(self, name: str) -> None:
        """Wait for the removal of a step that is saved again, in an object store."""
        if name in self._removals:
            wait([self._removals[name]])


def _remove_rests(folder: RunFolder, names: Iterable[str], owner: Owner | None = None) -> None:
    """Remove folders that were taken out; log failures."""
    for name in names:
        try:
            folder.remove_rest(name, owner)
        except Exception as error:
            log.warning(
                f"{folder.url}/{name} is no longer used and could not be removed: {error}; the "
                "next resume tries again"
            )


def _steps(numbers: Iterable[int]) -> str:
    numbers = [*numbers]
    return f"{'step' if len(numbers) == 1 else 'steps'} {format_numbers(numbers)}"


# Metrics: numbers that a device may still compute when the step is saved.


def begun_to_fetch(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Begin to copy metrics to the host; ``TypeError`` if they are no mapping of numbers."""
    if not isinstance(metrics, Mapping):
        raise TypeError(
            "metrics must be a dict of numbers by name, such as {'loss': 0.5}, not "
            f"{metrics!r:.200}"
        )
    kept = dict(metrics)
    for name, value in kept.items():
        if not isinstance(name, str):
            raise TypeError(f"the name of a metric must be a text, not {name!r}")
        array = value if isinstance(value, jax.Array) else np.asarray(value)
        kinds = (np.bool_, np.integer, np.floating)  # of JAX: NumPy does not know bfloat16
        if array.size != 1 or not any(jax.numpy.issubdtype(array.dtype, kind) for kind in kinds):
            raise TypeError(
                f"metric {name!r} must be a real number, or an array of one, not {value!r:.200}"
            )
        if isinstance(value, jax.Array):
            # A copy, because the next step may take the array itself, which is donated to it.
            kept[name] = jax.numpy.copy(value.addressable_data(0))
            kept[name].copy_to_host_async()
    return kept


def fetched(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as numbers; waits for the device."""
    return {name: float(np.asarray(value).reshape(())) for name, value in metrics.items()}
