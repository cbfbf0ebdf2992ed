"""Links between simulated hosts that are slow, lossy or cut; ``docs/reliability.md`` has the times.

``link`` of ``hosts_program.py`` prints the seconds of each call; ``pytest -rP`` shows them.
"""

import re
import signal
import time

import hosts_program
import pytest
from hosts import LIMIT, Hosts, Program

CALLS = ("check_processes_agree", "gather", "save", "restore", "Run.save")
MOVING = ("gather", "check_replicas_agree", "reshard", "restore")
NAMED = r"LateProcessError: .*process 1 (ended|did not come within 60 s)"


def begin(hosts: Hosts, *names: str, **options: int) -> Program:
    """Start processes that wait before the first of these calls."""
    hosts.add(3)
    program = hosts.run(hosts_program.__file__, "link", hosts.shared, *names, **options)
    program.wait_for(f"ready for {names[0]}\n")
    return program


def results(program: Program, name: str) -> list[str]:
    """Return what each process says of a call, if it has come so far."""
    found = []
    for process in range(3):
        said = re.search(rf"(?m)^{re.escape(name)}: (.*)", program.output(process))
        found.append(said[1] if said else "JAX ended it")
    print(name, found)
    return found


def let_go(hosts: Hosts, name: str) -> None:
    (hosts.shared / name).touch()


def test_calls_succeed_over_a_slow_link_that_loses_packets(hosts: Hosts) -> None:
    program = begin(hosts, *MOVING)
    hosts[1].lose(percent=1)
    hosts[1].limit(mbit=50)
    for name in MOVING:
        let_go(hosts, name)
    program.check()
    for name in MOVING:
        assert all("returned" in each for each in results(program, name))


@pytest.mark.torture
@pytest.mark.parametrize("mbit", [0, 10])
def test_calls_succeed_over_a_worse_link(hosts: Hosts, mbit: int) -> None:
    names = {*CALLS, *MOVING}
    program = begin(hosts, *sorted(names))
    for name in sorted(names):
        program.wait_for(f"ready for {name}\n")
        if mbit:
            hosts[1].limit(mbit)
        else:
            hosts[1].lose(percent=1)
        let_go(hosts, name)
        program.wait_for(f"\n{name}: ")
        assert all("returned" in each for each in results(program, name))
        hosts[1].limit(10_000)
    program.check()


@pytest.mark.torture
@pytest.mark.parametrize("seconds", [10, 20])
@pytest.mark.parametrize("name", CALLS)
def test_call_returns_after_a_short_cut_or_names_the_host(
    hosts: Hosts, name: str, seconds: int
) -> None:
    """JAX ends a process whose connection to process 0 has been silent for 20 s."""
    program = begin(hosts, name, heartbeat_timeout=100)
    hosts[1].cut()
    let_go(hosts, name)
    time.sleep(seconds)
    hosts[1].mend()
    codes = program.wait(seconds=400)
    found = results(program, name)
    if any(codes):
        assert seconds == 20
        assert all(re.search(NAMED, found[each]) for each in (0, 2))
    else:
        assert all("returned" in each for each in found)


@pytest.mark.torture
@pytest.mark.parametrize("name", CALLS)
def test_a_host_that_is_cut_off_is_named(hosts: Hosts, name: str) -> None:
    program = begin(hosts, name, heartbeat_timeout=100)
    hosts[1].cut()
    let_go(hosts, name)
    assert all(program.wait(seconds=400))
    found = results(program, name)
    if name != "Run.save":  # which waits longer than JAX
        assert all(re.search(NAMED, found[each]) for each in (0, 2))
        assert "LateProcessError: " in found[1]
        assert "process 0 did not answer within 60 s" in found[1]


@pytest.mark.torture
@pytest.mark.parametrize("is_mended", [True, False])
def test_pull_over_a_link_that_is_cut(hosts: Hosts, is_mended: bool) -> None:
    hosts.add(3)
    offer = hosts.run(hosts_program.__file__, "offer", hosts.shared, on=[hosts[1]])
    words = ("pull", hosts.shared, 60)
    program = hosts.run(hosts_program.__file__, *words, on=[hosts[0], hosts[2]])
    program.wait_for("ready for pull\n")
    hosts[1].cut()
    let_go(hosts, "pull")
    if is_mended:
        time.sleep(20)
        hosts[1].mend()
    program.check()
    for process in range(2):
        (said,) = re.findall("(?m)^pull: (.*)", program.output(process))
        print("pull", said)
        # The kernel may tell that there is no route, or nothing.
        assert re.search(
            "returned" if is_mended else "(did not answer|No route to host) for 60 s", said
        )
    hosts[1].mend()
    offer.check()


@pytest.mark.torture
def test_training_goes_on_with_a_new_host(hosts: Hosts) -> None:
    """All processes end after the loss of a host, and start again, as on a cluster."""
    hosts.add(3)
    words = (hosts_program.__file__, "training", hosts.shared)
    program = hosts.run(*words, 10**6, heartbeat_timeout=20)
    program.wait_for("training")
    begun = time.monotonic()
    hosts.remove(1)
    codes = program.wait(seconds=400)
    print(f"all ended {time.monotonic() - begun:.1f} s after the loss of a host")
    assert all(codes)
    hosts.add()
    program = hosts.run(*words, 3)
    program.check()
    resumed = {re.findall(r"resumed at (\d+)", program.output(each))[0] for each in range(3)}
    assert len(resumed) == 1
    assert int(resumed.pop()) >= 10


def test_processes_start_again_one_by_one(hosts: Hosts) -> None:
    """A scheduler starts only what has failed, with the same number, as an indexed Job does."""
    hosts.add(3)
    program = hosts.run(hosts_program.__file__, "training", hosts.shared, 10**6)
    program.wait_for("training")
    program.send_signal(signal.SIGKILL, 1)
    limit, starts = time.monotonic() + LIMIT, 0
    while min(program.output(each).count("resumed at") for each in range(3)) < 2:
        assert time.monotonic() < limit, program.outputs()
        starts += program.start_again()
        time.sleep(1)
    print(f"{starts} starts")
    program.send_signal(signal.SIGTERM)
    program.check()
    newest = {re.findall(r"resumed at (\d+)", program.output(each))[-1] for each in range(3)}
    assert len(newest) == 1
    assert int(newest.pop()) >= 10
