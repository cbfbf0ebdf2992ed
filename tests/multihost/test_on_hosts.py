"""All that communicates, on several simulated hosts with addresses and folders of their own."""

import os
import re
import signal
import sys
from pathlib import Path

import hosts_program
from hosts import Hosts

NOT_SHARED = {
    "save": r"/dev/shm/s/a is not one folder for all processes: processes 1, 2 cannot see",
    "save_async": r"/dev/shm/s/a is not one folder for all processes: processes 1, 2 cannot see",
    "save_safetensors": r"/dev/shm/m is not one folder for all processes: processes 1, 2 cannot",
    "Run": r"/dev/shm/run is not one folder for all processes: processes 1, 2 cannot see",
    "base": r"CheckpointNotFoundError.*/dev/shm/of0 is not one folder for all",
    "diff": r"/dev/shm/of0 is not one folder for all",
    "restore": r"/dev/shm/of0 is not one folder for all",
}


def test_all_that_communicates_runs_on_several_hosts(hosts: Hosts) -> None:
    hosts.add(3)
    program = hosts.run(hosts_program.__file__, "first", hosts.shared)
    program.wait_for("training")
    program.send_signal(signal.SIGTERM, 1)
    assert program.wait() == [75, 75, 75], program.outputs()
    for process in range(3):
        for name, message in NOT_SHARED.items():
            assert re.search(f"(?m)^{name}: .*{message}", program.output(process)), name
    ends = {re.findall(r"closed at (\d+)", program.output(process))[0] for process in range(3)}
    assert len(ends) == 1
    hosts.remove(1)
    hosts.add()  # process 2 is on a host with a new name and address
    trainer = hosts.run(hosts_program.__file__, "second", hosts.shared)
    trainer.wait_for("offers")
    assert f"resumed at {ends.pop()}\n" in trainer.output(2)
    hosts.run(hosts_program.__file__, "third", hosts.shared, on=[hosts[2], hosts[1]]).check()
    trainer.check()


MARKED = """
import jax, numpy as np, pytest, gda
from jax.sharding import Mesh, PartitionSpec as P

@pytest.mark.processes(2, devices=1)
def test_gather():
    mesh = Mesh(np.array(jax.devices()), ("x",))
    array = gda.GlobalArray.from_callback((2,), mesh, P("x"), lambda index: np.arange(2)[index])
    assert array.gather().tolist() == [0, 1]
"""


def test_marker_of_pytest_needs_no_network(hosts: Hosts, tmp_path: Path) -> None:
    """The name of the host has an address, to which its link does not lead."""
    (host,) = hosts.add()
    host.cut()
    (tmp_path / "test_marked.py").write_text(MARKED)
    here = ["env", "-C", os.getcwd(), "-u", "PYTEST_XDIST_WORKER", sys.executable, "-m", "pytest"]
    out = host.do(*here, "-q", "-p", "no:cacheprovider", tmp_path / "test_marked.py")
    assert "1 passed" in out
