"""Steps on the disks of several simulated hosts, which are lost."""

import re

import hosts_program
from hosts import Hosts, Program

PROGRAM = hosts_program.__file__


def resumed(program: Program) -> set[int]:
    found = [
        re.findall(r"resumed at (\d+)", text)
        for text in map(program.output, range(len(program.logs)))
    ]
    return {int(each[0]) for each in found}


def test_a_lost_host_costs_no_local_step(hosts: Hosts) -> None:
    hosts.add(4)
    program = hosts.run(PROGRAM, "local_training", hosts.shared, 10)
    program.check()
    assert resumed(program) == {0}
    hosts.remove(2)
    hosts.add()  # the last process is on a host that was not there before
    program = hosts.run(PROGRAM, "local_training", hosts.shared, 4)
    program.check()
    assert resumed(program) == {10}, program.outputs()
    text = program.output(0)
    assert "from 3 of 4 hosts' disks; " in text
    assert re.search(r"host 3 is new: .* MiB from host \d", text)
    assert "the store has no step" in text
