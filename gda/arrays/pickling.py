"""A sharded array as bytes: its data, and the mesh and spec as names and device ids."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gda.arrays.construction.from_callbacks import array_from_callback
from gda.arrays.dtypes import is_extended, weakly_typed
from gda.arrays.process_local import is_all_here
from gda.layout.spec import Shape, partitions_of
from gda.mesh import own_settings
from gda.multihost.agreement import checking_agreement


class State(NamedTuple):
    """The parts of a pickled container; devices are known by platform and id."""

    data: np.ndarray[Any, Any]  # without padding
    key_impl: str | None  # of PRNG keys, whose data are plain integers
    spec: tuple[Any, ...]
    mesh_shape: dict[str, int]
    axis_types: tuple[str, ...]
    platform: str
    device_ids: tuple[int, ...]
    memory_kind: str | None
    weak_type: bool
    reduced: frozenset[str] = frozenset()  # axes of the spec


def dump(array: jax.Array, sharding: NamedSharding, shape: Shape | None = None) -> State:
    """Return array and layout for any process; ``shape`` is that without padding, if any."""
    mesh: Any = sharding.mesh
    is_key = is_extended(array.dtype)
    # The numbers of keys come from a program over all devices, which one process cannot run alone.
    if not (array.is_fully_addressable if is_key else is_all_here(array)):
        raise TypeError(
            "an array cannot be pickled by a process that does not hold every block of it; "
            "let every process write its addressable_shards with replica_id 0"
        )
    with own_settings():
        data = np.asarray(jax.random.key_data(array) if is_key else array)
    devices = list(mesh.devices.flat)
    return State(
        data=data if shape is None else data[tuple(map(slice, shape))],
        key_impl=str(jax.random.key_impl(array)) if is_key else None,
        spec=partitions_of(sharding.spec),
        mesh_shape=dict(mesh.shape),
        axis_types=tuple(kind.name for kind in mesh.axis_types),
        platform=devices[0].platform,
        device_ids=tuple(device.id for device in devices),
        memory_kind=sharding.memory_kind,
        weak_type=not is_key and array.weak_type,
        reduced=sharding.spec.reduced,
    )


def load(state: State, *, is_padded: bool = False) -> jax.Array:
    """Return the array on the devices it was on, with ``is_padded`` padded with zeros."""
    try:
        there = {device.id: device for device in jax.devices(state.platform)}
    except RuntimeError:
        there = {}
    missing = [i for i in state.device_ids if i not in there]
    if missing:
        raise RuntimeError(
            f"this array was pickled on {len(state.device_ids)} {state.platform} devices, mesh "
            f"{state.mesh_shape}; this process has {len(there)}, without those with id {missing}. "
            "Unpickle it where they are"
        )
    devices = np.array([there[i] for i in state.device_ids], dtype=object)
    mesh = Mesh(
        devices.reshape(tuple(state.mesh_shape.values())),
        tuple(state.mesh_shape),
        axis_types=tuple(AxisType[name] for name in state.axis_types),
    )
    spec = PartitionSpec(*state.spec, reduced=state.reduced)
    sharding = NamedSharding(mesh, spec, memory_kind=state.memory_kind)
    data: Any = state.data
    if state.key_impl is not None:
        with own_settings():
            data = jax.random.wrap_key_data(jax.numpy.asarray(data), impl=state.key_impl)
    with own_settings(), checking_agreement(False):  # a process may read a pickle alone
        array = array_from_callback(
            data.shape,
            sharding,
            None,
            lambda index: data[index],
            dtype=data.dtype if is_padded else None,
            pad=is_padded,
        )
    return weakly_typed(array) if state.weak_type else array
