"""Signals that end a program: the same answer in all processes, at the same call."""

import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest
from running import launch, python

import gda
from gda.multihost import coordination, ending
from gda.multihost.ending import Ending
from gda.testing import Pool

TERM, USR1, USR2 = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
Pools = Callable[[int], Pool]
Found = list[tuple[int, bool, str]]


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


@contextmanager
def logged() -> Iterator[list[str]]:
    """The messages of gda, without those of the test."""
    messages: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        messages.append(record.getMessage())
        return True

    logging.getLogger("gda").addFilter(note)
    try:
        yield messages
    finally:
        logging.getLogger("gda").removeFilter(note)


# Several processes. Their loops have no limit, because one may be far ahead of the other.


def train(
    signals: dict[int, tuple[int, ...]],
    *,
    others: tuple[int, ...] = (),
    after_save: int | None = None,
    late: int | None = None,
) -> tuple[Found, list[str]]:
    """Call ``check`` until an end, and return what was found, and the log.

    Each process sends itself its ``signals`` at its third call. The process ``late`` makes its
    first call after that of the others, and ``after_save`` sends itself SIGTERM after a save.
    """
    found: Found = []
    me, call = jax.process_index(), 0
    actions = [ending._Action(number) for number in (TERM, USR1, USR2)]
    before = [action._address.value for action in actions]
    with logged() as messages:
        waits = Ending((TERM, *others), save_on=(USR2,))
        service = coordination.service()
        assert service is not None
        key = f"test/{waits._folder}"
        if me == late:
            service.get(key, 60)
        while not waits.is_ending:
            call += 1
            if call == 3:
                for number in signals.get(me, ()):
                    kill(number)
                    service.put(key, b"")
            if waits.check():
                found.append((call, waits.is_ending, waits.reason))
                if not waits.is_ending and me == after_save:
                    kill(TERM)
            time.sleep(0.001)
        kill(TERM)  # again, which does nothing
        assert waits.check()
        waits.close()
    assert [action.read() for action in actions] == before
    return found, messages


def agreed(pools: Pools, processes: int, *args: Any, **options: Any) -> Found:
    """Return what all processes found alike."""
    (first, _), *others = pools(processes).run(train, *args, **options)
    assert all(found == first for found, _ in others)
    assert [is_ending for _, is_ending, _ in first] == [False] * (len(first) - 1) + [True]
    return first


def test_a_process_that_is_busy_before_its_first_call_ends_with_the_others(
    process_pool: Pools,
) -> None:
    for late in (0, 1):
        [(_, _, reason)] = agreed(process_pool, 2, {1 - late: (TERM,)}, late=late)
        assert reason == f"process {1 - late} got SIGTERM"


def test_any_signals_to_any_processes_are_one_end(process_pool: Pools) -> None:
    [(_, _, reason)] = agreed(process_pool, 2, dict.fromkeys(range(2), (TERM, TERM)))
    assert reason.endswith("got SIGTERM")
    [(_, _, reason)] = agreed(process_pool, 2, {0: (USR1, TERM)}, others=(USR1,))
    assert reason == "process 0 got SIGUSR1; process 0 got SIGTERM"


def test_all_save_once_and_go_on(process_pool: Pools) -> None:
    (first, _, saved), (last, _, ended) = agreed(process_pool, 2, {1: (USR2,)}, after_save=0)
    assert first < last
    assert (saved, ended) == ("process 1 got SIGUSR2", "process 0 got SIGTERM")


def test_a_signal_to_one_process_ends_all_at_one_call_and_is_logged(process_pool: Pools) -> None:
    results = process_pool(4, devices=2).run(train, {1: (TERM,)})
    line = "process 1 got SIGTERM: all save and end"
    assert [messages for _, messages in results] == [[line], [line], [], []]
    ((call, *_),) = results[0][0]
    assert all(found == [(call, True, "process 1 got SIGTERM")] for found, _ in results)


def call_without(process: int) -> str:
    """Send the others SIGTERM, and return their error; a process makes no call."""
    ending._LATE_SECONDS = 3
    waits = Ending()
    service = coordination.service()
    assert service is not None
    try:
        if jax.process_index() == process:
            return ""
        others = [each for each in range(jax.process_count()) if each != process]
        service.barrier("test/all but one are here", 50, others)
        kill(TERM)
        while True:
            waits.check()
            time.sleep(0.01)
    except gda.LateProcessError as error:
        return f"{error.processes}: {error}"
    finally:
        waits.close()
        ending._LATE_SECONDS = 300


def test_a_process_without_a_call_is_named(process_pool: Pools) -> None:
    *others, late = process_pool(4, devices=2).run(call_without, 3)
    assert late == ""
    assert len({*others}) == 1
    assert others[0].startswith("(3,): process ")
    assert others[0].endswith(
        " got a signal, and process 3 did not call check() within 3 s, so the processes found no "
        "common call at which to save. Look for the reason in the output of process 3"
    )


def end_of_a_thread() -> bool:
    """Return True if the thread of an object ends after its ``close``, and no other waits for it.

    Process 0 gets a signal after the thread of process 1 has ended.
    """
    ending._LOOK_SECONDS, ending._LATE_SECONDS = 0.2, 5
    try:
        waits = Ending()
        waits.check()
        assert waits._listener is not None
        if jax.process_index() == 1:
            waits.close()
            waits._listener._thread.result(50)
        gda.check_processes_agree(0, name="the thread has ended")
        if jax.process_index() == 0:
            kill(TERM)
            while not waits.check():
                time.sleep(0.001)
            waits.close()
            waits._listener._thread.result(50)
        return True
    finally:
        ending._LOOK_SECONDS, ending._LATE_SECONDS = 60, 300


def test_the_thread_of_a_closed_object_ends(process_pool: Pools) -> None:
    assert process_pool(2).run(end_of_a_thread) == [True, True]


def replaced_before() -> list[str]:
    action = ending._Action(TERM)  # of JAX, in C
    signal.signal(TERM, lambda *_: None)
    try:
        with logged() as messages:
            Ending().close()
        return messages
    finally:
        action.write()


def test_a_handler_that_has_replaced_that_of_jax_before_is_named(process_pool: Pools) -> None:
    for messages in process_pool(2).run(replaced_before):
        assert len(messages) == 1
        assert (
            "replaced_before.<locals>.<lambda> has replaced JAX's handler of SIGTERM" in messages[0]
        )


# The launcher passes SIGTERM on to both. JAX replaces the handler, in process 0 the program too.
PROGRAM = """
import signal, sys, time
import jax
from gda.multihost.ending import Ending
import gda.launch
jax.config.update("jax_enable_preemption_service", True)
signal.signal(signal.SIGTERM, lambda *_: None)
ending = Ending()
gda.launch.initialize()
if jax.process_index() == 0:
    signal.signal(signal.SIGTERM, lambda *_: None)
call = 1
while not ending.check():
    if call == 1:
        gda.check_processes_agree(0)
        print("ready", flush=True)
    time.sleep(0.01)
    call += 1
print(call, ending.reason, flush=True)
ending.close()
gda.check_processes_agree(call)
jax.distributed.shutdown()
sys.exit(75)
"""


def test_a_program_ends_whose_handler_was_replaced(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["-n", 2, "program.py"]
    done = launch(*words, cwd=tmp_path, interrupt_after="ready", interrupt_with=TERM)
    assert done.returncode == 75, done.stderr
    assert "gda.launch: stopped by SIGTERM" in done.stderr
    assert len({line[4:] for line in done.stdout.splitlines() if line[4:5].isdecimal()}) == 1
    assert "[0] __main__.<lambda> has replaced gda's handler of" in done.stderr
    assert "[1] code in C has replaced gda's handler of" in done.stderr


EARLY = """
import os, signal
import jax
import gda.launch
from gda.multihost.ending import Ending
gda.launch.initialize()
if jax.process_index() == 1:
    os.kill(os.getpid(), signal.SIGTERM)
ending, call = Ending(), 1
while not ending.check():
    gda.check_processes_agree(call)
    call += 1
print(call, ending.reason, flush=True)
assert Ending().check()
gda.check_processes_agree(call)
jax.distributed.shutdown()
"""


def test_a_signal_that_jax_heard_in_the_start_ends_all_at_one_call(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(EARLY)
    done = launch("-n", 2, "program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = [line[4:] for line in done.stdout.splitlines()]
    assert first == second
    assert first.endswith(
        " process 0 got JAX's word of a SIGTERM that came before gda heard signals"
    )


def asked(process: int) -> tuple[int, bool, str]:
    """Let one process ask, and return the call at which all save, and two facts of it."""
    waits, call = Ending(), 1
    if jax.process_index() == process:
        waits.ask()
    with logged() as messages:
        while not waits.check():
            call += 1
            time.sleep(0.001)
    waits.close()
    return call, waits.is_ending, "".join([waits.reason, *messages])


def since() -> tuple[float, float, float]:
    """Return times before a signal to process 1 and at the end, and the time of the signal."""
    waits, before = Ending(), time.monotonic()
    if jax.process_index() == 1:
        kill(TERM)
    while not waits.check():
        time.sleep(0.001)
    waits.close()
    return before, waits.since, time.monotonic()


def test_all_save_once_if_a_thread_asks_and_know_when_a_signal_came(process_pool: Pools) -> None:
    first, second = process_pool(2, devices=4).run(asked, 1)
    assert first == second
    assert first[1:] == (False, "")
    (_, came, end), (before, same, late) = process_pool(2, devices=4).run(since)
    assert before <= came <= end  # on one machine, their clocks are one
    assert before <= same <= late


# One process.


def test_one_process_saves_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    waits = Ending(save_on=(USR2,))
    assert not waits.check()
    kill(USR2)
    assert (waits.check(), waits.is_ending, waits.reason) == (True, False, "process 0 got SIGUSR2")
    assert not waits.check()
    kill(USR2)
    kill(TERM)
    assert not waits.is_ending  # before the call
    assert (waits.check(), waits.is_ending) == (True, True)
    assert waits.reason == "process 0 got SIGUSR2; process 0 got SIGTERM"
    assert waits.check()
    waits.close()
    waits.close()
    assert caplog.messages == [
        "process 0 got SIGUSR2: all save and go on",
        "process 0 got SIGUSR2; process 0 got SIGTERM: all save and end",
    ]


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The calls of a handler of the program for SIGUSR2."""
    calls: list[int] = []
    former = signal.signal(USR2, lambda number, _: calls.append(number))
    yield calls
    signal.signal(USR2, former)


def test_an_interrupt_may_end_a_program_too() -> None:
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    waits = Ending([signal.SIGINT])
    kill(signal.SIGINT)  # without a KeyboardInterrupt
    assert waits.check()
    waits.close()
    assert signal.signal(signal.SIGINT, former) is signal.default_int_handler


@pytest.mark.usefixtures("heard")
def test_a_later_handler_may_call_the_first(caplog: pytest.LogCaptureFixture) -> None:
    waits = Ending([USR2])
    former: Any = signal.getsignal(USR2)
    later: list[int] = []

    def handler(number: int, frame: Any) -> None:
        later.append(number)
        former(number, frame)

    signal.signal(USR2, handler)
    for _ in range(3):
        assert not waits.check()
    assert len(caplog.messages) == 1
    kill(USR2)
    assert (waits.check(), later) == (True, [USR2])
    waits.close()
    assert signal.getsignal(USR2) is handler
    # One that is removed is installed again.
    caplog.clear()
    waits = Ending([USR2])
    signal.signal(USR2, signal.SIG_DFL)
    assert not waits.check()
    assert caplog.messages == [
        "SIG_DFL has replaced gda's handler of SIGUSR2. A signal that came before this call may be "
        "lost; from now on gda hears it again"
    ]
    kill(USR2)
    assert waits.check()
    waits.close()
    assert signal.getsignal(USR2) is signal.SIG_DFL


def test_handlers_in_c_are_seen_and_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (tmp_path / "stacks").open("w+") as file:
        faulthandler.register(USR2, file=file)
        waits = Ending([USR2])
        faulthandler.unregister(USR2)
        faulthandler.register(USR2, file=file)
        assert not waits.check()
        assert "has replaced gda's handler of SIGUSR2" in caplog.text
        kill(USR2)
        assert waits.check()
        assert not file.read()
        waits.close()
        kill(USR2)
        file.seek(0)
        assert "test_handlers_in_c" in file.read()
        faulthandler.unregister(USR2)


def test_two_may_wait_for_one_signal(heard: list[int], caplog: pytest.LogCaptureFixture) -> None:
    first, second = Ending([USR2]), Ending(save_on=[USR2])
    kill(USR2)
    assert (first.check(), second.check(), heard) == (True, True, [USR2])
    first.close()
    kill(USR2)
    assert second.check()
    second.close()
    kill(USR2)
    assert (first.is_ending, second.is_ending, heard) == (True, False, [USR2] * 3)
    assert "replaced" not in caplog.text


def test_a_thread_hears_no_signal_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    made: list[Ending] = []
    thread = threading.Thread(target=lambda: made.append(Ending([TERM], [USR2])))
    thread.start()
    thread.join()
    assert not made[0].check()
    made[0].close()
    assert caplog.messages == [
        "this process does not hear SIGTERM, SIGUSR2: Python handles signals in the main thread "
        "alone. Make the object that waits for them, such as gda.checkpoint.Run, there"
    ]


FORKED = """
import os, signal, time, warnings
from gda.multihost.ending import Ending
ending = Ending()
warnings.simplefilter("ignore")  # of JAX, which has threads
is_there, begins = os.pipe()
child = os.fork()
if not child:
    os.write(begins, b"x")
    while True:  # a signal just before a sleep does not end it
        time.sleep(0.1)
os.read(is_there, 1)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.wait()[1]), ending.check())
"""


def test_a_forked_worker_ends_as_without_a_handler() -> None:
    assert python("-c", FORKED).stdout == "-15 False\n"
