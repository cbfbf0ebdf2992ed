"""Steps on the disks of several simulated hosts, which are lost."""

import re
import time
from typing import NamedTuple

import hosts_program
from hosts import Host, Hosts, Program
from trials import Trials, tried

PROGRAM = hosts_program.__file__
FAULTS = ("a process", "a host with its folder", "a link")


def numbers(said: str, text: str) -> list[int]:
    return [int(each) for each in re.findall(said, text)]


def resumed(program: Program) -> int:
    texts = [program.output(each) for each in range(len(program.logs))]
    (step,) = {step for text in texts for step in numbers(r"resumed at (\d+)", text)}
    return step


def test_a_lost_host_costs_no_local_step(hosts: Hosts) -> None:
    hosts.add(4)
    program = hosts.run(PROGRAM, "local_training", hosts.shared, 10)
    program.check()
    assert resumed(program) == 0
    hosts.remove(2)
    hosts.add()  # the last process is on a host that was not there before
    program = hosts.run(PROGRAM, "local_training", hosts.shared, 4)
    program.check()
    assert resumed(program) == 10, program.outputs()
    text = program.output(0)
    assert "from 3 of 4 hosts' disks; " in text
    assert re.search(r"host 3 is new: .* MiB from host \d", text)
    assert "the store has no step" in text


class LocalStep(NamedTuple):
    """A complete step, and the hosts that saved it, in the order of their processes."""

    number: int
    saved_by: list[Host]

    def survives(self, there: list[Host]) -> bool:
        """Return True if each host or the one that has its copies is still there."""
        count = len(self.saved_by)
        pairs = [
            (host, self.saved_by[(n + count // 2) % count]) for n, host in enumerate(self.saved_by)
        ]
        return all(any(host in there for host in pair) for pair in pairs)


@tried("a process, a host or a link of a training with local steps is lost", 1, 100)
def test_a_training_with_local_steps_loses_hosts(hosts: Hosts, trials: Trials) -> None:
    chance, kept, stored, reached = trials.chance, list[LocalStep](), 0, 0
    saved_by, slowest = list[Host](), 0.0
    hosts.add(4)
    for _ in range(trials.most + 1):
        if len(hosts) < 4 and (len(hosts) < 3 or chance.random() < 0.7):
            hosts.add(4 - len(hosts))
        on = chance.sample([*hosts], len(hosts))
        least = max([stored, *(each.number for each in kept if each.survives(on))])
        begun = time.monotonic()
        program = hosts.run(
            *(PROGRAM, "local_training", hosts.shared, 100_000, 10, chance.choice([0, 0.05])),
            on=on,
            heartbeat_timeout=10,
        )
        program.wait_for("begins")
        if chance.random() < 0.7:
            program.wait_for("after step")
            slowest = max(slowest, time.monotonic() - begun)
        time.sleep(chance.uniform(0, 2))
        fault = chance.choice(FAULTS)
        victim = chance.randrange(len(on))
        if fault == "a process":
            program.send_signal(9, victim)
        elif fault == "a link":
            on[victim].cut()
        else:
            hosts.remove([*hosts].index(on[victim]))
        if chance.random() < 0.2:  # the others end by themselves
            program.wait()
        else:
            time.sleep(chance.uniform(0, 1))
            program.kill()
        if fault == "a link":
            on[victim].mend()

        text = "".join(map(program.output, range(len(on))))
        assert "Traceback" not in text or "AssertionError" not in text, text
        if "resumed at" in text:
            step = resumed(program)
            assert least <= step <= max(reached, least), (least, step, reached, text)
            reached = step
            if step not in {each.number for each in kept} and "' disks; the store has" in text:
                kept.append(LocalStep(step, saved_by))  # its save has not said that it is complete
            kept = [each for each in kept if each.number <= step]
        kept += [LocalStep(n, on) for n in numbers(r"saved step (\d+) on local disks", text)]
        kept = kept[-2:]
        stored = max([stored, *numbers(r"saved step (\d+) of ", text)])
        reached = max([reached, *numbers(r"after step (\d+)", text)])
        saved_by = on if numbers(r"after step (\d+)", text) else saved_by
        trials.count(fault)
    print(f"the slowest first step came {slowest:.1f} s after the start")
