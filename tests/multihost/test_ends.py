"""Programs whose processes end at different places, without the launcher."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from subprocess import CompletedProcess

from running import python

from gda.launch.children import Port

PROGRAM = """
import atexit, gda.launch, sys
gda.launch.initialize()
import jax
atexit.register(lambda: {hook})
{first}
if jax.process_index() == {ends}:
    {end}
gda.check_processes_agree(0, name="the end", timeout=300)
"""


MEETING = "gda.check_processes_agree(0, name='the beginning')"


def program(ends: int | None, end: str, hook: str = "None", first: str = MEETING) -> str:
    """Return a program of which one process, or none, ends before the other does."""
    return PROGRAM.format(ends=ends, end=end, hook=hook, first=first)


def run_both(program: str) -> list[CompletedProcess[str]]:
    """Run a program of two processes."""
    port = Port()

    def run(process: int) -> CompletedProcess[str]:
        given = {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port.number}",
            "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port.number}",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(process),
        }
        return python("-c", program, **given)

    with closing(port), ThreadPoolExecutor(2) as threads:
        return [*threads.map(run, range(2))]


def test_an_error_that_ends_one_process_ends_the_others_with_its_name_and_reason() -> None:
    done = run_both(program(0, "raise ValueError('no data')"))
    assert "ValueError: no data" in done[0].stderr
    assert "process 0 ended after ValueError: no data" in done[1].stderr
    assert [each.returncode for each in done] == [1, 1]


def test_an_error_before_the_first_meeting_ends_the_others_too() -> None:
    done = run_both(program(0, "raise ValueError('no data')", first="jax.devices()"))
    assert "process 0 ended after ValueError: no data" in done[1].stderr
    assert [each.returncode for each in done] == [1, 1]


def test_a_process_that_is_done_before_the_others_is_named() -> None:
    done = run_both(program(1, "sys.exit()"))
    assert "LateProcessError: check 'the end'" in done[0].stderr
    assert "process 1 ended. process 0 waited" in done[0].stderr
    assert [each.returncode for each in done] == [1, 0]


def test_exit_hooks_of_the_program_may_communicate() -> None:
    done = run_both(
        program(None, "pass", "print(gda.check_processes_agree(0, name='in the hook'))")
    )
    assert [each.stdout.splitlines()[-1] for each in done] == ["None", "None"]
    assert [each.returncode for each in done] == [0, 0]


STOPPED = """
import gda.launch, os, signal, time
gda.launch.initialize()
import jax
from gda.multihost import coordination
service = coordination.service()
if jax.process_index() == 0:
    service.put("pid", str(os.getpid()).encode())
    service.get("was stopped", 60)
else:
    pid = int(service.get("pid", 60))
    os.kill(pid, signal.SIGSTOP)
    while open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    try:
        gda.check_processes_agree(0, timeout=1)
    except gda.LateProcessError as error:
        print(error.processes, error)
    try:
        gda.check_processes_agree(0, timeout=0)
    except ValueError as error:  # of which it cannot tell
        print(error)
    os.kill(pid, signal.SIGCONT)
    service.put("was stopped", b"")
"""


def test_a_stopped_process_0_is_named_soon_after_the_timeout() -> None:
    _, done = run_both(STOPPED)
    assert done.stdout.startswith("(0,) check"), done.stderr
    assert "process 0 did not answer within 1 s" in done.stdout
    assert "timeout must be" in done.stdout
