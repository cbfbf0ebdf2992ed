"""The environment in which the compilers for TPUs and GPUs look for no hardware."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DEVICES = Path("/dev")
# Without them libtpu asks a metadata server for the accelerator, the hosts and the number of this
# host, warns that there are none, and admits one process at a time.
_WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# Without the first one, JAX's plugin for CUDA looks for its libraries and prints that they are
# missing. The compiler, which reads the second as it is loaded, prints that memory is short.
_WITHOUT_GPU = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}

_lock = threading.Lock()


@contextmanager
def without_hardware() -> Iterator[None]:
    """Keep compilers from looking for hardware and a server in this block, unless there is some."""
    wanted = ({} if _has_tpu() else _WITHOUT_TPU) | ({} if _has_gpu() else _WITHOUT_GPU)
    with _lock:
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _has_tpu() -> bool:
    return any(_DEVICES.glob("accel*")) or any(_DEVICES.glob("vfio/[0-9]*"))


def _has_gpu() -> bool:
    return any(_DEVICES.glob("nvidia[0-9]*")) or (_DEVICES / "dxg").exists()
