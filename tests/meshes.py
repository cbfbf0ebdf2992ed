"""Meshes over the first virtual devices."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


def mesh_of(shape: dict[str, int], kind: AxisType = AxisType.Auto) -> Mesh:
    """Return a mesh of the first devices, in order."""
    sizes = tuple(shape.values())
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, tuple(shape), axis_types=(kind,) * len(sizes))
