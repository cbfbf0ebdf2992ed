"""Bytes from every process to every process, through one device of each.

Unlike JAX's ``process_allgather`` it needs room on one device, and can omit processes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gda.mesh import own_settings

Bytes = npt.NDArray[np.uint8]


def all_gather(data: Bytes, processes: tuple[int, ...]) -> Bytes:
    """Return the bytes of all ``processes``, in that order: uint8 ``[len(processes), size]``.

    Communicates: each of ``processes``, and no other, must call it with data of the same size.
    """
    sharding, replicate = _through_leads(processes)
    mine = data.reshape(1, -1)
    shape = (len(processes), data.size)
    with own_settings():  # without jit, JAX replicates nothing
        sharded = jax.make_array_from_callback(shape, sharding, lambda _: mine)
        return np.asarray(replicate(sharded).addressable_data(0))


@lru_cache(maxsize=16)
def _through_leads(processes: tuple[int, ...]) -> tuple[NamedSharding, Callable[..., Any]]:
    leads = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([leads[process] for process in processes]), ("process",))
    sharded, whole = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("process",), ()))
    return sharded, jax.jit(lambda x: x, out_shardings=whole)
