"""Processes that are forked from a server."""

import subprocess
import sys

from running import is_running, wait_until_gone


def test_a_server_ends_with_a_parent_that_is_killed() -> None:
    program = """
import os, time
from gda.testing import forking
forking._BOOTSTRAP = "import gda; gda.__all__ = []" + forking._BOOTSTRAP  # it imports no JAX
server = forking._ForkServer(dict(os.environ))
print(server._process.pid, flush=True)
time.sleep(300)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    wait_until_gone([pid])
