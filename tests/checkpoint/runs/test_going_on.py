"""Programs that catch an error and go on: no complete step is lost or replaced.

A script is a random row of calls of a run. Some are wrong, during some the disk or the object store
fails, and some differ between the processes. Each error is caught, and the program goes on.
"""

import contextlib
import errno
import itertools
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore as ts
from damaged import flip
from faulty_store import Faults, FaultyStore, Request
from kill_program import Arguments, Disk
from leaks import no_thread_is_left  # noqa: F401, of every test
from training import check, state_of
from trials import Trials, tried

import gda
from gda.checkpoint import CorruptionError, PerProcess, Run
from gda.checkpoint.step_folders import rules
from gda.checkpoint.step_folders.folder import RunFolder, StepFolder, below
from gda.storage.stores.directory import LOCK
from gda.storage.stores.object_store import KvStore

ERRORS = (OSError, ValueError, TypeError, RuntimeError)
LARGE = np.arange(2**18, dtype=np.uint32)  # as large as arrays whose files are linked
READ = {"timeout": 20}


class Unreadable:
    """A source whose read fails."""

    shape, dtype = (8, 8), np.dtype(np.float32)

    def __getitem__(self, index: Any) -> Any:
        raise ConnectionError("the source cannot be read")


def fails(error: int, names: tuple[str, ...]) -> Callable[[bool, str, Arguments], None]:
    """Return a fault of a disk: the first of some functions fails, or all if they are named."""

    def fault(is_first: bool, name: str, arguments: Arguments) -> None:
        makes = name == "open" and arguments[1] & os.O_CREAT
        if is_first if not names else makes or name in names:
            raise OSError(
                error, os.strerror(error), *[n for n in arguments[:1] if isinstance(n, str)]
            )

    return fault


DISKS = [
    fails(errno.EIO, ()),
    fails(errno.ENOSPC, ("writev", "mkdir")),
    fails(errno.EROFS, ("writev", "mkdir", "unlink", "rmtree", "replace", "link")),
]


class Script:
    """Programs of one run that go on after errors, and what must be true of its folder.

    Attributes:
      whole: number and identity of the state in each complete step.
      tried: the states that saves have been given since the steps were looked at, by step.
      is_ready: True if a save may begin.
      is_dirty: True if a save in the background may have failed, which was not raised yet.
    """

    def __init__(self, place: Any, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.place, self.chance, self.patch = place, random.Random(seed), patch
        self.is_store = not isinstance(place, Path)
        self.me, self.count = jax.process_index(), jax.process_count()
        self.victim = self.chance.randrange(self.count)
        self.numbers = itertools.count(1)
        self.whole: dict[int, tuple[int, str]] = {}
        self.tried: dict[int, set[int]] = {}
        self.losses: dict[int, float] = {}
        self.given_losses: dict[int, float] = {}
        self.held: set[int] = set()
        self.perhaps_held: set[int] = set()
        self.damaged: set[int] = set()
        self.rolled: set[tuple[int, int]] = set()
        self.to: int | None = None  # of the rollback that is under way
        self.said: list[str] = []
        self.faults = Faults()
        self.is_ready = self.is_dirty = self.is_over = self.is_last = False
        self.is_rolling_back = False  # a rollback failed, and the next resume may end it
        if self.is_store:
            real = KvStore.__init__

            def opened(store: KvStore, where: Any, timeout: float) -> None:
                real(store, where, timeout)
                store._kv = FaultyStore(store._kv, self.faults)

            patch.setattr(KvStore, "__init__", opened)
        else:
            Disk().install(patch.setattr)
        self.run = self.new()

    # The faults, and what is there.

    @contextlib.contextmanager
    def fault(self) -> Iterator[None]:
        """Let the disk or the store of one process fail."""
        at, fault = self.chance.randrange(60), self.chance.choice(DISKS)
        begun = len(self.faults.requests) + at // 2

        def refuse(request: Request) -> str | None:
            is_due = request.number >= begun if at % 2 else request.number == begun
            return "403" if is_due else None

        if self.me == self.victim:
            if self.is_store:
                self.faults.fault = refuse
            else:
                Disk(fault, at).install(self.patch.setattr)
        try:
            yield
        finally:
            self.faults.fault = lambda request: None
            if not self.is_store:
                Disk().install(self.patch.setattr)

    def do(self, what: str, call: Callable[[], Any], often: float = 0.3) -> tuple[Any, bool]:
        """Make a call; return its result or its error, and True if nothing failed meanwhile."""
        is_faulty = self.chance.random() < often and not self.is_last
        settles = self.chance.random() < 0.5
        self.said.append(f"{what}{' with a fault' if is_faulty else ''}")
        with self.fault() if is_faulty else contextlib.nullcontext():
            try:
                result = call()
            except ERRORS as error:
                result = error
            if settles:
                self.settle()
        shown = result[1] if isinstance(result, tuple) else result
        self.said[-1] += f": {shown!r}".replace(str(self.place), "")
        if self.count > 1:  # what one raises, all raise
            gda.check_processes_agree([len(self.said), isinstance(result, Exception)])
        self.is_dirty |= is_faulty
        return result, not is_faulty

    def settle(self) -> None:
        """Wait for what runs in the background of all processes."""
        pending = self.run._flight.pending
        while pending is not None and not pending.done():
            time.sleep(0.001)
        self.run._keeper.wait(60)
        self.meet()

    def meet(self) -> None:
        """Wait for all processes."""
        if self.count > 1:
            gda.check_processes_agree(len(self.said))

    def look(self) -> None:
        """Check the steps that are there: none was lost or replaced, and new ones are right."""
        self.settle()
        folder = RunFolder(self.place, 20)
        now = folder.complete()
        for step in {*self.whole} - {*now}:
            assert self.may_go(step, now), f"step {step} is lost: {[*now]} of {[*self.whole]}"
        for step, each in now.items():
            identity = "" if step in self.damaged else folder.identity(each.name)
            if step not in self.whole:
                found = gda.checkpoint.restore(below(self.place, each.name), **READ)
                assert found["n"] in self.tried.get(step, ()), f"step {step} is no save"
                self.whole[step] = found["n"], identity
                self.losses.pop(step, None)
                if found["n"] in self.given_losses:
                    self.losses[step] = self.given_losses[found["n"]]
            assert step in self.damaged or self.whole[step][1] == identity, f"{step} was replaced"
        self.whole = {step: self.whole[step] for step in now}
        self.losses = {step: loss for step, loss in self.losses.items() if step in now}
        for of in (self.held, self.perhaps_held, self.damaged):
            of &= {*now}
        self.tried = {}
        self.meet()  # or one would damage what another still reads

    def may_go(self, step: int, now: dict[int, StepFolder]) -> bool:
        """Return True if a step may have been removed since the last look."""
        if step in self.damaged or (self.to is not None and step > self.to):
            return True
        keep, every = self.options["keep"], self.options["keep_every"]
        is_milestone = every is not None and step in rules.milestones(self.whole, every)
        is_best = False
        if self.options["keep_best"] and step in self.losses:
            others = {each: self.losses.get(each, self.given(each)) for each in now}
            is_best = all(loss > self.losses[step] for loss in others.values())
        is_old = keep is not None and len([each for each in now if each > step]) >= keep
        return is_old and not (step in self.held or is_milestone or is_best)

    def given(self, step: int) -> float:
        """Return the lowest loss that a new step may have."""
        return min((self.given_losses.get(n, -1.0) for n in self.tried.get(step, ())), default=-1.0)

    # The calls.

    def differs(self) -> bool:
        """Return True in one of several processes, and not often."""
        return self.chance.random() < 0.2 and self.count > 1 and self.me == self.victim

    def state(self, n: int) -> dict[str, Any]:
        return {**state_of(n), "large": LARGE, "own": PerProcess((n, self.me))}

    def new(self) -> Run:
        """Return the run of a new program, with other rules."""
        choose = self.chance.choice
        self.options = {
            "keep": choose([None, 1, 2, 3]),
            "keep_every": choose([None, 4]),
            "keep_best": choose([None, (1, "loss")]),
            "on_error": choose(["raise", "raise", "log"]),
        }
        self.is_ready = self.is_dirty = False
        fails = self.chance.random() < 0.2
        hook = (lambda step, path: 1 / 0) if fails else None
        return Run(self.place, every=2, timeout=60, on_complete=hook, **self.options)

    def other_program(self) -> None:
        """Begin a new program; the old one still tries to save."""
        self.look()
        old, was_ready, is_clean = self.run, self.is_ready, not self.is_dirty
        self.run = self.new()
        if self.resume("right") and was_ready:
            result, _ = self.do("old.save", lambda: old.save(1000, self.state(0), now=True), 0)
            assert isinstance(result, gda.checkpoint.SaveError if is_clean else Exception), result
        with contextlib.suppress(*ERRORS):
            old.close()

    def resume(self, how: str = "") -> bool:
        self.look()
        kinds = ["right", "right", "right", "like", "raise", "step", "differs"]
        how = how or self.chance.choice(kinds)
        good = [step for step in self.whole if step not in self.damaged]
        newest = max(good, default=0)
        like, options = self.state(0), {}
        if how == "like":
            like["other"] = 1
        elif how == "raise" or (how == "differs" and self.count > 1 and self.me == self.victim):
            options["damaged"] = "raise"
        elif how == "step":
            options["step"] = self.chance.choice([99, *self.whole])
        was_dirty = self.is_dirty
        result, is_clean = self.do(f"resume {how}", lambda: self.run.resume(like, **options))
        self.is_dirty &= not is_clean
        later = {step for step in self.damaged if step > newest}
        must_fail = (
            (how == "like" and bool(good))
            or (bool(later) and options.get("damaged") == "raise")
            or (how == "step" and options["step"] != max(self.whole, default=-1))
            or (how == "differs" and self.count > 1)
            or (not good and self.damaged)
        )
        if isinstance(result, Exception):
            self.is_ready = False
            assert must_fail or was_dirty or not is_clean, result
            if not good and self.damaged and isinstance(result, CorruptionError):
                self.is_over = True
            return False
        assert not must_fail
        state, step = result
        assert step == newest
        self.check(state, self.whole[step][0] if good else 0)
        self.is_ready, self.is_rolling_back = True, False
        self.look()
        assert not later & {*self.whole}
        return True

    def check(self, state: Any, n: int) -> None:
        check(state, n)
        assert state["own"].value == (n, self.me)
        np.testing.assert_array_equal(state["large"], LARGE)

    def save(self, closes: bool = False) -> None:
        kinds = ["right"] * 8 + ["metrics", "leaf", "source", "below", "differs", "due", "one leaf"]
        how = "right" if closes else self.chance.choice(kinds)
        n = next(self.numbers)
        top = max([0, *self.whole, *self.tried])
        step, state, metrics = top + self.chance.randint(1, 3), self.state(n), None
        if self.chance.random() < 0.7:
            self.given_losses[n] = self.chance.randrange(100)
            metrics = {"loss": self.given_losses[n]}
        if how == "metrics":
            metrics = {"loss": "none"}
        elif how == "leaf" or (how == "one leaf" and self.me == self.victim):
            state["f"] = print
        elif how == "source":
            state["w"] = Unreadable()
        elif how == "below":
            step = self.chance.randint(0, top)
        if how == "differs" and self.run._flight.pending is not None:
            # Of a step that is being saved, a second save does nothing, and does not communicate.
            step = max(step, self.run._flight.steps[-1] + 1)
        mine = step + (how == "differs" and self.count > 1 and self.me == self.victim)
        is_right = how in ("right", "due") or (self.count == 1 and how == "differs")
        of_step = self.tried.setdefault(step, set())
        if is_right or how == "below":  # of which the newest may have failed
            of_step.add(n)
        was_dirty = self.is_dirty

        def call() -> Any:
            if closes:
                self.run.close(mine, state)
                return True
            return self.run.save(mine, state, metrics=metrics, now=how != "due")

        if closes:
            self.given_losses.pop(n, None)
        result, is_clean = self.do(f"{'close' if closes else 'save'} {how} {step} ({n})", call)
        if closes:
            was_ready, self.is_ready = self.is_ready, False
            self.is_dirty &= not is_clean
            self.look()
            if was_ready and is_clean:  # also if it raised the error of the save before
                assert step in self.whole, result
                assert was_dirty or result is True, result
            return
        assert is_right or how in ("source", "below") or result is not True, result
        if not self.is_ready:
            assert isinstance(result, ValueError | RuntimeError), result
        elif is_right and is_clean:
            assert was_dirty or result is True or how == "due", result
            is_told = result is not False and "is below step" not in str(result)
            self.is_dirty &= not is_told
        self.is_dirty |= how == "source"

    def close(self) -> None:
        how = self.chance.choice(["state", "", "wrong"])
        if how == "state":
            self.save(closes=True)
            return
        was_dirty = self.is_dirty
        options = {"step": 99} if how == "wrong" else {}
        result, is_clean = self.do(f"close {how}", lambda: self.run.close(**options))
        self.is_ready = False
        assert isinstance(result, ValueError) or how != "wrong", result
        assert result is None or how == "wrong" or was_dirty or not is_clean, result
        self.is_dirty &= how == "wrong" or not is_clean

    def wait(self) -> None:
        was_dirty = self.is_dirty
        result, is_clean = self.do("wait", self.run.wait, 0.1)
        assert result is None or was_dirty or not is_clean, result
        self.is_dirty &= not is_clean

    def rollback(self) -> None:
        self.look()
        steps = sorted(self.whole)
        to, newest = self.chance.choice([99, *steps]), self.chance.choice([98, *steps[-1:] * 3])
        mine = to + self.differs()
        later = {step for step in steps if step > to}
        self.to = to
        call = lambda: self.run.rollback(mine, newest=newest)  # noqa: E731
        result, is_clean = self.do(f"rollback {mine} {newest}", call)
        self.look()
        self.to = None
        self.is_dirty &= not is_clean
        if isinstance(result, Exception):
            self.is_ready, self.is_rolling_back = False, True
            self.rolled.add((to, newest))
            return
        if result:
            self.is_ready = False
            assert newest == steps[-1]
            assert not later & {*self.whole}
            self.rolled.add((to, newest))
        else:
            assert [*self.whole] == steps
            assert newest not in later or (to, newest) in self.rolled
        assert not later & self.held or not result

    def hold(self) -> None:
        self.look()
        step = self.chance.choice([99, *self.whole])
        mine = step + self.differs()
        result, is_clean = self.do(f"hold {mine}", lambda: self.run.hold(mine))
        if result is None:
            self.held.add(step)
        else:
            assert not is_clean or step == 99 or mine != step or self.count > 1, result

    def record(self) -> None:
        self.look()
        step = self.chance.choice([99, *self.whole])
        loss = self.chance.choice(["none", self.chance.randrange(100)])
        result, is_clean = self.do(
            f"record {step} {loss}", lambda: self.run.record(step, {"loss": loss})
        )
        if result is None:
            assert step in self.whole
            assert isinstance(loss, int)
            self.losses[step] = loss
        elif is_clean:
            assert step == 99 or loss == "none", result
        else:
            self.losses.pop(step, None)
        self.look()  # with another loss, the rules may remove it
        if step in self.whole and step in self.losses:
            assert RunFolder(self.place, 20).metrics(f"{step:08d}") == {"loss": self.losses[step]}

    def ask(self) -> None:
        self.look()
        for what, call in {
            "is_due": lambda: self.run.is_due(max([0, *self.whole]) + 1),
            "steps": self.run.steps,
            "best": self.run.best,
            "check": self.run.check,
        }.items():
            result, is_clean = self.do(what, call, 0.1)
            if what == "steps" and is_clean:
                assert result == [*self.whole]
            has_all = self.losses.keys() >= self.whole.keys()
            if what == "best" and is_clean and self.options["keep_best"] and has_all:
                here = {step: self.losses[step] for step in self.whole}
                assert result == next(iter(rules.best_first(here, is_highest=False)), None)

    def damage(self) -> None:
        """Flip a bit of a complete step; the program goes on, or begins anew."""
        self.look()
        good = [step for step in self.whole if step not in self.damaged]
        if len(good) < 2:
            return
        step = self.chance.choice([good[-1], self.chance.choice(good)])
        self.said.append(f"damage {step}")
        number = self.chance.random()
        self.damaged.add(step)
        if self.me == 0:
            flip_a_bit(below(self.place, f"{step:08d}"), number)
        self.meet()

    def copy(self) -> None:
        """Copy a step to a later number, as from a backup, without a word to the program.

        Not while a rollback is under way, since it removes all that is later.
        """
        self.look()
        good = [step for step in self.whole if step not in self.damaged]
        new = max([0, *self.whole]) + 1
        is_there = not self.is_store and (self.place / f"{new:08d}").exists()
        self.meet()
        if not good or self.is_store or is_there or self.is_rolling_back:
            return
        step = self.chance.choice(good)
        self.said.append(f"copy {step} to {new}")
        if self.me == 0:
            shutil.copytree(self.place / f"{step:08d}", self.place / f"{new:08d}")
            (self.place / f"{new:08d}/held.json").unlink(missing_ok=True)
        self.meet()
        self.whole[new] = self.whole[step]
        self.losses.pop(new, None)
        if step in self.losses:
            self.losses[new] = self.losses[step]

    def play(self, calls: int) -> str:
        often: dict[Callable[[], Any], int] = {self.save: 10, self.resume: 3, self.record: 2}
        often |= {self.other_program: 2, self.rollback: 2}
        rare = (self.hold, self.close, self.wait, self.ask, self.damage, self.copy)
        weights = {**often, **dict.fromkeys(rare, 1)}
        try:
            self.resume("right")
            for _ in range(calls):
                (call,) = self.chance.choices([*weights], [*weights.values()])
                call()
                if not self.is_ready and self.chance.random() < 0.5:
                    self.resume()
                if self.is_over:
                    return "all steps were damaged"
            return self.end()
        except BaseException as error:
            error.add_note("\n".join(self.said))
            raise

    def end(self) -> str:
        """The next program resumes at the newest step, and leaves nothing else in the folder."""
        self.look()
        with contextlib.suppress(*ERRORS):
            self.run.close()
        self.look()
        self.run, self.is_last = self.new(), True
        if not self.resume("right"):
            return "all steps were damaged"
        self.save(closes=True)
        for step in {*self.whole} - self.damaged:
            place = below(self.place, f"{step:08d}")
            gda.checkpoint.verify(place, **READ)
            self.check(gda.checkpoint.restore(place, self.state(0), **READ), self.whole[step][0])
        if not self.is_store:
            # A fault may leave an empty folder, which the save of that step takes.
            there = [each for each in self.place.iterdir() if each.is_file() or any(each.iterdir())]
            names = {each.name for each in there if ".damaged-" not in each.name}
            assert names == {"run.json", LOCK, *(f"{step:08d}" for step in self.whole)}
        return "no step was lost"


def flip_a_bit(place: Any, number: float) -> None:
    """Flip a bit of an array of a step, by a number below 1."""
    if isinstance(place, Path):
        files = sorted(each for each in place.glob("data-*/*/*") if each.name != ".lock")
        file = files[int(number * len(files))]
        data = file.read_bytes()
        file.unlink()  # it may be linked to the file of another step
        file.write_bytes(flip(data, int(number * len(data))))
        return
    names = sorted(name for name in place.list().result() if name.startswith(b"data-"))
    name = names[int(number * len(names))]
    data = place.read(name).result().value
    place.write(name, flip(data, int(number * len(data)))).result()


def play(folder: str, seed: int, calls: int) -> str:
    """Play a script, in one process or in several."""
    with pytest.MonkeyPatch.context() as patch:
        place: Any = Path(folder)
        if not folder:
            place = ts.KvStore.open("memory://").result() / "runs/a/"
        return Script(place, seed, patch).play(calls)


@tried("a program goes on after errors of a run", sample=2, full=150)
@pytest.mark.parametrize("kind", ["directory", "object store"])
def test_a_program_that_goes_on_loses_no_step(tmp_path: Path, trials: Trials, kind: str) -> None:
    for number in range(trials.most):
        seed = trials.chance.randrange(2**32)
        folder = str(tmp_path / str(number)) if kind == "directory" else ""
        trials.count(play(folder, seed, 12 if trials.most < 150 else 30))


@tried("a program of two processes goes on after errors of one of them", sample=1, full=60)
def test_processes_that_go_on_lose_no_step(
    tmp_path: Path, trials: Trials, process_pool: Any
) -> None:
    pool = process_pool(2, devices=4)
    for number in range(trials.most):
        seed = trials.chance.randrange(2**32)
        calls = 10 if trials.most < 60 else 20
        (outcome,) = set(pool.run(play, str(tmp_path / str(number)), seed, calls, timeout=600))
        trials.count(outcome)
