"""A sharded array as bytes: its data, and the mesh and spec as names and device ids."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gda.construct import array_from_callback


class State(NamedTuple):
    """What a pickled ``GlobalArray`` consists of; devices are known by platform and id."""

    data: np.ndarray[Any, Any]
    key_impl: str | None  # of PRNG keys, whose data are plain integers
    spec: tuple[Any, ...]
    mesh_shape: dict[str, int]
    axis_types: tuple[str, ...]
    platform: str
    device_ids: tuple[int, ...]


def dump(array: jax.Array, sharding: NamedSharding) -> State:
    """Return array and layout in terms that any process can read.

    Raises:
      TypeError: the array is being traced, or other processes hold a part of it.
    """
    mesh = sharding.mesh
    if not isinstance(mesh, Mesh):
        raise TypeError("a GlobalArray cannot be pickled while it is being traced")
    if not array.is_fully_addressable:
        raise TypeError(
            "a GlobalArray of which other processes hold a part cannot be pickled by one of them; "
            "let every process write its local_shards with replica_id 0"
        )
    is_key = jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)
    devices = list(mesh.devices.flat)
    return State(
        data=np.asarray(jax.random.key_data(array) if is_key else array),
        key_impl=str(jax.random.key_impl(array)) if is_key else None,
        spec=tuple(sharding.spec),
        mesh_shape=dict(mesh.shape),
        axis_types=tuple(kind.name for kind in mesh.axis_types),
        platform=devices[0].platform,
        device_ids=tuple(device.id for device in devices),
    )


def load(state: State) -> jax.Array:
    """Return the array on the devices it was on.

    Raises:
      RuntimeError: they are not there.
    """
    try:
        there = {device.id: device for device in jax.devices(state.platform)}
    except RuntimeError:
        there = {}
    missing = [i for i in state.device_ids if i not in there]
    if missing:
        count = math.prod(state.mesh_shape.values())
        hint = (
            f", for instance with XLA_FLAGS=--xla_force_host_platform_device_count={count}"
            if state.platform == "cpu"
            else ""
        )
        raise RuntimeError(
            f"this GlobalArray was pickled on {count} {state.platform} devices, mesh "
            f"{state.mesh_shape}; this process has {len(there)}, without those with id {missing}. "
            f"Unpickle it where they are{hint}"
        )
    devices = np.array([there[i] for i in state.device_ids], dtype=object)
    mesh = Mesh(
        devices.reshape(tuple(state.mesh_shape.values())),
        tuple(state.mesh_shape),
        axis_types=tuple(AxisType[name] for name in state.axis_types),
    )
    if state.key_impl is None:
        return array_from_callback(state.data.shape, mesh, state.spec, lambda i: state.data[i])
    keys = jax.random.wrap_key_data(jax.numpy.asarray(state.data), impl=state.key_impl)
    return jax.device_put(keys, NamedSharding(mesh, PartitionSpec(*state.spec)))
