"""Several simulated hosts on this machine, and the faults of their network.

A host is a network namespace on a common bridge, a name, and a ``/dev/shm`` of its own. All other
folders are common to all hosts, as on a network file system. Nothing outside sees the network, and
it has no way out. All of it ends with the fixture, and at the latest with this process, even after
a SIGKILL::

    def test_a_host_is_lost(hosts: Hosts) -> None:
        hosts.add(3)
        program = hosts.run("program.py", "argument")  # process i on host i
        program.wait_for("ready")
        hosts[1].kill()
        assert program.wait() != [0, 0, 0]
        hosts.remove(1)
        hosts.add()  # with another name and address
        hosts.run("program.py", "argument").check()
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from costs import COMPILER_FLAGS
from running import USUAL

from gda.launch.children import Children, environment
from gda.testing.forking import Forked

LIMIT = 150  # seconds, for all that should take a few
_COMMANDS = ("ip", "mount", "nsenter", "tc", "unshare")

_SWITCH = """
ip link set lo up
ip link add br0 type bridge
ip link set br0 up
"""
_HOST = """
hostname "$1"
mount -t tmpfs -o "size=$2" tmpfs /dev/shm
mount --bind "$3" /etc/hosts
ip link set lo up
"""
# A namespace is there as long as a process is in it.
_STAY = "echo; exec sleep 7200"


class Host:
    """A simulated host: ``name``, ``address``, and the number of its link in ``number``."""

    def __init__(self, hosts: "Hosts", number: int, disk: str) -> None:
        self.name = f"host{number}"
        self.address = f"10.77.{number // 250}.{number % 250 + 1}"
        self._hosts, self._link = hosts, f"v{number}"
        with open(hosts._names, "a") as names:  # the same file is mounted in all hosts
            names.write(f"{self.address} {self.name}\n")
        self._children = Children()
        self._init = hosts._stay(
            self._children, "-nmu", _HOST, self.name, disk, str(hosts._names), entered=True
        )
        end = ["type", "veth", "peer", "name", "e0", "netns", str(self._init)]
        hosts._do("ip", "link", "add", self._link, *end)
        hosts._do("ip", "link", "set", self._link, "master", "br0", "up")
        self.do("ip", "addr", "add", f"{self.address}/16", "dev", "e0")
        self.do("ip", "link", "set", "e0", "up")

    def do(self, *command: object) -> str:
        """Run a command on the host, such as ``"df", "/dev/shm"``, and return its output."""
        return _run_in(self._init, *command)

    def cut(self) -> None:
        """Cut the link of the host."""
        self._hosts._do("ip", "link", "set", self._link, "down")

    def mend(self) -> None:
        """Mend a link that was cut."""
        self._hosts._do("ip", "link", "set", self._link, "up")

    def limit(self, mbit: int) -> None:
        """Limit the rate in each direction, in Mbit/s."""
        rate = ("root", "tbf", "rate", f"{mbit}mbit", "burst", "32kbit", "latency", "50ms")
        self._hosts._do("tc", "qdisc", "replace", "dev", self._link, *rate)
        self.do("tc", "qdisc", "replace", "dev", "e0", *rate)

    def lose(self, percent: int) -> None:
        """Drop this part of the packets of each direction at random; 0 ends it. Needs ``nft``."""
        require(*([] if shutil.which("nft") else ["nft is missing: apt-get install nftables"]))
        chain = f"bridge gda {self._link}"
        chance = f"numgen random mod 100 < {percent}" if percent < 100 else ""
        rules = [
            "add table bridge gda",
            f"add chain {chain} {{ type filter hook forward priority 0; }}",
            f"flush chain {chain}",
            *(
                f"add rule {chain} {end} {self._link} {chance} drop"
                for end in ("iifname", "oifname")
            ),
        ]
        self._hosts._do("nft", "; ".join(rules))

    def kill(self) -> None:
        """Kill all processes of the host at once; its folder is lost, and its link is dead."""
        self._children.close()


class Hosts:
    """A sequence of simulated hosts, empty at first; all of them see the folder ``shared``."""

    def __init__(self, folder: Path) -> None:
        require(*_missing())
        self.shared = folder / "shared"
        self.shared.mkdir()
        self._folder, self._hosts, self._made, self._runs = folder, [], 0, 0
        self._names = folder / "hosts"
        self._names.write_text("127.0.0.1 localhost\n")
        self._switch = Children()
        self._init = self._stay(self._switch, "-rnm", _SWITCH)

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    def add(self, count: int = 1, disk: str = "512m") -> list[Host]:
        """Start hosts that were not there before; ``disk`` is the size of their ``/dev/shm``."""
        added = [Host(self, self._made + each, disk) for each in range(count)]
        self._made += count
        self._hosts += added
        return added

    def remove(self, index: int) -> None:
        """Kill a host and take it out of the sequence."""
        self._hosts.pop(index).kill()

    def run(
        self,
        *words: object,
        on: Sequence[Host] | None = None,
        devices: int = 2,
        heartbeat_timeout: int = 60,
        collective_timeout: int = 60,
        agreement_timeout: int = 60,
        variables: dict[str, str] | None = None,
    ) -> "Program":
        """Start ``python`` with these words on each host; ``gda.launch.initialize()`` joins them.

        Args:
          on: the hosts of processes 0, 1, and so on, by default all; the same host twice has two.
          variables: more variables of the environment. For each set of them, a server imports JAX
            first; arguments of the program are cheaper.

        JAX_PROCESS_ID has the number of each process. The timeouts are those of ``gda.launch``.
        """
        on = self._hosts if on is None else on
        self._runs += 1
        environments = []
        for number in range(len(on)):
            address = f"{on[0].address}:{7000 + self._runs}"
            timeouts = {
                "heartbeat_timeout": heartbeat_timeout,
                "collective_timeout": collective_timeout,
                "agreement_timeout": agreement_timeout,
            }
            own = environment(number, len(on), 0, devices, **timeouts)
            own |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_COORDINATOR_BIND_ADDRESS": address}
            own["XLA_FLAGS"] = f"{COMPILER_FLAGS} {_without_devices(own['XLA_FLAGS'], devices)}"
            environments.append({**own, **USUAL, **(variables or {})})
        logs = [self._folder / f"run{self._runs}-{number}.log" for number in range(len(on))]
        return Program(on, environments, logs, [*map(str, words)])

    def close(self) -> None:
        """End all hosts and their network."""
        for host in self._hosts:
            host.kill()
        self._switch.close()

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _do(self, *command: object) -> str:
        return _run_in(self._init, *command)

    def _stay(
        self, children: Children, spaces: str, setup: str, *words: str, entered: bool = False
    ) -> int:
        """Make namespaces and return the process that keeps them."""
        enter = [*_entering(self._init, "-U", "-m")] if entered else []
        command = [*enter, "unshare", spaces, "sh", "-ec", setup + _STAY, "sh", *words]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = children.start(command, **pipes)
        with process.stdout, process.stderr:
            if not process.stdout.readline():
                raise OSError(f"{command}: {process.stderr.read().decode()}")
        return process.pid


class Program:
    """A program with one process on each of some hosts; ``logs`` has a file of each."""

    def __init__(
        self,
        on: Sequence[Host],
        environments: Sequence[dict[str, str]],
        logs: Sequence[Path],
        words: Sequence[str],
    ) -> None:
        self.logs, self._on, self._environments, self._words = logs, on, environments, words
        self._processes = [self._started(number) for number in range(len(on))]

    def _started(self, number: int) -> Forked:
        variables = {**os.environ, **self._environments[number]}
        with open(os.devnull) as nothing, self.logs[number].open("a") as file:
            return self._on[number]._children.start(
                "hosts:_run_on",
                self._on[number]._init,
                *self._words,
                popen=Forked,
                env=variables,
                stdin=nothing.fileno(),
                stdout=file.fileno(),
                stderr=file.fileno(),
            )

    def start_again(self) -> int:
        """Start each process that has failed again, on its host; return their number."""
        failed = [n for n, each in enumerate(self._processes) if each.poll() not in (None, 0, 75)]
        for number in failed:
            self._processes[number] = self._started(number)
        return len(failed)

    def output(self, process: int) -> str:
        """Return what a process has written so far, on stdout and stderr."""
        return self.logs[process].read_text(errors="replace")

    def wait_for(self, text: str, *processes: int, seconds: float = LIMIT) -> None:
        """Wait until some processes, by default all, have written a text."""
        limit = time.monotonic() + seconds
        numbers = processes or range(len(self.logs))
        while missing := [each for each in numbers if text not in self.output(each)]:
            ended = [each for each in missing if self._processes[each].poll() is not None]
            assert not ended, f"{ended} ended without {text!r}:\n{self.outputs()}"
            assert time.monotonic() < limit, f"no {text!r} from {missing}:\n{self.outputs()}"
            time.sleep(0.05)

    def send_signal(self, number: int, *processes: int) -> None:
        """Send some processes, by default all, a signal."""
        for each in processes or range(len(self.logs)):
            self._processes[each].send_signal(number)

    def kill(self) -> None:
        """Kill the processes of the program, not the hosts."""
        self.send_signal(signal.SIGKILL)
        for each in self._processes:
            each.wait(LIMIT)

    def wait(self, seconds: float = LIMIT) -> list[int]:
        """Wait until all processes have ended; return their exit codes, negative for signals."""
        limit = time.monotonic() + seconds
        try:
            return [each.wait(max(limit - time.monotonic(), 0)) for each in self._processes]
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"not done after {seconds:g} s:\n{self.outputs()}")

    def check(self, seconds: float = LIMIT) -> None:
        """Wait until all processes have ended; all must succeed."""
        codes = self.wait(seconds)
        assert not any(codes), f"exit codes {codes}:\n{self.outputs()}"

    def outputs(self) -> str:
        """Return all outputs, for the message of a failure."""
        return "\n".join(f"[{log.name}]\n{self.output(n)}" for n, log in enumerate(self.logs))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """No hosts yet; the test is skipped where the system does not allow any."""
    with Hosts(tmp_path) as hosts:
        yield hosts


@cache
def _missing() -> list[str]:
    """Return the reasons for which there can be no hosts here."""
    if absent := [name for name in _COMMANDS if not shutil.which(name)]:
        return [f"{', '.join(absent)} missing: apt-get install iproute2 util-linux mount"]
    tried = subprocess.run(["unshare", "-rnmu", "true"], capture_output=True, text=True)
    return [f"no namespaces: {tried.stderr.strip()}"] if tried.returncode else []


def require(*missing: str) -> None:
    """Skip the test if something is missing; fail where hosts are required."""
    if missing:
        reason = f"no simulated hosts here ({'; '.join(missing)})"
        if os.environ.get("GDA_HOSTS") == "required":
            pytest.fail(f"{reason}, and GDA_HOSTS=required")
        pytest.skip(reason)


def _without_devices(flags: str, devices: int) -> str:
    """Return the flags with this number of devices; the suite sets another before."""
    count = "--xla_force_host_platform_device_count"
    return " ".join([*(f for f in flags.split() if not f.startswith(count)), f"{count}={devices}"])


def _entering(init: int, *spaces: str) -> list[str]:
    return ["nsenter", "--preserve-credentials", "-t", str(init), *spaces]


def _run_in(init: int, *command: object) -> str:
    words = [*_entering(init, "-U", "-n", "-m", "-u"), *map(str, command)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stdout}{done.stderr}")
    return done.stdout


def _run_on(init: int, *words: str) -> None:
    """Become a program on a host, in a process that was forked for it."""
    import forked_program

    from gda.multihost import coordination

    folder = os.getcwd()
    for space in ("user", "net", "mnt", "uts"):
        with open(f"/proc/{init}/ns/{space}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                sys.exit(f"setns to {space}: {os.strerror(ctypes.get_errno())}")
    os.chdir(folder)
    coordination.listen_on = lambda _: None  # as a program that gda.launch does not start
    forked_program.run(*words)
