"""The checkpoints of a training: numbered steps, of which some are kept, and the newest is resumed.

Every method that communicates is one meeting of all processes, in which process 0 does what must be
done once: it lists the steps, begins a save, or removes. So all processes always agree on what
there is. At most one save is in flight.
"""

from __future__ import annotations

import functools
import logging
import operator
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import jax

from gda.checkpoint.inspecting import inspect
from gda.checkpoint.pending import Pending
from gda.checkpoint.restoring import restore
from gda.checkpoint.runs import metrics as metrics_of
from gda.checkpoint.runs.removing import Removals, remove_later, remove_left_over
from gda.checkpoint.runs.resuming import LATE_SECONDS, Damaged, read_newest
from gda.checkpoint.saving import MAX_BYTES, Save, in_background
from gda.checkpoint.step_folders import rules
from gda.checkpoint.step_folders.folder import (
    Owner,
    RunFolder,
    StepFolder,
    TakenOverError,
    below,
    checked_step,
    name_of,
)
from gda.checkpoint.step_folders.references import path_of
from gda.layout.boundary import public, set_module
from gda.layout.text import format_bytes, format_numbers, format_processes
from gda.multihost.agreement import communicates
from gda.multihost.background import in_thread
from gda.multihost.ending import Ending
from gda.multihost.steps import all_do
from gda.storage.options import Options, Retry, check_count
from gda.storage.stores.errors import CheckpointNotFoundError, CorruptionError, SaveError

log = logging.getLogger("gda")

_SHARED = (
    *(TakenOverError, CheckpointNotFoundError, CorruptionError),
    *(FileExistsError, PermissionError, ValueError),
)


@set_module("gda.checkpoint")
class Run:
    """The checkpoints of a training, in one folder: saved when due, kept by rules, and resumed.

    A step is a checkpoint as ``save`` writes it, at ``runs/a/00000100``. Nothing is written before
    the first call of ``resume`` or ``save``; then the program owns the folder, and a program that
    wrote there before may no longer save or remove anything. ``is_ending`` and ``path`` do not
    communicate; every other method does, so all processes of the program must call it, in the same
    order and with equal arguments.

    Args:
      path: a directory, or a URL, as for ``save``.
      every: save at every multiple of this number of steps, or at the first step after it.
      keep: the number of newest steps to keep; by default all are kept. Or a function that takes
        the complete steps, ascending, and returns those to keep. An older step is removed when a
        newer one is complete, so the disk must hold one more.
      keep_every: with ``keep``, keep also the first step at or after each multiple of this number.
      keep_best: with ``keep``, keep also the best steps by a metric: ``(2, 'loss')`` the two with
        the lowest loss, ``(2, 'accuracy', 'max')`` the two with the highest accuracy.
      max_total_bytes: remove the oldest of the kept steps too, until their arrays take at most so
        many bytes together.
      signals: that announce the end of the program, in any process.
      save_on: signals after which the next call of ``save`` saves, and the training goes on.
      grace: seconds from such an announcement until the program is killed.
      timeout: seconds to wait for other processes and for an object store, as for ``save``.
      on_complete: called with ``(step, path)`` when a step is complete, in process 0 and in a
        thread of its own. An error of it is logged.
      on_error: ``'log'`` goes on after a save that failed, until the next one; ``close`` and
        ``wait`` raise its error nevertheless.
      unchanged: ``'write'`` writes all arrays. By default, an array that has not changed since the
        newest step is linked where the file system can.
      compression, fingerprint, retry, max_workers, max_bytes: as for ``save``.

    Raises:
      TypeError, ValueError: an argument is wrong.

    >>> import gda, jax.numpy as jnp, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> state = {'w': jnp.zeros(4), 'n': 0}
    >>> with gda.checkpoint.Run(folder.name, every=10, keep=2) as run:
    ...     state, step = run.resume(state)
    ...     while step < 35:
    ...         state = {'w': state['w'] + 1, 'n': state['n'] + 1}
    ...         step += 1
    ...         _ = run.save(step, state)
    ...         if run.is_ending:
    ...             break
    ...     run.close(step, state)
    ...     run.steps()
    [30, 35]
    >>> gda.checkpoint.restore(folder.name + '@latest')['n']
    35
    >>> folder.cleanup()
    """

    def __init__(
        self,
        path: Any,
        *,
        every: int,
        keep: int | Callable[[list[int]], Iterable[int]] | None = None,
        keep_every: int | None = None,
        keep_best: tuple[int, str] | tuple[int, str, Literal["min", "max"]] | None = None,
        max_total_bytes: int | None = None,
        signals: Sequence[int] = (signal.SIGTERM,),
        save_on: Sequence[int] = (),
        grace: float = 30,
        timeout: float = 600,
        on_complete: Callable[[int, Any], object] | None = None,
        on_error: Literal["raise", "log"] = "raise",
        unchanged: Literal["link", "write"] = "link",
        compression: str | None = None,
        fingerprint: bool = True,
        retry: Retry | None = None,
        max_workers: int | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        check_count(every, "every")
        for name, value in [
            ("keep", None if callable(keep) else keep),
            ("keep_every", keep_every),
            ("max_total_bytes", max_total_bytes),
        ]:
            if value is not None:
                check_count(value, name)
        _check_one_of("on_error", on_error, ("raise", "log"))
        _check_one_of("unchanged", unchanged, ("link", "write"))
        self._every, self._grace, self._timeout = operator.index(every), grace, timeout
        self._keeping = _Keeping(keep, keep_every, _best_of(keep_best), max_total_bytes)
        self._signals, self._save_on = tuple(signals), tuple(save_on)
        self._on_complete, self._logs_errors = on_complete, on_error == "log"
        self._links = unchanged == "link"
        self._agreed = {"overwrite": False, "compression": compression, "fingerprint": fingerprint}
        self._options = Options(max_workers, max_bytes, retry=retry)
        self._folder = RunFolder(path, timeout)
        self._removals = Removals(self._folder)
        self._owner: Owner | None = None  # in process 0
        self._is_owned = False
        self._names: dict[int, str] = {}  # of the complete steps, when they were listed last
        self._newest: int | None = None  # the newest step, complete or being saved
        self._done: set[int] = set()  # the steps that were saved or resumed
        self._previous = 0  # the step of the call before
        self._reached: int | None = None  # the newest step that reached save
        self._running: _Running | None = None
        self._is_asked = False  # the next call of save shall save
        self._announced = 0.0  # when this process learned of the end
        self._last_seconds = 0.0  # that the last save took, in process 0
        self._hooks: list[Future[Any]] = []

    # The steps of the training.

    @public
    @communicates("gda.checkpoint.Run.resume")
    def resume(
        self,
        state: Any,
        *,
        step: int | None = None,
        start_from: Any = None,
        damaged: Damaged = "set aside",
        at: Iterable[str | int] = (),
        partial: bool = False,
        missing: Literal["error", "keep"] = "error",
        cast: bool = False,
        read_once: bool = False,
        merge: Any = None,
    ) -> tuple[Any, int]:
        """Return the newest saved state and its step, or the given state and 0 if there is none.

        Args:
          state: as ``like`` of ``restore``: each leaf comes back as its example is.
          step: resume at this step, which must be the newest; ``rollback`` removes later ones.
          start_from: a checkpoint to begin with if the run has no step yet, such as
            ``'runs/base@1000'``; the step is 0 then.
          damaged: a damaged step is renamed, or marked on an object store, and the one before is
            used; ``'raise'`` raises instead. A step is damaged if any process finds it so.
          at, partial, missing, cast, read_once: as for ``restore``.
          merge: makes the state of a process from those of another number of processes, as for
            ``restore``.

        Raises:
          CorruptionError: steps were saved, and no one can be read; or one is damaged, with
            ``damaged='raise'``.
          ValueError: the state does not fit, or there are later steps than ``step``.
          CheckpointNotFoundError: the run has no step ``step``.
          OSError: reading or writing failed, or the folder is not the same for all processes.
          SaveError: it failed in another process.

        >>> import gda, jax.numpy as jnp, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = gda.checkpoint.Run(folder, every=100)
        ...     run.resume({'w': jnp.zeros(4)})[1]
        0
        """
        _check_one_of("damaged", damaged, ("set aside", "raise"))
        wanted = None if step is None else checked_step(step)
        self._finish()
        self._own(wanted)
        self._check_is_one_folder()
        options: dict[str, Any] = {
            "at": tuple(at),
            "partial": partial,
            "missing": missing,
            "cast": cast,
            "read_once": read_once,
            "timeout": self._timeout,
        }
        if merge is not None:
            options["merge"] = merge
        begun = time.monotonic()
        if not self._names:
            self._is_at(0, None)
            if start_from is None:
                log.info("%s has no step yet: the training begins", self._folder.url)
                return state, 0
            source = self._told("start_from", lambda: _place(path_of(start_from, self._timeout)))
            state = restore(start_from if source is None else source, state, **options)
            log.info("%s begins with the state of %s", self._folder.url, start_from)
            return state, 0

        def read(name: str) -> Any:
            return restore(below(self._folder.path, name), state, **options)

        found = read_newest(
            self._folder, self._names, read, damaged=damaged, reads_together=read_once
        )
        for number, reason in found.damage.items():
            name = self._names[number]
            aside = self._told("set aside", functools.partial(self._folder.set_aside, name, reason))
            log.warning("step %d is damaged and was set aside as %s: %s", number, aside, reason)
        newest = max(self._names)
        self._is_at(found.step, found.step)
        log.info(
            "resumed %s at step %d, in %.1f s%s",
            self._folder.url,
            found.step,
            time.monotonic() - begun,
            f"; {newest - found.step} steps are lost" if newest != found.step else "",
        )
        return found.state, found.step

    @public
    @communicates("gda.checkpoint.Run.save")
    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        now: bool = False,
    ) -> bool:
        """Begin to save the state if the step is due; return True if so.

        Call it after each step, with the number of steps that are done. When it returns, the arrays
        may be changed, deleted or donated. If the program is being ended, it saves at once, and
        waits until the step is complete. A step that was saved, or resumed at, is not saved again.
        If the save before is still running, this waits for it. Does not communicate if the step is
        not due.

        Args:
          step: a whole number, above those saved before; strides of any length.
          state: as for ``gda.checkpoint.save``.
          metrics: numbers, or arrays of one number, by name, for ``keep_best`` and ``metrics``.
            Those of process 0 count. The loop does not wait for the device.
          now: save also if the step is not due.

        Raises:
          ValueError: there is a newer step, or the folder has steps, and ``resume`` was not called.
          SaveError: another program took over the folder; or this save, or the one before, failed
            in another process.
          Exception: any error of ``gda.checkpoint.save``, of this save or of the one before.

        >>> import gda, jax.numpy as jnp, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with gda.checkpoint.Run(folder, every=100) as run:
        ...         run.save(99, {'w': jnp.zeros(4)}), run.save(100, {'w': jnp.zeros(4)})
        (False, True)
        """
        number = checked_step(step)
        self._own_empty()
        was_ending = self.is_ending
        if self._ending.check() and not was_ending:
            self._is_asked = True
            self._announce()
        is_due = rules.is_due(number, self._previous, self._every)
        self._previous = number
        self._reached = max(number, self._reached or 0)
        if number in self._done:
            self._is_asked = False
            if self.is_ending:
                self.wait()
            return False
        self._check_is_newest(number)
        if not (is_due or now or self._is_asked):
            return False
        return self._save(number, state, metrics)

    @public
    @communicates("gda.checkpoint.Run.check")
    def check(self) -> bool:
        """Return True if the program is being ended; for evaluation and other work between steps.

        All processes must call it equally often; all get the same answer. A signal of ``save_on``
        that is noticed here lets the next call of ``save`` save.
        """
        was_ending = self.is_ending
        if self._ending.check() and not was_ending:
            self._is_asked = True
            self._announce()
        return self.is_ending

    @property
    def is_ending(self) -> bool:
        """True after a call of ``save`` or ``check`` has found that the program is being ended."""
        return self._ending.is_ending

    @public
    @communicates("gda.checkpoint.Run.is_due")
    def is_due(self, step: int) -> bool:
        """Return True if ``save`` would save this step. Only the first call communicates."""
        self._own_empty()
        number = checked_step(step)
        is_due = rules.is_due(number, self._previous, self._every) or self._is_asked
        return is_due and number not in self._done

    @public
    @communicates("gda.checkpoint.Run.wait")
    def wait(self) -> None:
        """Wait until the step that is being saved is complete; raise the error if it failed."""
        self._finish()

    @public
    @communicates("gda.checkpoint.Run.close")
    def close(self, step: int | None = None, state: Any = None) -> None:
        """Save the last state if it is not saved, and wait until everything is done.

        Waits for the removal of old steps for at most ``grace`` seconds. Without ``step`` and
        ``state``, it logs if the last step that reached ``save`` is not saved.

        Raises:
          Exception: that of the last save, or of the one before.
        """
        failure: Exception | None = None
        try:
            self._finish()
        except TakenOverError:
            raise
        except Exception as error:  # raised when the last state is safe
            failure = error
        if step is not None:
            number = checked_step(step)
            self._own_empty()
            if number not in self._done:
                self._check_is_newest(number)
                self._save(number, state, None, logs_errors=False)
                self._finish()
        elif self._reached is not None and self._reached > (self._newest or 0):
            log.warning(
                "step %d of %s reached save and is not saved; call close(step, state) at the end",
                self._reached,
                self._folder.url,
            )
        self._removals.wait(self._grace)
        wait(self._hooks, self._grace)
        self._end()
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # the others may be elsewhere; the save in flight goes on, also if the program ends
            self._end()

    # The folder.

    @public
    def rollback(self, step: int, *, newest: int) -> bool:
        """Remove the steps after ``step``, if ``newest`` is the newest one; return True if so.

        Otherwise nothing happens, so that a program that is started again may say it again. It is
        one act: from its beginning, the later steps are neither listed nor resumed, whenever the
        program is killed. Call it before ``resume``.

        Raises:
          CheckpointNotFoundError: the run has no such step.
        """
        number, expected = checked_step(step), checked_step(newest)
        self._finish()

        def work() -> bool:
            steps = self._folder.complete()
            if max(steps, default=None) != expected:
                return False
            self._step_in(steps, number)
            if self._owner is None:
                self._owner = self._folder.claim(self._keeping.metric)
            remove_later(self._folder, self._owner, number)
            return True

        is_done = self._told(f"rollback to step {number}", work)
        if is_done:
            self._list()
            self._is_at(min(self._previous, number), number if self._newest else None)
        return is_done

    @public
    def steps(self) -> list[int]:
        """Return the complete steps, ascending, as they are in the folder now."""
        self._list()
        return sorted(self._names)

    @public
    def latest(self) -> int | None:
        """Return the newest complete step; ``None`` if there is none."""
        return max(self.steps(), default=None)

    @public
    def best(self) -> int | None:
        """Return the best step by the metric of ``keep_best``; ``None`` if none has it.

        Raises:
          ValueError: the run has no ``keep_best``.
        """
        metric = self._keeping.metric
        if metric is None:
            raise ValueError("best() needs keep_best, such as Run(..., keep_best=(1, 'loss'))")

        def work() -> int | None:
            folders = self._folder.complete()
            ranked = self._folder.best_first(folders, metric[0], is_highest=metric[1])
            return next(iter(ranked), None)

        return self._told("best", work)

    @public
    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of a complete step by name; empty if it has none."""
        number = checked_step(step)

        def work() -> dict[str, float]:
            return self._folder.metrics(self._step_in(self._folder.complete(), number).name)

        return self._told(f"metrics of step {number}", work)

    @public
    def record(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics to a complete step, also from a program that evaluates it.

        >>> import gda, jax.numpy as jnp, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with gda.checkpoint.Run(folder, every=100, keep_best=(1, 'loss')) as run:
        ...         _ = run.save(100, {'w': jnp.zeros(4)})
        ...         run.wait()
        ...         run.record(100, {'loss': 0.5})
        ...         run.best(), run.metrics(100)
        (100, {'loss': 0.5})
        """
        number, begun = checked_step(step), metrics_of.begin_to_fetch(metrics)

        def work() -> None:
            name = self._step_in(self._folder.complete(), number).name
            self._folder.record(name, metrics_of.fetched(begun))

        self._told(f"metrics of step {number}", work)

    @public
    def hold(self, step: int) -> None:
        """Keep a complete step, whatever the rules say, until its ``held.json`` is removed."""
        number = checked_step(step)

        def work() -> None:
            self._folder.hold(self._step_in(self._folder.complete(), number).name)

        self._told(f"hold of step {number}", work)

    def path(self, step: int) -> Any:
        """Return the path of a step, for every function that takes a checkpoint."""
        number = checked_step(step)
        return below(self._folder.path, self._names.get(number, name_of(number)))

    def __repr__(self) -> str:
        return f"<run in {self._folder.url}, newest step {self._newest}>"

    # What all processes do together.

    def _told(self, what: str, work: Callable[[], Any]) -> Any:
        """Return what ``work`` returns in process 0, when all have come to the same call."""
        return all_do(
            lambda: None,
            decide=lambda _: work(),
            what=f"{what}, of the run {self._folder.url}",
            timeout=self._timeout,
            failed=SaveError,
            shared=_SHARED,
        ).decision

    def _list(self) -> None:
        found = self._told("the list of steps", self._names_now)
        self._names = {int(number): name for number, name in found.items()}

    def _names_now(self) -> dict[str, str]:
        return {str(number): each.name for number, each in self._folder.complete().items()}

    def _own(self, only: int | None) -> None:
        """Become the owner of the folder; ``only`` is the one step that may be the newest."""

        def work() -> dict[str, str]:
            steps = self._folder.complete()
            if only is not None:
                self._step_in(steps, only)
                if later := [number for number in steps if number > only]:
                    raise ValueError(
                        f"{self._folder.url} has later steps than {only}: "
                        f"{format_numbers(later)}; call rollback({only}, newest={later[-1]}) first"
                    )
            if self._owner is None:
                self._owner = self._folder.claim(self._keeping.metric)
                if self._owner.ends is not None:  # of a rollback that was killed
                    remove_later(self._folder, self._owner, self._owner.ends)
            self._folder.check_owner(self._owner)
            remove_left_over(self._folder, self._owner)
            return self._names_now()

        found = self._told(f"resume at step {only}" if only is not None else "resume", work)
        self._names = {int(number): name for number, name in found.items()}
        self._is_owned = True

    def _own_empty(self) -> None:
        """Become the owner before the first save of a run that has no step."""
        if self._is_owned:
            return

        def work() -> None:
            if steps := self._folder.complete():
                raise ValueError(
                    f"{self._folder.url} has steps up to {max(steps)}, and this run has not "
                    "resumed: call run.resume(state) first, or give the run a folder of its own"
                )

        self._told("the first save", work)
        self._own(None)
        self._check_is_one_folder()

    def _check_is_one_folder(self) -> None:
        """Raise unless all processes see the file by which process 0 owns the folder."""
        if jax.process_count() == 1:
            return
        program = self._told("the owner", lambda: self._owner and self._owner.program)
        limit = time.monotonic() + LATE_SECONDS

        def sees() -> bool:
            while True:
                owner = self._folder.owner()
                if owner is not None and owner.program == program:
                    return True
                if time.monotonic() > limit:
                    return False
                time.sleep(0.2)

        blind = all_do(
            sees,
            decide=lambda parts: [process for process, seen in parts.items() if not seen],
            what=f"the folder {self._folder.url}",
            timeout=self._timeout,
        ).decision
        if blind:
            raise OSError(
                f"{self._folder.url} is not one folder for all processes: "
                f"{format_processes(blind)} do not see what process 0 wrote there. Use a file "
                "system that all share, or an object store"
            )

    def _is_at(self, previous: int, newest: int | None) -> None:
        """Go on from a step."""
        self._previous, self._newest = previous, newest
        self._reached = None
        self._done = set() if newest is None else {newest}

    def _step_in(self, steps: Mapping[int, StepFolder], number: int) -> StepFolder:
        if number not in steps:
            has = f"the steps {format_numbers(steps)}" if steps else "no complete step"
            raise CheckpointNotFoundError(
                f"{self._folder.url} has no complete step {number}; it has {has}"
            )
        return steps[number]

    def _check_is_newest(self, number: int) -> None:
        if self._newest is not None and number < self._newest:
            raise ValueError(
                f"step {number} is below step {self._newest}, the newest of {self._folder.url}: "
                f"call rollback({number}, newest={self._newest}) to go back, or use another folder"
            )

    # A save.

    def _save(
        self, number: int, state: Any, metrics: Mapping[str, Any] | None, logs_errors: bool = True
    ) -> bool:
        """Save a step; if the program is being ended, wait until it is complete."""
        begun = time.monotonic()
        # When the program ends, the last state is worth more than the error of the save before.
        self._finish(logs_errors=self.is_ending or (logs_errors and self._logs_errors))
        waited = time.monotonic() - begun
        try:
            is_begun = self._begin(number, state, metrics, begun, waited)
            if is_begun and self.is_ending:
                self._finish()
        except TakenOverError:
            raise
        except (OSError, SaveError) as error:
            if not (logs_errors and self._logs_errors):
                raise
            log.error("step %d of %s was not saved: %s", number, self._folder.url, error)
            return False
        self._is_asked = False
        return is_begun

    def _begin(
        self,
        number: int,
        state: Any,
        metrics: Mapping[str, Any] | None,
        begun: float,
        waited: float,
    ) -> bool:
        numbers = metrics_of.begin_to_fetch(metrics)
        before = self._newest
        base = self._told(
            f"save of step {number}", functools.partial(self._begin_step, number, before)
        )
        if base is None:  # there is no time left
            return False
        name = name_of(number)
        saving = _Saving(number, name, numbers, begun)
        save = Save(
            "gda.checkpoint.Run.save",
            below(self._folder.path, name),
            self._agreed | _linked_to(base),
            self._options,
            self._timeout,
            before_commit=functools.partial(self._before_commit, saving),
        )
        pending = in_background(save, state, after=functools.partial(self._after, saving, save))
        saving.held = time.monotonic() - begun
        saving.waited = waited
        self._running = _Running(number, pending, before)
        self._newest, self._reached = number, max(number, self._reached or 0)
        self._done.add(number)
        return True

    def _begin_step(self, number: int, before: int | None) -> str | None:
        """Make the folder of a step, in process 0; return the step to link to, or an empty text.

        ``None`` if the program will be killed before the step is complete.
        """
        assert self._owner is not None
        self._folder.check_owner(self._owner)
        if self._announced:
            left = self._announced + self._grace - time.monotonic()
            if self._last_seconds > left:
                log.warning(
                    "step %d of %s is not saved: a save takes %.1f s, and %.1f s of grace are "
                    "left; the steps after %s are lost",
                    *(number, self._folder.url, self._last_seconds, max(left, 0)),
                    0 if before is None else before,
                )
                return None
        folders = self._folder.listed()
        if (there := folders.get(number)) is not None:
            if there.is_complete or not there.is_begun:
                raise FileExistsError(
                    f"{self._folder.url}/{there.name} has files that this run did not begin; move "
                    "them elsewhere"
                )
            self._folder.remove_manifest(there.name)  # of a damaged step, on an object store
            self._folder.remove_rest(there.name)
        self._folder.begin(name_of(number), self._owner)
        is_milestone = self._keeping.every and rules.is_due(
            number, before or 0, self._keeping.every
        )
        newest = folders.get(-1 if before is None else before)
        if not self._links or is_milestone or newest is None or newest.is_of_orbax:
            return ""
        return newest.name

    def _before_commit(self, saving: _Saving) -> None:
        """Write the metrics, and look if the run is still this program's, in process 0."""
        assert self._owner is not None
        if saving.metrics:
            self._folder.record(saving.name, metrics_of.fetched(saving.metrics))
        self._folder.check_owner(self._owner)

    def _after(self, saving: _Saving, save: Save) -> None:
        """Log a complete step, and remove what is no longer kept, in process 0."""
        if jax.process_index() != 0:
            return
        seconds = time.monotonic() - saving.begun
        self._last_seconds = seconds - saving.waited
        slowest = max(range(len(save.seconds)), key=save.seconds.__getitem__)
        log.info(
            "saved step %d of %s: held %.3f s%s, complete after %.1f s, %s written%s",
            *(saving.number, self._folder.url, saving.held),
            f", of them {saving.waited:.1f} s for the save before" if saving.waited > 0.1 else "",
            *(seconds, format_bytes(save.nbytes)),
            f"; process {slowest} was slowest, {save.seconds[slowest]:.1f} s"
            if len(save.seconds) > 1
            else "",
        )
        if self._on_complete is not None:
            path = below(self._folder.path, saving.name)
            self._hooks = [each for each in self._hooks if not each.done()]
            self._hooks.append(
                in_thread(
                    "gda-on-complete", functools.partial(self._call_hook, saving.number, path)
                )
            )
        try:
            self._remove_old()
        except Exception as error:
            log.warning("old steps of %s were not removed: %s", self._folder.url, error)

    def _call_hook(self, number: int, path: Any) -> None:
        try:
            assert self._on_complete is not None
            self._on_complete(number, path)
        except Exception:
            log.exception("on_complete of step %d of %s failed", number, self._folder.url)

    def _remove_old(self) -> None:
        assert self._owner is not None
        folders = self._folder.complete()
        kept = self._keeping.kept(self._folder, folders)
        old = {n: each for n, each in folders.items() if n not in kept and each.is_begun}
        self._removals.remove(old, self._owner)

    def _finish(self, logs_errors: bool = False) -> None:
        """Wait for the save in flight; if it failed in any process, all raise, or log."""
        running, self._running = self._running, None
        if running is None:
            return
        failure: Exception | None = None
        try:
            running.pending.result()
        except Exception as error:
            failure = error
        has_failed = all_do(
            lambda: failure is not None,
            decide=lambda parts: self._failed_in(parts),
            what=f"end of the save of step {running.number}, of the run {self._folder.url}",
            timeout=self._timeout,
            failed=SaveError,
            shared=_SHARED,
        ).decision
        if not has_failed:
            return
        self._newest = running.before
        self._done.discard(running.number)
        if failure is None:
            failure = SaveError(
                f"step {running.number} of {self._folder.url} was not saved: "
                f"{format_processes(has_failed)} failed"
            )
        if not logs_errors:
            raise failure
        log.error(
            "step %d of %s was not saved; the training goes on", running.number, self._folder.url
        )

    def _failed_in(self, parts: dict[int, bool]) -> list[int]:
        """Return the processes in which a save failed; raise if another program is the reason."""
        failed = [process for process, has_failed in parts.items() if has_failed]
        if failed and self._owner is not None:
            self._folder.check_owner(self._owner)
        return failed

    # The end.

    @functools.cached_property
    def _ending(self) -> Ending:
        return Ending(self._signals, self._save_on)

    def _announce(self) -> None:
        if self.is_ending:
            self._announced = time.monotonic()
            log.warning("the program is being ended: %s", self._ending.reason)

    def _end(self) -> None:
        self._ending.close()


def _linked_to(base: str) -> dict[str, Any]:
    """Return the options of a save whose unchanged arrays are linked to those of a step."""
    return {}  # {"base": base or None} when saves take it


class _Running(NamedTuple):
    """The save in flight, and the newest step if it fails."""

    number: int
    pending: Pending
    before: int | None


@dataclass
class _Saving:
    """A save, for its log line: when it began, how long the caller was held, and waited."""

    number: int
    name: str
    metrics: dict[str, Any]
    begun: float
    held: float = 0
    waited: float = 0


class _Keeping(NamedTuple):
    """The rules by which steps are kept."""

    keep: int | Callable[[list[int]], Iterable[int]] | None
    every: int | None
    best: rules.Best | None
    most_bytes: int | None

    @property
    def metric(self) -> tuple[str, bool] | None:
        return None if self.best is None else (self.best.metric, self.best.is_highest)

    def kept(self, folder: RunFolder, folders: Mapping[int, StepFolder]) -> set[int]:
        """Return the steps to keep, of the complete ones; the newest and those held are kept."""
        steps = sorted(folders)
        held = {number for number, each in folders.items() if each.is_held}
        if callable(self.keep):
            chosen: Collection[int] = {*self.keep(steps)}
        else:
            best: Sequence[int] = ()
            if self.best is not None and self.keep is not None:
                most, metric, is_highest = self.best
                best = folder.best_first(folders, metric, is_highest=is_highest)[:most]
            chosen = rules.kept(steps, self.keep, self.every, best)
        if self.most_bytes is not None:
            chosen = {*chosen, *steps[-1:]} & {*steps}
            sizes = {n: inspect(below(folder.path, folders[n].name)).nbytes for n in chosen}
            chosen = rules.within_bytes(chosen, sizes, self.most_bytes)
        return {*chosen, *held, *steps[-1:]}


def _best_of(given: Any) -> rules.Best | None:
    """Return the rule that ``keep_best`` gives."""
    if given is None:
        return None
    parts = [*given, "min"] if isinstance(given, tuple) and len(given) == 2 else given
    if not (isinstance(parts, list | tuple) and len(parts) == 3 and parts[2] in ("min", "max")):
        raise ValueError(
            "keep_best must be a number of steps and a metric, such as (2, 'loss'), or "
            f"(2, 'accuracy', 'max') if the highest is best, not {given!r}"
        )
    check_count(parts[0], "the number of keep_best")
    return rules.Best(operator.index(parts[0]), str(parts[1]), parts[2] == "max")


def _check_one_of(name: str, value: Any, known: tuple[str, str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be {known[0]!r} or {known[1]!r}, not {value!r}")


def _place(path: Any) -> Any:
    """Return a path for the other processes; ``None`` for one that is not text."""
    return path if isinstance(path, str) else None
