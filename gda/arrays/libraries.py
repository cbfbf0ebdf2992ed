"""Support of the containers in other libraries, through their public hooks.

Provisional: see ``docs/stable.md``.

This module imports none of them: a program that does not use them pays nothing.

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
from typing import Any

import jax
import numpy as np

from gda.arrays.construction.from_callbacks import array_from_callback
from gda.arrays.transport.moving import reshard
from gda.layout.boundary import set_module

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
