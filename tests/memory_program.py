"""Does something with a checkpoint and says how much memory it took: for test_checkpoint_memory.py.

As a program it gets what to do as JSON. It may not take much more than it is given, so that a test
that fails does not fill the machine.
"""

import json
import resource
import sys
import tempfile
from typing import Any

import numpy as np

import gda


def status(name: str) -> int:
    """Return a line of the status of this process, in bytes."""
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def warm_up() -> None:
    """Import and start whatever a checkpoint needs."""
    with tempfile.TemporaryDirectory() as folder:
        gda.checkpoint.save(folder, {"w": np.zeros(2**18)}, compression="zstd")
        gda.checkpoint.restore(folder, check_fingerprint=True)
        gda.checkpoint.verify(folder, fingerprints=True)


def main(do: str, path: str, most: int, options: dict[str, Any]) -> None:
    warm_up()
    if do == "save":
        options["tree"] = {"w": np.random.default_rng(0).integers(0, 256, 2**26, np.uint8)}
    limit = status("VmSize") + most
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak
    before = status("VmHWM")
    error = None
    try:
        getattr(gda.checkpoint, do)(path, **options)
    except (Exception, MemoryError) as caught:
        error = caught
    taken = status("VmHWM") - before
    print(json.dumps([taken, type(error).__name__, str(error)]))


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
