"""Processes that save until they are killed, a disk that fails, and memory that is measured.

As a program it reads commands, a line of JSON each, and forks for every one. So JAX, which takes
seconds to import, is imported once; before a fork it must not have used a device.
"""

import errno
import faulthandler
import fcntl
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from training import state_of

import gda
import gda.launch
from gda.checkpoint import saving
from gda.checkpoint.writing import writer
from gda.launch.children import environment
from gda.storage import new_files, system_calls
from gda.storage.stores import directory
from gda.storage.stores.checksums import require_crc32c
from gda.storage.stores.object_store import require_tensorstore


def values_of(generation: int) -> dict[str, Any]:
    """Return the tree of one save: no value in it is in that of another save."""
    rows = np.arange(8 * 512, dtype=np.float32).reshape(8, 512)
    return {
        "weights": rows + 8192 * generation,
        "bias": np.arange(3, dtype=np.int32) + 8 * generation,
        "state": [np.full((2, 2), generation, np.int16), {"step": generation}],
        "name": f"generation {generation}",
    }


def tree_of(generation: int, mesh: Mesh) -> dict[str, Any]:
    """Return this tree over devices: one array is cut, and is not small; one is replicated."""
    tree = values_of(generation)
    for name, spec in {"weights": P("x"), "bias": P()}.items():
        data = tree[name]
        tree[name] = gda.GlobalArray.from_callback(
            data.shape, mesh, spec, lambda index, data=data: data[index], dtype=data.dtype
        )
    return tree


def small_files(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let small arrays have files of their own, so that a save takes many steps and little time."""
    set_attribute(writer, "PACKED_BELOW", 1024)


# The operations of a save on a disk, step by step.

Arguments = tuple[Any, ...]
Works = Mapping[str, Callable[..., None]]
Join = Callable[[int, int, int], None]

STEPS = ("open", "writev", "fsync", "replace", "unlink", "mkdir", "listdir", "link")


class Disk:
    """``os`` and ``shutil`` as directory.py has them, but before a step something happens.

    Args:
      fault: called before that step and every later one, with whether it is the first, the name of
        the function and what it was called with.
      at: the number of the step.

    Attributes:
      steps: the steps until now, each with the path that it is about.
    """

    def __init__(
        self, fault: Callable[[bool, str, Arguments], None] | None = None, at: int = 0
    ) -> None:
        self.steps: list[tuple[str, str]] = []
        self._fault, self._at = fault, at
        self._paths: dict[int, str] = {}
        self._guard = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._counted(name, real) if name in STEPS else real

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            path = self._paths.get(args[0], args[0])
            with self._guard:
                number = len(self.steps)
                self.steps.append((name, path))
            if self._fault is not None and number >= self._at:
                self._fault(number == self._at, name, args)
            # A fault of the program endangers no data on the disk: to wait is a waste.
            result = None if name == "fsync" else real(*args, **options)
            if name == "open":
                self._paths[result] = path
            return result

        return step

    def install(self, set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
        rmtree = self._counted("rmtree", shutil.rmtree)
        for module in (directory, new_files, system_calls):
            set_attribute(module, "os", self)
        set_attribute(directory, "shutil", SimpleNamespace(rmtree=rmtree))


# The work of the processes.


def say(*words: object) -> None:
    # In one call, so that lines of several processes do not mix.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def save_until_killed(path: Any, is_async: bool, first: int) -> None:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    for generation in itertools.count(first):
        tree = tree_of(generation, mesh)
        say("begin", generation)
        began = time.monotonic()
        if is_async:
            gda.checkpoint.save_async(path, tree, overwrite=True, timeout=60).result()
        else:
            gda.checkpoint.save(path, tree, overwrite=True, timeout=60)
        say("end", generation, time.monotonic() - began)


def save_to_store_until_killed(
    spec: dict[str, Any], environment: dict[str, str], first: int
) -> None:
    os.environ.update(environment)
    save_until_killed(spec, False, first)


def tensors_of(generation: int) -> dict[str, Any]:
    """Return the tree of one save of safetensors: no value or last name in it is in another."""
    rows = np.arange(8 * 64, dtype=np.float32).reshape(8, 64)
    return {
        "weights": rows + 512 * generation,
        "bias": np.arange(3, dtype=np.int32) + 8 * generation,
        f"only in {generation}": np.full((2, 2), generation, np.int16),
    }


def save_safetensors_until_killed(path: str, first: int, seed: int) -> None:
    chance = random.Random(seed)
    for generation in itertools.count(first):
        max_file_bytes = chance.choice([1, 16, 2**20])  # three files, two, one
        say("begin", generation)
        began = time.monotonic()
        gda.storage.save_safetensors(path, tensors_of(generation), max_file_bytes=max_file_bytes)
        say("end", generation, time.monotonic() - began)


def save_run_until_killed(path: str) -> None:
    run = gda.checkpoint.Run(path, every=1, keep=1)
    _, first = run.resume(state_of(0))
    for step in itertools.count(first + 1):
        run.save(step, state_of(step))
        if step % 2:
            run.wait()
            say("durable", step)


def save_and_stop(path: str) -> None:
    """Save, and stop in the middle of it."""
    stopped: list[bool] = []

    def stops(is_first: bool, name: str, arguments: Arguments) -> None:
        if name == "writev" and not stopped:
            stopped.append(True)
            say("stops")
            os.kill(os.getpid(), signal.SIGSTOP)

    Disk(stops).install()
    gda.checkpoint.save(path, values_of(2), overwrite=True, max_workers=1)
    say("saved")


def save_and_fork(path: str) -> None:
    """Save twice; a process that is forked during the first save lives longer than the second."""
    readable, writable = os.pipe()
    forked: list[int] = []

    def forks(is_first: bool, name: str, arguments: Arguments) -> None:
        if name == "writev" and not forked:
            forked.append(os.fork())
            if not forked[0]:
                os.close(writable)
                os.read(readable, 1)  # until the other one closes it
                os._exit(0)

    Disk(forks).install()
    gda.checkpoint.save(path, values_of(1), max_workers=1)
    gda.checkpoint.save(path, values_of(2), overwrite=True)
    assert os.waitpid(forked[0], os.WNOHANG) == (0, 0)
    say("saved", "again")
    os.close(writable)
    os.waitpid(forked[0], 0)


def save_interrupted(path: str, most: int, seed: float) -> None:
    """Interrupt saves at every step, or at as many as may be, and say what is there.

    That is what Ctrl-C does.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gda.checkpoint.save(path, values_of(1))
    whole = Disk()
    whole.install()
    gda.checkpoint.save(path, values_of(2), overwrite=True, max_workers=1)
    steps = range(len(whole.steps))
    say("steps", len(steps))
    for at in random.Random(seed).sample(steps, min(most, len(steps))):
        say("interrupted", _interrupt(path, at))


def _interrupt(path: str, at: int) -> str:
    """Interrupt one save at a step; return which tree is there."""

    def interrupts(is_first: bool, name: str, arguments: Arguments) -> None:
        if is_first:
            signal.raise_signal(signal.SIGINT)

    Disk().install()
    gda.checkpoint.save(path, values_of(1), overwrite=True)
    handles, threads = len(os.listdir("/proc/self/fd")), {*threading.enumerate()}
    disk = Disk(interrupts, at)
    disk.install()
    notes = []
    try:
        gda.checkpoint.save(path, values_of(2), overwrite=True, max_workers=1 + at % 2)
        assert at >= len(disk.steps), "not interrupted"
    except KeyboardInterrupt as error:
        notes = getattr(error, "__notes__", [])
    Disk().install()  # what follows is not interrupted
    is_new = gda.checkpoint.restore(path)["state"][1]["step"] == 2
    gda.checkpoint.verify(path)
    assert not (is_new and "nothing was committed" in "".join(notes))
    assert len(os.listdir("/proc/self/fd")) == handles
    assert {*threading.enumerate()} <= threads
    return "new" if is_new else "old"


def save_and_die(path: str, first: int, victim: int, where: str) -> None:
    """Save twice; in the second save one process is killed, at a step of all or of its disk."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    gda.checkpoint.save(path, tree_of(first, mesh), overwrite=True, timeout=60)
    all_do: Any = saving.all_do

    def dies_at_step(is_first: bool, name: str, arguments: Arguments) -> None:
        if name == where:
            os.kill(os.getpid(), signal.SIGKILL)

    def dies_together(work: Any, *, what: str, **arguments: Any) -> Any:
        if what.startswith(where):
            os.kill(os.getpid(), signal.SIGKILL)
        return all_do(work, what=what, **arguments)

    if jax.process_index() == victim:
        Disk(dies_at_step).install()
        saving.all_do = dies_together  # pyright: ignore[reportAttributeAccessIssue]
    try:
        gda.checkpoint.save(path, tree_of(first + 1, mesh), overwrite=True, timeout=2)
        say("returned")
    except Exception as error:
        text = " ".join([str(error), *getattr(error, "__notes__", [])])
        say("raised", type(error).__name__, text.replace("\n", " "))
    signal.pause()  # not to break the others' connection by ending first


def without_locks(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let no file system have locks."""

    def refuses(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    set_attribute(fcntl, "flock", refuses)


def save_beside_another(path: str, rounds: int, seed: int) -> None:
    """Save in two programs at a time into one path, without locks, and say what is there then."""
    without_locks()
    order_reads, order_writes = os.pipe()
    answer_reads, answer_writes = os.pipe()
    is_other = not os.fork()
    chance = random.Random(f"{seed} {is_other}")
    for number in itertools.count():
        if is_other and os.read(order_reads, 1) != b"g":
            os._exit(0)
        if not is_other and number == rounds:
            os.write(order_writes, b"e")
            return
        if not is_other:
            os.write(order_writes, b"g")
        time.sleep(chance.uniform(0, 0.02))
        generation = 2 * number + 2 + is_other
        ended = "saved"
        try:
            gda.checkpoint.save(path, values_of(generation), overwrite=True, max_workers=2)
        except Exception as error:
            ended = type(error).__name__
        if is_other:
            os.write(answer_writes, f"{ended:30}".encode())
            continue
        other = os.read(answer_reads, 30).decode().strip()
        say("round", number, ended, other, *_found(path))


def _found(path: str) -> tuple[object, object]:
    """Return the generation that is there, and the words for what is wrong with it."""
    try:
        tree = gda.checkpoint.restore(path)
        gda.checkpoint.verify(path)
    except Exception as error:
        return -1, f"{type(error).__name__}: {error}".replace(" ", "_").replace("\n", "_")
    found = tree["state"][1]["step"]
    is_whole = jax.tree.all(jax.tree.map(np.array_equal, tree, values_of(found)))
    return found, "whole" if is_whole else "mixed"


def status(name: str) -> int:
    """Return a line of the status of this process, in bytes."""
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def warm_up() -> None:
    """Import and start whatever a checkpoint needs."""
    with tempfile.TemporaryDirectory() as folder:
        gda.checkpoint.save(folder, {"w": np.zeros(2**18)})
        gda.checkpoint.restore(folder)
        gda.checkpoint.verify(folder)


def memory_taken(do: str, path: str, most: int, options: dict[str, Any]) -> tuple[int, str, str]:
    """Return the bytes that it took, and the kind and the text of the error that came of it.

    From here on this process may not take much more, so that no test fills the machine.
    """
    warm_up()
    if do == "save":
        options["tree"] = {"w": np.random.default_rng(0).integers(0, 256, 2**26, np.uint8)}
    limit = status("VmSize") + most
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak
    before = status("VmHWM")
    error = None
    try:
        getattr(gda.checkpoint, do)(path, **options)
    except (Exception, MemoryError) as caught:
        error = caught
    return status("VmHWM") - before, type(error).__name__, str(error)


def measure_memory(what: str, path: str, most: int, options: dict[str, Any]) -> None:
    say(json.dumps(memory_taken(what, path, most, options)))


def _join(process: int, processes: int, port: int) -> None:
    devices = 8 // processes
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    if processes > 1:
        limits = {"heartbeat_timeout": 60, "collective_timeout": 60, "agreement_timeout": 60}
        os.environ.pop("XLA_FLAGS")
        os.environ.update(environment(process, processes, port, devices, **limits))
        gda.launch.initialize()


def _fork(works: Works, join: Join, command: dict[str, Any], process: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        faulthandler.dump_traceback_later(100)  # before the test gives up
        join(process, command["processes"], command["port"])
        small_files()
        works[command["do"]](**command["arguments"])
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    finally:
        os._exit(0)


def main(works: Works, join: Join = _join) -> None:
    """Fork for every command that comes.

    Args:
      works: the functions, by their names.
      join: called in each process with its number, their number and the port of the first.
    """
    require_crc32c()  # imports it
    require_tensorstore("a store")
    pids: list[int] = []
    for line in sys.stdin:
        command = json.loads(line)
        if command == "reap":
            for pid in pids:
                os.waitpid(pid, 0)
            say("reaped")
        else:
            numbers = range(command["processes"])
            pids = [_fork(works, join, command, process) for process in numbers]
            say("started", *pids)


if __name__ == "__main__":
    main(globals())
