"""Run an operation on a checkpoint and print the memory that it took."""

import resource
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


def memory_taken(do: str, path: str, most: int, options: dict[str, Any]) -> tuple[int, str, str]:
    """Return the bytes that it took, and the kind and the text of the error that came of it.

    From here on this process may not take much more, so that no test fills the machine.
    """
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
    return status("VmHWM") - before, type(error).__name__, str(error)
