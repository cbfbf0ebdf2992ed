"""Simulated hosts: their names, networks, folders and ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import Hosts, require
from running import wait_until_gone

PINGS = """
import os, socket, sys, time
server = socket.create_server(("", 9))
print(socket.gethostname(), socket.gethostbyname(socket.gethostname()), flush=True)
with open(f"/dev/shm/of{os.environ['JAX_PROCESS_ID']}", "w"):
    print(os.listdir("/dev/shm"), flush=True)
for name in sys.argv[1:]:
    for _ in range(600):
        try:
            socket.create_connection((name, 9), timeout=60)
            break
        except ConnectionRefusedError:  # it has not begun to listen
            time.sleep(0.1)
    print("reached", name, flush=True)
time.sleep(600)
"""


def test_hosts_have_names_networks_and_folders_of_their_own(hosts: Hosts) -> None:
    hosts.add(2, disk="1m")
    program = hosts.run("-c", PINGS, "host0", "host1")
    program.wait_for("reached host1")
    for number in range(2):
        assert program.output(number).splitlines()[:2] == [
            f"host{number} 10.77.0.{number + 1}",
            f"['of{number}']",
        ]
        (size,) = hosts[number].do("df", "--output=size", "/dev/shm").splitlines()[1:]
        assert int(size) == 1024
    assert not Path("/dev/shm/of0").exists()
    interfaces = Path("/proc/net/dev").read_text()
    assert "br0" not in interfaces
    assert "v1:" not in interfaces


def connects(hosts: Hosts, index: int, to: str) -> bool:
    """Return whether a host gets an answer from another one within a second."""
    try:
        hosts[index].do("sh", "-c", f"timeout 1 bash -c '</dev/tcp/{to}/9'")
    except OSError:
        return False
    return True


def wait_until_connected(hosts: Hosts, index: int, to: str) -> None:
    limit = time.monotonic() + 60
    while not connects(hosts, index, to):
        assert time.monotonic() < limit


def test_a_host_is_cut_off_killed_and_replaced(hosts: Hosts) -> None:
    hosts.add(2)
    program = hosts.run("-c", PINGS)
    program.wait_for("of")
    wait_until_connected(hosts, 0, "host1")
    hosts[1].cut()
    assert not connects(hosts, 0, "host1")
    hosts[1].mend()
    wait_until_connected(hosts, 0, "host1")
    process = program._processes[1].pid
    hosts.remove(1)
    wait_until_gone([process])
    assert not connects(hosts, 0, "host1")
    program.kill()
    (new,) = hosts.add()
    assert (new.name, new.address) == ("host2", "10.77.0.3")
    assert new.do("hostname").strip() == "host2"
    assert new.do("ls", "/dev/shm") == ""
    hosts.run("-c", PINGS, "host0", "host2").wait_for("reached host2")


SENDS = """
import os, socket, time
if os.environ["JAX_PROCESS_ID"] == "0":
    peer, _ = socket.create_server(("", 9)).accept()
    while peer.recv(2**16):
        pass
else:
    for _ in range(600):
        begin = time.monotonic()
        try:
            with socket.create_connection(("host0", 9), timeout=60) as peer:
                peer.sendall(bytes(2**20))
                peer.shutdown(socket.SHUT_WR)
                peer.recv(1)  # when all has come
            print(time.monotonic() - begin)
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
"""


def test_link_has_a_rate(hosts: Hosts) -> None:
    hosts.add(2)
    hosts[1].limit(mbit=20)
    program = hosts.run("-c", SENDS)
    program.check()
    assert float(program.output(1)) > 0.3  # 2**23 bits take at least 0.42 s


def test_link_loses_packets(hosts: Hosts) -> None:
    hosts.add(2)
    hosts.run("-c", PINGS).wait_for("of")
    hosts[1].lose(percent=100)
    assert not connects(hosts, 0, "host1")
    hosts[1].lose(percent=0)
    wait_until_connected(hosts, 0, "host1")


ENDLESS = """
import sys, time
from pathlib import Path
from hosts import Hosts
hosts = Hosts(Path(sys.argv[1]))
hosts.add(1)
program = hosts.run("-c", "print('runs', flush=True); import time; time.sleep(600)")
program.wait_for("runs")
print("pids", hosts._init, hosts[0]._init, program._processes[0].pid, flush=True)
time.sleep(600)
"""


def test_hosts_end_with_a_pytest_that_is_killed(hosts: Hosts, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS, tmp_path / "shared"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()[1:]]
        assert len(pids) == 3
        process.send_signal(signal.SIGKILL)
    wait_until_gone(pids)


def test_hosts_are_required_or_skipped_visibly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GDA_HOSTS", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no simulated hosts here \\(no ip\\)"):
        require("no ip")
    monkeypatch.setenv("GDA_HOSTS", "required")
    with pytest.raises(pytest.fail.Exception, match="no ip\\), and GDA_HOSTS=required"):
        require("no ip")
