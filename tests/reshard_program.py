"""One of four processes, as if on four machines; process 1 is killed while they move an array.

Arguments: the number of the process, the address of process 0, and a folder for notes of the end.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from running import wait_for

import gda
from gda.arrays.transport import staging
from gda.multihost import places

process, address, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
places.machine = lambda: f"machine {process}"
jax.distributed.initialize(address, 4, process)

rounds = []
allocate = staging.HostStaging.flat


def flat(*args: Any) -> Any:
    rounds.append(args)
    if process == 1 and len(rounds) > 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return allocate(*args)


staging.HostStaging.flat = flat
mesh = Mesh(np.array(jax.devices()), ("x",))
data = np.arange(160 * 80, dtype=np.float32).reshape(160, 80)
g = gda.GlobalArray.from_callback(data.shape, mesh, ["x"], lambda index: data[index])
os.environ["GDA_CHECK_AGREEMENT_TIMEOUT_SECONDS"] = "10"  # all have come until here
try:
    g.reshard([None, "x"], max_bytes=800)
except gda.LateProcessError as error:
    print(f"\n{error.processes} {error}", flush=True)
(folder / str(process)).touch()
if process == 0:  # without its service JAX would end the others
    wait_for([folder / "2", folder / "3"])
# Not as usual: JAX would wait for the process that is gone.
os._exit(0)
