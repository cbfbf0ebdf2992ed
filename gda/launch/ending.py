"""The end of a process of many, which must not wait in XLA for ever.

A collective on CPU that still makes its connections when JAX stops its coordination service does
not finish, and the process waits for it when XLA's client is destroyed: for 153 s with JAX 0.10.2.
To block on ``jax.live_arrays()`` is not enough: results that the program dropped are not in there.
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

# As long as a collective waits for a process that is late, by default of the launcher.
_LIMIT_SECONDS = 30.0


def finish_pending() -> None:
    """Wait until the CPU devices of this process have done what the program gave them to do.

    Public JAX cannot ask for that. But XLA starts what runs on several CPU devices one after the
    other, so one more computation on all of them is done after all of these. A computation on one
    device is waited for if the program still has the result. The limit is 30 s.
    """
    import jax
    import jax.numpy as jnp

    from gda.multihost import coordination

    if not coordination.has_backends() or jax.process_count() == 1:
        return
    devices = jax.local_devices()
    if devices[0].platform != "cpu":
        return
    mesh = jax.make_mesh((len(devices),), ("device",), devices=devices)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("device"))
    with suppress(Exception):  # as when another process died, which the program did not wait for
        with jax.set_mesh(mesh), jax.disable_jit(False):  # whatever the program has set
            last = jax.jit(lambda: jnp.zeros(len(devices)), out_shardings=sharding)()
        # Not block_until_ready: it has no limit, and Python starts no thread any more.
        limit = time.monotonic() + _LIMIT_SECONDS
        while not all(_is_done(array) for array in (last, *jax.live_arrays())):
            if time.monotonic() > limit:
                logging.getLogger("gda").warning(
                    "the program ended before its devices were done, and %g s later they are busy "
                    "still; they are not waited for any longer",
                    _LIMIT_SECONDS,
                )
                return
            time.sleep(0.01)


def _is_done(array: Any) -> bool:
    return array.is_deleted() or array.is_ready()


def leave() -> None:
    """End this process with exit code 0, if JAX was imported, without destroying XLA's client.

    To be registered before the program runs, so that it is called last: after the program's threads
    have ended, the hooks that the program registered, and JAX's own shutdown.

    It has a price. Hooks that were registered before it do not run: those of ``sitecustomize`` and
    of ``.pth`` files, of which coverage is the one that people have, so its data are saved here.
    Objects that are alive are not finalized: open files are written and closed here, and other
    ``__del__`` methods do not run. Nor do the exit handlers of C libraries, whose stdout is written
    here.
    """
    if "jaxlib" not in sys.modules:
        return
    if coverage := sys.modules.get("coverage"):
        with suppress(Exception):
            measurement = coverage.Coverage.current()
            measurement.stop()
            measurement.save()
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
