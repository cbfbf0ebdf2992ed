"""The checkpoints of a training: numbered steps; some are kept, and the newest is resumed.

Every method that communicates is one meeting of all processes, in which process 0 does the work
that must be done once: it lists the steps, begins a save, or removes. So all processes always have
the same list of steps. At most one save is in flight.
"""

from __future__ import annotations

import logging
import operator
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial as bind  # resume has an argument of the other name
from typing import Any, Literal, Self

import jax

from gda.checkpoint.local_steps.host_folder import RunStart, WholeStep
from gda.checkpoint.local_steps.local_tier import LocalSteps
from gda.checkpoint.restoring import restore
from gda.checkpoint.runs.keeper import Keeper, StepSave, begun_to_fetch, fetched
from gda.checkpoint.runs.resuming import StepToRead, read_newest
from gda.checkpoint.save_in_flight import SaveInFlight
from gda.checkpoint.saving import MAX_BYTES, Save
from gda.checkpoint.step_folders.folder import (
    RunFolder,
    TakenOverError,
    below,
    checked_step,
    name_of,
    path_of,
)
from gda.checkpoint.step_folders.rules import Keep, Rules, is_due
from gda.layout.boundary import public, set_module
from gda.layout.text import format_numbers
from gda.multihost.agreement import call_fields, communicates
from gda.multihost.ending import Ending
from gda.multihost.meeting import DisagreementError, LateProcessError
from gda.multihost.shared_folders import check_is_one_folder
from gda.multihost.steps import all_do
from gda.storage.options import Options, Retry, check_count, check_seconds
from gda.storage.stores.checksums import require_crc32c
from gda.storage.stores.errors import CheckpointNotFoundError, CorruptionError, SaveError
from gda.storage.stores.opening import open_store
from gda.trees.records.requests import Request

log = logging.getLogger("gda")

_SHARED = (
    *(TakenOverError, CheckpointNotFoundError, CorruptionError, DisagreementError),
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
      signals: that announce the end of the program, in any process.
      save_on: signals after which the next call of ``save`` saves, and the training goes on.
      grace: seconds from such an announcement until the program is killed.
      timeout: seconds to wait for other processes and for an object store, as for ``save``.
      on_complete: called with ``(step, path)`` when a step is complete, in process 0 and in a
        thread of its own. The step is not removed before it returns. An error of it is logged.
      on_error: ``'log'`` goes on after a save that failed, until the next one; ``close`` and
        ``wait`` raise its error nevertheless.
      local: a folder on the own disk of each host, such as ``/dev/shm/run``, or in its memory. The
        steps there, each on all hosts, bring a training back after a host is lost, or a process is
        killed; a machine's disk is no place for the last copy, so the other steps go to ``path``.
      local_every: with ``local``, save there at every multiple of this number of steps.
      local_keep: the local steps to keep; each host needs room for one more.
      local_copies: the other hosts that get a block which only one host holds. With 1, the loss of
        any one host loses nothing; with 0, only blocks that another host holds survive it.
      unchanged: ``'write'`` writes all arrays. By default, an array that has not changed since the
        newest step is linked where the file system can.
      retry, max_workers, max_bytes: as for ``save``.

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
        keep: Keep = None,
        keep_every: int | None = None,
        keep_best: tuple[int, str] | tuple[int, str, Literal["min", "max"]] | None = None,
        signals: Sequence[int] = (signal.SIGTERM,),
        save_on: Sequence[int] = (),
        grace: float = 30,
        timeout: float = 600,
        on_complete: Callable[[int, Any], object] | None = None,
        on_error: Literal["raise", "log"] = "raise",
        local: Any = None,
        local_every: int | None = None,
        local_keep: int = 2,
        local_copies: int = 1,
        unchanged: Literal["link", "write"] = "link",
        retry: Retry | None = None,
        max_workers: int | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        check_count(every, "every")
        _check_one_of("on_error", on_error, ("raise", "log"))
        _check_one_of("unchanged", unchanged, ("link", "write"))
        require_crc32c()
        _check_signals("signals", signals)
        _check_signals("save_on", save_on)
        check_seconds(grace, "grace")
        if on_complete is not None and not callable(on_complete):
            raise ValueError(
                f"on_complete must be a function of step and path, not {on_complete!r}"
            )
        rules = Rules.of(keep, keep_every, keep_best)
        self._every, self._grace, self._timeout = operator.index(every), grace, timeout
        self._signals, self._logs_errors = (signals, save_on), on_error == "log"
        self._options = Options(max_workers, max_bytes, retry=retry)
        self._folder = RunFolder(path, timeout)
        self._keeper = Keeper(self._folder, rules, unchanged == "link", on_complete)
        self._meet = bind(all_do, timeout=timeout, failed=SaveError, shared=_SHARED)
        self._local = LocalSteps.of(
            *(local, local_every, local_keep, local_copies, self._options, timeout),
            *(self._meet, self._ask, self._keeper.check_owner),
        )
        self._compared = {
            "path": self._folder.url,
            "every": self._every,
            "grace": grace,
            "keep": getattr(keep, "__qualname__", keep),
            "keep_every": keep_every,
            "keep_best": (rules.num_best, rules.best),
            "signals": [*map(int, signals)],
            "save_on": [*map(int, save_on)],
            "on_error": on_error,
            "unchanged": unchanged,
            **(self._local.compared if self._local else {}),
        }
        # "resume" or "rollback" until a later resume has succeeded.
        self._phase: Literal["new", "resume", "rollback", "going on", "closed"] = "new"
        self._whole: list[WholeStep] = []  # the steps that the hosts had at the beginning
        self._names: dict[int, str] = {}  # of the complete steps, when they were listed last
        self._previous = 0  # the step of the call before
        self._reached = 0  # the newest step that reached save, also if it was not saved
        self._flight = SaveInFlight(
            meet=self._meet,
            store_of=lambda name: open_store(below(self._folder.path, name), timeout),
            not_saved=f"of {self._folder.url} was not saved",
            failed=self._ask,
            is_complete=self._keeper.failed,
        )
        self._ending: Ending | None = None
        self._is_asked = False  # the next call of save shall save
        self._is_told = False  # the next call of save looks if the one before has failed

    # The steps of the training.

    @communicates("gda.checkpoint.Run.resume")
    def resume(
        self,
        state: Any,
        *,
        step: int | None = None,
        start_from: Any = None,
        damaged: Literal["set aside", "raise"] = "set aside",
        at: Iterable[str | int] = (),
        partial: bool = False,
        missing: Literal["error", "keep"] = "error",
        cast: bool = False,
        read_once: bool = False,
        merge: Callable[[list[Any], int], Sequence[Any]] | None = None,
    ) -> tuple[Any, int]:
        """Return the newest saved state and its step, or the given state and 0 if there is none.

        In a folder of an Orbax CheckpointManager, its newest step counts too, with the items that
        the state names.

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
          ValueError: the state does not fit, such as a leaf of another shape, dtype or kind; or
            there are later steps than ``step``.
          CheckpointNotFoundError: the run has no step ``step``.
          OSError: reading or writing failed, or the folder is not the same for all processes.
          SaveError: it failed in another process.

        >>> import gda, jax.numpy as jnp, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = gda.checkpoint.Run(folder, every=100)
        ...     run.resume({'w': jnp.zeros(4)})[1]
        0
        """
        self._phase = "resume"
        _check_one_of("damaged", damaged, ("set aside", "raise"))
        wanted = None if step is None else checked_step(step)
        options: dict[str, Any] = {"at": tuple(at), "partial": partial, "missing": missing}
        options |= {"cast": cast, "read_once": read_once}
        self._finish()
        self._own(wanted, {**options, "damaged": damaged, "start_from": _text_of(start_from)})
        options |= {"merge": merge, "timeout": self._timeout}
        begun, url = time.monotonic(), self._folder.url
        local = self._local_steps(wanted)
        if not self._names and not local:
            if start_from is None:
                self._go_on(0, state)
                log.info("%s has no step yet: the training begins", url)
                return state, 0
            # The same in all processes, also if it names the latest step of a run.
            source = self._told("start_from", lambda: _text_of(path_of(start_from, self._timeout)))
            state = self._meet(
                lambda: restore(source or start_from, state, **options),
                share=lambda _: None,
                what=f"reading {start_from}, for the run {url}",
            ).mine
            self._go_on(0, state)
            log.info("%s begins with the state of %s", url, start_from)
            return state, 0

        from_hosts: Counter[int] = Counter()
        steps = self._steps_to_read(local, state, options, from_hosts)
        found = read_newest(self._folder, steps, damaged=damaged, reads_together=read_once)
        names, number = self._names, found.step.number
        for bad, reason in found.damaged:
            if bad.name is None:
                log.warning("local step %d is damaged, and not used: %s", bad.number, reason)
                continue
            aside = self._told("set aside", bind(self._folder.set_aside, bad.name, reason))
            names = {n: name for n, name in names.items() if name != bad.name}
            log.warning("step %d is damaged and was set aside as %s: %s", bad.number, aside, reason)
        is_local, lost = found.step.name is None, steps[0].number - number
        used = next((each for each in local if each.place == found.step.place), None)
        newest = sorted(names)[-1:]
        hosts = self._go_on(number, found.state, *newest, used=used, fetched=from_hosts)
        if is_local:
            hosts = f" {hosts}; the store has {f'step {newest[0]}' if newest else 'no step'}"
        seconds, damage = time.monotonic() - begun, f"; {lost} steps lost by damage" if lost else ""
        log.info("resumed %s at step %d%s, in %.1f s%s", url, number, hosts, seconds, damage)
        return found.state, number

    def _local_steps(self, wanted: int | None) -> list[WholeStep]:
        """Return the steps on the hosts' disks that may be resumed; raise as for later steps."""
        numbers = [each.name.number for each in self._whole]
        if wanted is not None and max(numbers, default=wanted) > wanted:
            raise ValueError(
                f"the hosts have later local steps than {wanted}: {format_numbers(numbers[::-1])}; "
                "resume without step, or remove the folder of local steps on each host"
            )
        return [each for each in self._whole if wanted in (None, each.name.number)]

    def _steps_to_read(
        self, local: Sequence[WholeStep], state: Any, options: dict[str, Any], fetched: Counter[int]
    ) -> list[StepToRead]:
        """Return the steps of the store and of the hosts, the newest first."""

        def of_store(name: str) -> Any:
            return restore(below(self._folder.path, name), state, **options)

        steps = [
            StepToRead(number, f"{self._folder.url}/{name}", bind(of_store, name), name)
            for number, name in self._names.items()
        ]
        if self._local:
            like = {name: options[name] for name in ("at", "partial", "cast", "merge")}
            keeps = options["missing"] == "keep"
            request = Request(state, None, None, pad=False, plain=None, keeps_missing=keeps, **like)
            read = bind(self._local.read, request=request, told=fetched)
            steps += [StepToRead(each.name.number, each.place, bind(read, each)) for each in local]
        # Of two with one number, that on the hosts' own disks is quicker.
        return sorted(steps, key=lambda each: (each.number, each.name is None), reverse=True)

    @communicates("gda.checkpoint.Run.save of step {step}")
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
          ValueError: there is a newer step, or the folder has steps, and ``resume`` was not called,
            or the last ``resume`` or ``rollback`` raised.
          SaveError: another program took over the folder; or this save, or the one before, failed
            in another process.
          RuntimeError: the run is closed.
          Exception: any error of ``gda.checkpoint.save``, of this save or of the one before. That
            of the one before is raised at the same call in all processes, also if no step is due.

        >>> import gda, jax.numpy as jnp, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with gda.checkpoint.Run(folder, every=100) as run:
        ...         run.save(99, {'w': jnp.zeros(4)}), run.save(100, {'w': jnp.zeros(4)})
        (False, True)
        """
        number = checked_step(step)
        is_due = self._is_due(number)
        self._reached = max(number, self._reached)
        if self._is_told:
            self._is_told = False
            # When the program ends, the last state is worth more than the error.
            self._finish(self._logs_errors or self.is_ending)
        if self._is_new(number):
            is_begun = is_due or now
            is_begun = is_begun and self._save(number, state, metrics, self._logs_errors)
            is_begun = self._save_locally(number, state) or is_begun
        else:
            self._is_asked = is_begun = False
        self._previous = number  # not after an error: the step may be saved again
        return is_begun

    @communicates("gda.checkpoint.Run.check")
    def check(self) -> bool:
        """Return True if the program is being ended; for evaluation and other work between steps.

        All processes must call it equally often; all get the same answer. A signal of ``save_on``
        that is noticed here lets the next call of ``save`` save.
        """
        self._look()
        return self.is_ending

    @property
    def is_ending(self) -> bool:
        """True after a call of ``save`` or ``check`` has found that the program is being ended."""
        return self._ending is not None and self._ending.is_ending

    @communicates("gda.checkpoint.Run.is_due")
    def is_due(self, step: int) -> bool:
        """Return True if ``save`` would save this step, also because of a signal.

        Communicates like ``check``. Raises as ``save`` for a step that ``save`` refuses.
        """
        number = checked_step(step)
        is_due = self._is_due(number)
        return self._is_new(number) and (is_due or self._is_due_locally(number))

    def _is_due(self, number: int) -> bool:
        self._own_if_new()
        self._look()
        return is_due(number, self._previous, self._every) or self._is_asked

    def _is_due_locally(self, number: int) -> bool:
        if self._local is None or self.is_ending:  # then the step goes to the store
            return False
        return self._local.is_due(number, self._previous)

    @communicates("gda.checkpoint.Run.wait")
    def wait(self) -> None:
        """Wait until the step that is being saved is complete; raise the error if it failed."""
        self._finish()

    @communicates("gda.checkpoint.Run.close")
    def close(self, step: int | None = None, state: Any = None) -> None:
        """Save the last state if it is not saved, and wait until everything is done.

        Waits for ``on_complete`` and the removal of old steps, for at most ``grace`` seconds, and
        logs those that still run. Without ``step`` and ``state``, it logs if the last step that
        reached ``save`` is not saved.

        Raises:
          ValueError: a step was given without its state, or a state without its step; or a step
            that ``save`` refuses.
          Exception: that of the last save, or of the one before.
        """
        try:
            self._close(step, state)
        finally:
            self._end()

    def _close(self, step: int | None, state: Any) -> None:
        if (step is None) != (state is None):
            raise ValueError(
                "close() needs both the step and the state, to save them, or neither: call "
                "run.close(step, state)"
            )
        failure: Exception | None = None
        try:
            self._finish()
        except TakenOverError:
            raise
        except Exception as error:  # raised when the last state is safe
            failure = error
        if step is not None:
            number = checked_step(step)
            self._own_if_new()
            if self._is_new(number):
                self._save(number, state, None, logs_errors=False)
                self._finish()
        elif self._reached > (self._newest or 0):
            log.warning(
                "step %d of %s reached save and is not saved; call close(step, state) at the end",
                self._reached,
                self._folder.url,
            )
        self._keeper.wait(self._grace)
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # the others may be elsewhere; the save in flight goes on, also if the program ends
            self._keeper.wait(0)
            self._end()

    # The folder.

    @public
    def rollback(self, step: int, *, newest: int) -> bool:
        """Remove the steps after ``step``, if ``newest`` is the newest one; return True if so.

        Otherwise nothing happens, so that a program that is started again may say it again, also
        after it has saved a new step ``newest``. It is one act: from its beginning, the later steps
        are neither listed nor resumed, whenever the program is killed. It does not change the state
        of the program: call ``resume`` after it; until then, nothing is saved.

        Raises:
          CheckpointNotFoundError: the run has no such step.
          ValueError: a later step is held.
          DisagreementError: the processes name different steps.
        """
        number, expected = checked_step(step), checked_step(newest)
        before, self._phase = self._phase, "rollback"
        self._finish()
        what = f"rollback to step {number} if the newest is {expected}"
        is_done = bool(self._told(what, lambda: self._keeper.roll_back(number, expected)))
        if not is_done:
            self._phase = before
        return is_done

    @public
    def steps(self) -> list[int]:
        """Return the complete steps, ascending, as they are in the folder now."""

        def work() -> list[Any]:
            return [[number, each.name] for number, each in self._folder.complete().items()]

        self._names = dict(self._told("the list of steps", work))
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
        if (best := self._keeper.rules.best) is None:
            raise ValueError("best() needs keep_best, such as Run(..., keep_best=(1, 'loss'))")
        ranked = self._told("best", lambda: self._folder.best_first(*best))
        return next(iter(ranked), None)

    @public
    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of a complete step by name; empty if it has none."""
        return self._of_step(
            step, lambda number: self._folder.metrics(self._folder.step(number).name)
        )

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
        self._of_step(
            step, lambda number: self._folder.record(number, fetched(begun_to_fetch(metrics)))
        )

    @public
    def hold(self, step: int) -> None:
        """Keep a complete step, whatever the rules say, until its ``held.json`` is removed."""
        self._of_step(step, self._folder.hold)

    def path(self, step: int) -> Any:
        """Return the path of a step, for every function that takes a checkpoint."""
        number = checked_step(step)
        return below(self._folder.path, self._names.get(number, name_of(number)))

    def __repr__(self) -> str:
        newest = self._newest
        if self._phase != "going on" and not self._folder.store().is_remote:
            with suppress(OSError, ValueError):
                newest = max(self._folder.complete(), default=None)
        step = "no step yet" if newest is None else f"newest step {newest}"
        return f"<run in {self._folder.url}, {step}>"

    # Steps of all processes together.

    def _told(self, what: str, work: Callable[[], Any]) -> Any:
        """Return the result of ``work`` in process 0, when all processes make the same call."""
        what = f"{what}, of the run {self._folder.url}"
        return self._meet(lambda: None, decide=lambda _: work(), what=what).decision

    def _of_step(self, step: int, work: Callable[[int], Any]) -> Any:
        """Return the result of ``work`` in process 0 for a complete step."""
        number = checked_step(step)
        return self._told(f"step {number}", lambda: work(number))

    def _own_if_new(self) -> None:
        if self._phase in ("resume", "rollback"):
            raise ValueError(
                f"after {self._phase}(), nothing is saved in {self._folder.url} until "
                "run.resume(state) has succeeded; call it"
            )
        if self._phase == "new":
            self._own(None)
            if self._whole:
                raise ValueError(
                    f"the hosts have local steps of {self._folder.url} up to "
                    f"{self._whole[0].name.number}, and this run has not resumed: call "
                    "run.resume(state) first"
                )
            self._phase = "going on"

    def _own(self, only: int | None, options: Mapping[str, Any] | None = None) -> None:
        """Own the folder, list its steps, notice signals; ``options`` of ``resume`` must agree."""
        resumes = options is not None
        agreed = self._compared | {**(options or {}), "resumes": resumes, "step": only}
        found = self._meet(
            lambda: None,
            what="gda.checkpoint.Run",
            agreed=lambda _: call_fields((), agreed),
            decide=lambda _: [
                *self._keeper.own(only, resumes),
                None if self._local is None else self._keeper.start(),
            ],
            deciding=self._timeout,
        )
        program, names, start = found.decision
        self._names = dict(names)
        if jax.process_count() > 1:

            def look() -> bool:
                owner = self._folder.owner()
                return owner is not None and owner.program == program

            check_is_one_folder(self._folder.url, look, self._timeout)
        if self._local is not None:
            fields, least = start
            self._whole = self._local.look(RunStart(**fields), least)
        self._hears()

    def _go_on(
        self,
        previous: int,
        state: Any,
        *newest: int,
        used: WholeStep | None = None,
        fetched: Mapping[int, int] | None = None,
    ) -> str:
        """Go on after a step; return a text of the hosts that had it."""
        hosts = ""
        if self._local is not None:
            hosts = self._local.begin(state, previous, used, fetched or {})
        self._phase, self._flight.steps = "going on", [*newest]
        self._previous = self._reached = previous
        return hosts

    @property
    def _newest(self) -> int | None:
        """The newest step, complete or in flight."""
        return next(reversed(self._flight.steps), None)

    def _is_new(self, number: int) -> bool:
        """Return False for a step that was saved or resumed; raise if it is below the newest."""
        if self._newest is None or number > self._newest:
            return True
        if number in self._flight.steps:
            return False
        raise ValueError(
            f"step {number} is below step {self._newest}, the newest of {self._folder.url}: to go "
            f"back, call run.rollback(step, newest={self._newest}) with a step that is saved, and "
            "resume"
        )

    # A save.

    def _save(
        self, number: int, state: Any, metrics: Mapping[str, Any] | None, logs_errors: bool
    ) -> bool:
        """Save a step; if the program is being ended, wait until it is complete."""
        begun = time.monotonic()
        self._flight.failure()
        step = StepSave(number, metrics or {}, begun, time.monotonic() - begun)
        with _logged(f"step {number} of {self._folder.url} was not saved", logs_errors):
            # When the program ends, the last state is worth more than the earlier error.
            is_begun = self._begin(step, state, logs_errors or self.is_ending)
            if self.is_ending:
                self._finish()
            self._is_asked = False
            return is_begun
        return False

    def _save_locally(self, number: int, state: Any) -> bool:
        """Save a step on the hosts' disks if it is due; return True if so."""
        if self._local is not None and self._is_due_locally(number):
            with _logged(f"step {number} was not saved on the hosts' disks", self._logs_errors):
                return self._local.save(number, state, self._logs_errors)
        return False

    def _begin(self, step: StepSave, state: Any, logs_errors: bool) -> bool:
        """Begin a save, and learn in the same meeting if the one before has failed."""
        left = self._hears().since + self._grace - time.monotonic()

        def decide(newest: int | None) -> tuple[bool, str | None]:
            if not self._keeper.has_time_for(step.number, newest, left):
                return False, None
            return True, self._keeper.begin(step, newest)

        save = Save(
            f"gda.checkpoint.Run.save of step {step.number}",
            below(self._folder.path, name_of(step.number)),
            {"overwrite": False, "step": step.number},
            self._options,
            self._timeout,
            before_commit=bind(self._keeper.before_commit, step),
        )
        completed = bind(self._keeper.completed, step)
        try:
            return self._flight.begin(step.number, save, state, logs_errors, completed, decide)
        except Exception as error:
            if jax.process_index() == 0:
                with suppress(Exception):
                    self._keeper.failed(step.number)
            # An error in all processes: they may not know yet if the save before has failed.
            if not isinstance(error, DisagreementError | LateProcessError | ConnectionError):
                self._finish(logs_errors)
            raise

    def _finish(self, logs_errors: bool = False) -> None:
        """Wait for the saves in flight; if one failed in any process, all raise, or log."""
        what = f"end of the save of step {self._newest}, of the run {self._folder.url}"
        self._flight.finish(what, logs_errors)
        if self._local is not None:
            self._local.finish(logs_errors)

    # The end.

    def _hears(self) -> Ending:
        """Return the listener to signals, which the first call makes."""
        if self._ending is None:
            self._ending = Ending(*self._signals)
        return self._ending

    def _ask(self) -> None:
        """Make the next call of save a meeting, which raises the error of a save in all."""
        if (ending := self._ending) is not None and not self._logs_errors:
            ending.ask()

    def _look(self) -> None:
        """Notice signals, by equally many calls in all processes."""
        if self._phase == "closed":
            raise RuntimeError(
                f"{self!r} is closed; make another gda.checkpoint.Run, or call resume, to go on"
            )
        ending, was_ending = self._hears(), self.is_ending
        if ending.check() and not was_ending:
            self._is_told = True
            # Without a reason, a save has failed, and its error may have been raised already.
            self._is_asked = self._is_asked or bool(ending.reason)

    def _end(self) -> None:
        if self._local is not None:
            self._local.close()
        if self._ending is not None:
            self._ending.close()
            self._ending = self._ending if self.is_ending else None
            self._phase = "closed" if self._phase == "going on" else self._phase


@contextmanager
def _logged(what: str, logs_errors: bool) -> Iterator[None]:
    """Log an error of a save, if errors are logged, unless the program must not go on."""
    try:
        yield
    except (TakenOverError, DisagreementError):
        raise
    except Exception as error:  # of any class: where it does not occur, it is a SaveError
        if not logs_errors:
            raise
        log.error("%s: %s", what, error)


def _check_one_of(name: str, value: Any, known: tuple[str, str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be {known[0]!r} or {known[1]!r}, not {value!r}")


def _check_signals(name: str, numbers: Any) -> None:
    can_be_heard = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    if not isinstance(numbers, Sequence) or not can_be_heard.issuperset(numbers):
        raise ValueError(
            f"{name} must be a list of signals that a program can hear, such as (signal.SIGTERM,), "
            f"not {numbers!r}"
        )


def _text_of(path: Any) -> str | None:
    return path if isinstance(path, str) else None
