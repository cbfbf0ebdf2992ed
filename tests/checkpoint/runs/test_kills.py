"""A training that is killed again and again: it loses no step, and no bit of its losses.

Each trial kills one process, all of them or the launcher, by SIGKILL or SIGTERM. Then the training
goes on in 4, 2 or 1 processes. Some trials go back to an earlier step first, or have a full disk.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import killed_training
import numpy as np
from killed_training import OPTIONS, after, first, loss_of
from running import USUAL, wait_until_gone
from trials import Trials, tried

from gda.checkpoint import Run, verify
from gda.storage.stores.directory import LOCK
from gda.testing.forking import Forked

LIMIT = 120  # seconds
KILLS = [(who, how) for how in ("SIGKILL", "SIGTERM") for who in ("one", "all", "launcher")]
PROCESSES = (4, 2, 1)


class Training:
    """A training that goes on from one program to the next, and what is known of its steps.

    Attributes:
      durable: steps that a program knew to be complete, and 0.
      reached: the newest step that may be complete.
      rolled: the rollbacks that were done, or may be.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "run"
        self.durable, self.reached = {0}, 0
        self.rolled: list[list[int]] = []
        self._losses, self._w = [0], first()
        self._programs = 0

    def loss(self, step: int) -> int:
        """Return the loss after so many steps, by NumPy."""
        while len(self._losses) <= step:
            self._w = after(self._w, np.uint32(len(self._losses) - 1))
            self._losses.append(int(loss_of(self._w)))
        return self._losses[step]

    def forget_after(self, step: int) -> None:
        self.durable = {each for each in self.durable if each <= step}

    def start(self, processes: int, steps: int, back: list[int], full: list[int]) -> "Program":
        self._programs += 1
        return Program(self, self._programs, processes, steps, back, full)


class Program:
    """One program of a training, in some processes under the launcher."""

    def __init__(
        self,
        training: Training,
        number: int,
        processes: int,
        steps: int,
        back: list[int],
        full: list[int],
    ) -> None:
        self._training, self._processes = training, processes
        self._steps, self._back, self._is_full = steps, back, bool(full)
        name = training.folder / f"{number:03}"
        self._journal, self._log = name.with_suffix(".journal"), name.with_suffix(".log")
        arguments = {
            "folder": str(training.path),
            "journal": str(self._journal),
            "steps": steps,
            "back": back,
            "full": full,
        }
        (given := name.with_suffix(".json")).write_text(json.dumps(arguments))
        options = [f"-n{processes}", f"--devices-per-process={4 // processes}"]
        with self._log.open("wb") as log, open(os.devnull) as nothing:
            self._launcher = Forked(
                "forked_program:launch",
                *(*options, killed_training.__file__, str(given)),
                process_group=os.getpgrp(),
                env={**os.environ, **USUAL, "XLA_FLAGS": ""},
                stdin=nothing.fileno(),
                stdout=log.fileno(),
                stderr=log.fileno(),
            )

    def _said(self, word: str) -> Iterator[list[str]]:
        """Yield the words of the lines that begin with one, after the number of the process."""
        text = self._journal.read_text() if self._journal.exists() else ""
        for line in text.splitlines():
            process, said, *words = line.split()
            if said == word:
                yield [process, *words]

    def wait_for(self, word: str) -> None:
        """Wait until every process has said a word."""
        limit = time.monotonic() + LIMIT
        while len([*self._said(word)]) < self._processes and self._launcher.poll() is None:
            assert time.monotonic() < limit, f"not all processes say {word}"
            time.sleep(0.01)

    def kill(self, who: str, how: str, victim: int) -> None:
        number = signal.Signals[how]
        pids = {int(process): int(pid) for process, pid in self._said("is")}
        if who == "launcher":
            self._launcher.send_signal(number)
        else:
            for process in [victim] if who == "one" else range(self._processes):
                with suppress(ProcessLookupError):
                    os.kill(pids[process], number)

    def check(self, code: int | None) -> None:
        """Wait for the end, and check what was lost; ``code`` is the exit code if it is known."""
        training = self._training
        found = self._launcher.wait(LIMIT)
        wait_until_gone([int(pid) for _, pid in self._said("is")])
        assert code in (None, found), f"exit code {found}"
        rolled = {is_done for _, is_done in self._said("rolls")}
        if rolled == {"False"}:  # because it was done before, and the newest step is another one
            assert self._back in training.rolled
        elif self._back:
            to, _ = self._back
            training.rolled.append(self._back)
            training.forget_after(to)
            if rolled:
                training.reached = to
        for _, step, is_whole in self._said("resumed"):
            assert (int(step), is_whole) == (training.reached, "True")
        for _, step, loss in self._said("step"):
            assert int(loss) == training.loss(int(step)), f"the loss of step {step} differs"
            training.reached = max(training.reached, int(step))
        training.durable |= {int(step) for _, step in self._said("durable")}
        latest = Run(training.path, every=1).latest() or 0
        assert max(training.durable) <= latest <= training.reached, f"step {latest} is there"
        if code is not None:  # they ended in time, all at the last step
            assert {int(step) for _, step in self._said("closed")} == {training.reached} == {latest}
        training.reached = latest

    def note(self) -> str:
        return f"{self._journal}, {self._log}:\n{self._log.read_text()[-5000:]}"

    def end(self) -> None:
        self._launcher.send_signal(signal.SIGKILL)


def back_to(training: Training, trials: Trials) -> list[int]:
    """Return an earlier step, and the newest; nothing if there are none."""
    steps = Run(training.path, every=1).steps()
    if len(steps) < 2:
        return []
    best = min(training.loss(step) for step in steps)
    assert all(best <= training.loss(step) for step in training.durable - {0})
    # A step that was removed for a better one does not come back when that is forgotten.
    training.durable &= {0, *steps}
    return [trials.chance.choice(steps[:-1]), steps[-1]]


def train_and_kill(training: Training, number: int, trials: Trials) -> None:
    chance = trials.chance
    who, how = KILLS[number % len(KILLS)]
    processes = PROCESSES[number // 2 % 3]
    back = back_to(training, trials) if chance.random() < 0.2 else []
    full = []
    if how == "SIGKILL" and chance.random() < 0.4:
        full = [chance.randrange(processes), chance.randrange(40)]
    program = training.start(processes, 10**9, back, full)
    try:
        # A signal ends a program in time if it comes after the run was made.
        program.wait_for("resumed" if how == "SIGTERM" else "is")
        time.sleep(chance.uniform(0, 2))
        program.kill(who, how, chance.randrange(processes))
        program.check(75 if how == "SIGTERM" else None)
    except BaseException as error:
        error.add_note(f"{number}: {how} to {who} of {processes}, {back=}, {full=}")
        error.add_note(program.note())
        program.end()
        raise
    trials.count("ended in time" if how == "SIGTERM" else "resumed")


@tried("a process, all or the launcher of a training are killed", sample=1, full=60)
def test_a_training_that_is_killed_loses_no_step_and_no_bit(tmp_path: Path, trials: Trials) -> None:
    training = Training(tmp_path)
    for number in trials.of(range(60)):
        train_and_kill(training, number, trials)
    last = training.reached + 6
    program = training.start(1, last, [], [])
    program.check(0)
    check_folder(training, last)


def check_folder(training: Training, last: int) -> None:
    """The steps that are kept are whole, and there is nothing else."""
    run = Run(training.path, **OPTIONS)
    steps = run.steps()
    assert steps[-1] == last
    best = run.best()
    assert best is not None
    assert all(training.loss(best) <= training.loss(step) for step in training.durable - {0})
    for step in steps:
        verify(run.path(step))
    # A kill may leave an empty folder, which the save of that step takes.
    places = [each for each in training.path.iterdir() if each.is_file() or any(each.iterdir())]
    names = {each.name for each in places} - {"run.json", LOCK}
    assert names == {f"{step:08}" for step in steps}
