"""The ``NamedSharding`` of an array that is to be made, and of one that is there.

An array on one device has no mesh; it gets one of that device. In a trace JAX knows the sharding of
an array over Explicit axes, and not over Auto axes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from gda.layout.spec import Shape, SpecLike, check_spec
from gda.mesh import mesh_and_spec


class LayoutUnknownError(TypeError, AttributeError):
    """There is no mesh and spec to know, so an attribute that would tell them is not there.

    An ``AttributeError`` too, as of JAX's tracers: JAX and other libraries ask ``hasattr``.
    """


def not_an_array_error(content: object) -> LayoutUnknownError:
    """Say how a container came to hold what is no ``jax.Array``, and what to use instead."""
    return LayoutUnknownError(
        f"this GlobalArray holds a {type(content).__name__} and no jax.Array, because a tree "
        "function such as jax.device_get or jax.tree.map put its result into the container. For "
        "NumPy arrays use gda.to_numpy(tree). For any other result call jax.tree.map(function, "
        "tree, is_leaf=lambda x: isinstance(x, gda.GlobalArray))"
    )


def named_sharding(
    global_shape: Shape,
    mesh: Mesh | AbstractMesh,
    spec: SpecLike,
    memory_kind: str | None = None,
) -> NamedSharding:
    """Return the sharding, its spec cut to the rank: JAX refuses surplus entries in places."""
    entries = check_spec(spec, global_shape, mesh.shape)
    return NamedSharding(mesh, PartitionSpec(*entries), memory_kind=memory_kind)  # pyright: ignore


def is_tracer(array: object) -> bool:
    return isinstance(array, Tracer)


def sharding_of(array: Any) -> NamedSharding:
    """Return the sharding of what a container holds.

    Raises:
      LayoutUnknownError: there is none to know.
    """
    if is_tracer(array):
        return _sharding_in_trace(array)
    if not hasattr(array, "sharding"):
        raise not_an_array_error(array)
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        return sharding
    if isinstance(sharding, SingleDeviceSharding):
        return _on_one_device(sharding)
    raise LayoutUnknownError(
        f"this {type(array).__name__} has the sharding {sharding!r}, which names no mesh and spec; "
        "give it one with jax.device_put(array, NamedSharding(mesh, spec))"
    )


def _sharding_in_trace(array: Any) -> NamedSharding:
    sharding: Any = jax.typeof(array).sharding
    mesh = sharding.mesh
    if AxisType.Manual in mesh.axis_types:
        raise LayoutUnknownError(
            "inside jax.shard_map an array is the block of one device, without a mesh or spec; "
            "look at them outside"
        )
    if mesh.empty or any(kind != AxisType.Explicit for kind in mesh.axis_types):
        kinds = sorted({kind.name for kind in mesh.axis_types}) or ["no mesh"]
        raise LayoutUnknownError(
            "mesh, spec and shards of this GlobalArray are not known while it is being traced over "
            f"{' and '.join(kinds)} axes: JAX lays it out when it compiles. Look at them outside "
            "jit and pass them in, make the mesh with Explicit axes, or ask for a layout with "
            "gda.constrain"
        )
    return sharding


@cache
def _on_one_device(sharding: SingleDeviceSharding) -> NamedSharding:
    mesh, spec, kind = mesh_and_spec(sharding, None)
    return NamedSharding(mesh, spec, memory_kind=kind)  # pyright: ignore[reportArgumentType]
