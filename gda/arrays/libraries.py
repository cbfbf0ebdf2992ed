"""Support of the containers in other libraries, through their public hooks.

This module imports none of them: a program that does not use them pays nothing.

**treescope** shows containers in trees and in ``treescope.render_array``. It never waits for other
processes. If they hold a part of an array, a tree shows only the layout, and ``render_array``
raises the error of ``numpy.asarray``.

**flax.serialization** takes the ``jax.Array`` as the state of a ``GlobalArray``. ``from_bytes`` and
``from_state_dict`` return a container over the mesh and spec of the target. ``to_bytes`` needs the
whole value in this process, and raises ``RuntimeError`` if other processes hold a part of it. The
container is registered when ``gda.GlobalArray`` is first used, if flax is imported by then. A
program that imports flax later calls ``gda.libraries.register(gda.GlobalArray)`` after that import.

**einops** has ``einops.array_api`` for arrays of other libraries. Its other functions need
``g.array``, or a step under ``gda.jit``.

>>> import einops.array_api, gda, jax.numpy as jnp
>>> g = gda.GlobalArray.from_array(jnp.zeros((2, 3)))
>>> einops.array_api.rearrange(g, 'a b -> b a').shape
(3, 2)

**flax nnx** splits a pytree in an ``nnx.Param`` into its leaves, and ``nnx.Optimizer`` does not
build it again ("pytree structure error ... State"); nnx has no public hook for that. Write
``nnx.Param(g.array)``; ``gda.GlobalArray.from_array(module.w[...])`` is the container again.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from gda.arrays.construction.from_callbacks import array_from_callback
from gda.arrays.transport.moving import reshard
from gda.layout.boundary import set_module
from gda.layout.spec import format_spec
from gda.mesh import is_tracer

if TYPE_CHECKING:
    from treescope.ndarray_adapters import NDArrayAdapter


__all__ = ["register"]


def __dir__() -> list[str]:
    return list(__all__)


@set_module("gda.libraries")
def register(container: type) -> None:
    """Register a container with ``flax.serialization``, if flax is imported.

    A second call does nothing.

    >>> import gda
    >>> gda.libraries.register(gda.GlobalArray)
    """
    if sys.modules.get("flax.serialization") is None:
        return
    from flax import serialization

    if not serialization.is_serializable(container):
        serialization.register_serialization_state(
            container, lambda g: g.__jax_array__(), _from_state
        )


def _from_state(target: Any, state: Any) -> Any:
    from flax import serialization

    shape, sharding = target.shape, target.sharding
    if np.shape(state) != shape:
        raise ValueError(
            f"the state at {serialization.current_path()} has the shape {np.shape(state)}, and the "
            f"target there is {target!r}; restore into a target of the shape that was saved"
        )
    if isinstance(state, jax.Array):
        array = reshard(state, sharding)
    else:
        array = array_from_callback(shape, sharding, None, np.asarray(state).__getitem__)
    return type(target)(array=array)


# treescope computes on arrays, for instance a mean. That waits for other processes where they hold
# a part of the jax.Array, so such an array is never handed over.


def treescope_repr(container: Any, path: str | None, subtree_renderer: Any) -> Any:
    """Return what ``__treescope_repr__`` is to return."""
    from treescope import rendering_parts, type_registries

    # Else treescope warns of a container that is in a tree twice, as it does of a list.
    type_registries.IMMUTABLE_TYPES_REGISTRY[type(container)] = True
    array = _local(container.array)
    if array is None:
        return rendering_parts.abbreviation_color(rendering_parts.text(f"<{container!r}>"))
    below = subtree_renderer(array, path=None if path is None else f"{path}.array")
    children: list[Any] = [rendering_parts.siblings_with_annotations("array=", below)]
    try:
        layout = container.sharding
    except (AttributeError, TypeError):
        pass  # in a trace, or around something that is no array
    else:
        mesh, spec = dict(layout.mesh.shape), format_spec(layout.spec)
        shape = f"shape={container.shape}, " if container.shape != container.array.shape else ""
        children.append(rendering_parts.text(f"{shape}mesh={mesh}, spec={spec}"))
    return rendering_parts.build_foldable_tree_node_from_children(
        prefix=f"{type(container).__name__}(",
        children=children,
        suffix=")",
        comma_separated=True,
        path=path,
    )


def treescope_adapter(container: Any) -> NDArrayAdapter[Any] | None:
    """Return what ``__treescope_ndarray_adapter__`` is to return: treescope's own, one step in."""
    from treescope import ndarray_adapters, type_registries

    inner: Any = type_registries.lookup_ndarray_adapter(container.array)
    if inner is None:
        return None

    class Adapter(ndarray_adapters.NDArrayAdapter[Any]):
        def get_axis_info_for_array_data(self, array: Any) -> Any:
            return inner.get_axis_info_for_array_data(array.array)

        def get_array_data_with_truncation(
            self, array: Any, mask: Any, edge_items_per_axis: Any
        ) -> Any:
            local = _local(array.array)
            if local is None:
                local = jax.numpy.asarray(np.asarray(array))
            return inner.get_array_data_with_truncation(local, mask, edge_items_per_axis)

        def get_array_summary(self, array: Any, fast: bool) -> Any:
            return inner.get_array_summary(array.array, fast or _local(array.array) is None)

        def get_numpy_dtype(self, array: Any) -> Any:
            return inner.get_numpy_dtype(array.array)

        def get_sharding_info_for_array_data(self, array: Any) -> Any:
            return inner.get_sharding_info_for_array_data(array.array)

        def should_autovisualize(self, array: Any) -> bool:
            return _local(array.array) is not None and inner.should_autovisualize(array.array)

    return Adapter()


def _local(array: Any) -> Any:
    """Return what a container holds, or a copy of this process; ``None`` if others hold a part."""
    if not isinstance(array, jax.Array) or is_tracer(array):
        return array
    if array.is_fully_addressable or array.is_deleted():
        return array
    if array.is_fully_replicated and array.addressable_shards:
        return array.addressable_shards[0].data
    return None
