"""Processes that are forked to save, and the files at a path afterwards."""

import json
import os
import queue
import signal
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import jax
import kill_program
import numpy as np
import pytest
from costs import COMPILER_FLAGS
from kill_program import values_of
from running import USUAL
from trials import Trials

import gda
from gda.checkpoint import CheckpointNotFoundError
from gda.launch.children import Children, Port
from gda.storage.stores.directory import LOCK
from gda.testing.forking import Forked

LIMIT = 120  # seconds


def generation_at(path: Any) -> int | None:
    """Return which save a restore gives, after comparing every value; ``None`` if there is none."""
    try:
        tree = gda.checkpoint.restore(path)
    except CheckpointNotFoundError:
        return None
    generation = tree["state"][1]["step"]
    expected = values_of(generation)
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, tree, expected)
    return generation


def check_next_save(path: Path, generation: int) -> None:
    """The next save works, and leaves nothing of those before it."""
    gda.checkpoint.save(path, values_of(generation), overwrite=True)
    assert generation_at(path) == generation
    gda.checkpoint.verify(path)
    check_clean(path)


def check_clean(path: Path) -> None:
    names = {name for name in os.listdir(path) if not name.startswith("data-")}
    assert names == {LOCK, "manifest.json"}
    assert len(os.listdir(path)) == 3


class Killing:
    """Processes that save again and again until they are killed at a random moment.

    Attributes:
      num_in_save: how often that was in the middle of a save.
    """

    def __init__(self, forks: "Forks", do: str, processes: int = 1, is_one: bool = False) -> None:
        self._forks, self._do, self._processes, self._is_one = forks, do, processes, is_one
        self._seconds = [0.1]  # that saves took
        self.num_in_save = 0

    def kill(self, trials: Trials, first: int, **arguments: Any) -> tuple[int, int | None]:
        """Kill once; return the generations that were begun last and ended last, if one ended."""
        chance = trials.chance
        pids = self._forks.start(self._do, self._processes, first=first, **arguments)
        lines = [self._forks.line()]
        # Saves take their time, and in a process that has just started the first takes longer.
        time.sleep(chance.uniform(0, 2 * statistics.median(self._seconds[-20:])))
        if self._is_one:
            os.kill(pids.pop(chance.randrange(len(pids))), signal.SIGKILL)
            time.sleep(chance.uniform(0, 0.02))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        lines += self._forks.rest()
        begun = max(int(line[1]) for line in lines if line[0] == "begin")
        ended = max([int(line[1]) for line in lines if line[0] == "end"], default=None)
        self._seconds += [float(line[2]) for line in lines if line[0] == "end"]
        self.num_in_save += begun != ended
        return begun, ended

    def check(self, trials: Trials) -> None:
        """Check that many were in a save, or nothing was tested. A few may all be between two."""
        assert self.num_in_save > trials.most / 3 or trials.most < 20


def count_kill(trials: Trials, begun: int, ended: int | None, found: int | None) -> None:
    """Count a trial by the save whose tree was found afterwards."""
    trials.count("between saves" if begun == ended else "old" if found == ended else "new")


class Forks:
    """A program that forks processes, by default kill_program.py, whose processes save."""

    def __init__(self, children: Children, log: Path, program: str = kill_program.__file__) -> None:
        self._children, self._log, self._said_before = children, log, 0
        self._running: list[int] = []
        read_commands, commands = os.pipe()
        outputs, write_outputs = os.pipe()
        with log.open("wb") as stderr:
            children.start(
                "forked_program:run",
                program,
                popen=Forked,
                env={**os.environ, **USUAL, "XLA_FLAGS": COMPILER_FLAGS},
                stdin=read_commands,
                stdout=write_outputs,
                stderr=stderr.fileno(),
            )
        os.close(read_commands)
        os.close(write_outputs)
        self._commands, self._outputs = open(commands, "w"), open(outputs)  # noqa: SIM115
        self._lines: queue.Queue[list[str]] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self._outputs:
            self._lines.put(line.split(" "))
        self._lines.put([])

    def start(self, do: str, processes: int, **arguments: Any) -> list[int]:
        """Fork processes that call a function, once there are no others; return their numbers."""
        self.kill()
        self._port = Port()
        self._said_before = len(self._log.read_text())
        self._send(
            {
                "do": do,
                "processes": processes,
                "port": self._port.number,
                "arguments": arguments,
            }
        )
        early = []  # a process may speak before the one that has forked it
        while (line := self.line())[0] != "started":
            early.append(line)
        for each in early:
            self._lines.put(each)
        self._running = list(map(int, line[1:]))
        return list(self._running)

    def line(self) -> list[str]:
        """Return the words of the next line that one of them says."""
        try:
            line = self._lines.get(timeout=LIMIT)
        except queue.Empty:
            line = []
        if not line:
            pytest.fail(f"the processes say nothing; their errors:\n{self.errors()}")
        return [word.rstrip("\n") for word in line]

    def rest(self) -> list[list[str]]:
        """Return the lines until all have ended."""
        self._send("reap")
        lines = list(iter(self.line, ["reaped"]))
        self._running = []
        self._port.close()
        return lines

    def kill(self) -> None:
        """End what is left of the processes."""
        if self._running:
            for pid in self._running:
                os.kill(pid, signal.SIGKILL)
            self.rest()

    def errors(self) -> str:
        """Return the errors since the last start."""
        return self._log.read_text()[self._said_before :]

    def _send(self, command: Any) -> None:
        print(json.dumps(command), file=self._commands, flush=True)

    def close(self) -> None:
        self._children.close()
        self._reader.join()
        self._commands.close()
        self._outputs.close()
