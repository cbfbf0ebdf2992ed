"""The end of one process of many, without an endless wait in XLA.

If a CPU collective still makes its connections when JAX stops its coordination service, it never
finishes, and the process waits for it when XLA's client is destroyed: 153 s with JAX 0.10.2. To
block on ``jax.live_arrays()`` is not enough: it omits results that the program dropped.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import sys
import time
from contextlib import suppress
from typing import Any

# The default of the launcher for a collective that waits for a late process.
_LIMIT_SECONDS = 30.0


def finish_pending() -> None:
    """Wait until the CPU devices of this process have finished the work of the program.

    Public JAX has no such call. XLA runs computations on several CPU devices in order, so one more
    on all of them ends last. Those on one device are awaited by their results, if the program still
    has them. The limit is 30 s.
    """
    import jax
    import jax.numpy as jnp

    from gda.mesh import own_settings
    from gda.multihost import coordination

    if not coordination.has_backends() or jax.process_count() == 1:
        return
    devices = jax.local_devices()
    if devices[0].platform != "cpu":
        return
    mesh = jax.make_mesh((len(devices),), ("device",), devices=devices)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("device"))
    with suppress(Exception):  # such as the death of another process
        with own_settings():
            last = jax.jit(lambda: jnp.zeros(len(devices)), out_shardings=sharding)()
        # Not block_until_ready, which has no limit, and Python starts no more threads for one.
        limit = time.monotonic() + _LIMIT_SECONDS
        while not all(_is_done(array) for array in (last, *jax.live_arrays())):
            if time.monotonic() > limit:
                logging.getLogger("gda").warning(
                    "the devices were still busy %g s after the end of the program; the process "
                    "ends without waiting for them",
                    _LIMIT_SECONDS,
                )
                return
            time.sleep(0.01)


def _is_done(array: Any) -> bool:
    return array.is_deleted() or array.is_ready()


def leave() -> None:
    """End this process with exit code 0, if JAX was imported, without destroying XLA's client.

    Register it before the program runs, so that it is called last: after the end of the program's
    threads, the hooks of the program, and JAX's own shutdown.

    Hooks registered before it, by ``sitecustomize`` or ``.pth`` files, do not run, and no other
    ``__del__`` methods than those of open files, which are closed here. Nor do exit handlers of C
    libraries, whose stdout is flushed here.
    """
    if "jaxlib" not in sys.modules:
        return
    files = [each for each in gc.get_objects() if issubclass(type(each), io.IOBase)]
    for file in files:  # all before one is closed: a text file writes to a binary one
        with suppress(Exception):
            file.flush()
    for file in files:
        with suppress(Exception):
            if file.fileno() > 2:
                file.close()
    with suppress(Exception):
        import ctypes  # a Python may lack it

        ctypes.CDLL(None).fflush(None)
    os._exit(0)
