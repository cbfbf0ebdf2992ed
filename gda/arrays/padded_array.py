"""The container for shapes that the mesh does not divide: ``PaddedArray``.

Its shape is a static part of the pytree, so a jitted call costs more than with a ``GlobalArray``.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, NoReturn, Self

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding

from gda.arrays.bits import as_unsigned
from gda.arrays.container import Container
from gda.arrays.dtypes import is_narrow
from gda.arrays.process_local import has_padding_for
from gda.layout.boundary import set_module
from gda.layout.grid import ShardGrid
from gda.layout.spec import Shape, check_shape, format_spec, partitions_of
from gda.mesh import (
    grid_of,
    is_tracer,
    named_sharding,
    own_settings,
)


@set_module("gda")
class PaddedArray(Container):
    """An array of any shape, sharded over a mesh; where the shape does not divide, it is padded.

    Blocks of a dimension that does not divide have ``ceil(size / ways)`` elements, the last ones
    fewer or none. Callbacks never see padding, and no shard, file, fingerprint or NumPy value has
    any. To compute, take ``array``, which has the padded shape, and keep the padding out of results
    with ``mask()`` or ``filled(value)``. There are no operators, because they would compute on the
    padding too. It is a pytree whose only leaf is ``array``: ``jax.jit``, ``jax.grad`` and
    optimisers take and return it.

    Args:
      array: a ``jax.Array`` of the padded shape, ``ShardGrid(shape, ..., pad=True).padded_shape``,
        such as the result of a computation. The constructors pad.
      shape: sizes without padding.

    >>> import gda, jax, jax.numpy as jnp, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('x',))
    >>> p = gda.PaddedArray.from_source(np.arange(10, dtype=np.float32), mesh, ['x'])
    >>> p.shape, p.padded_shape, p.local_shards[7].data.shape, p.mask().tolist()[9:11]
    ((10,), (16,), (0,), [True, False])
    >>> @jax.jit
    ... def mean(p):
    ...     return p.filled(0).sum() / p.size
    >>> float(mean(p))
    4.5
    """

    __slots__ = ("shape",)  # pyright: ignore[reportIncompatibleMethodOverride]

    array: jax.Array
    """The array with its padding, for computing."""

    shape: Shape
    """Sizes of the whole array without padding."""

    def __new__(cls, array: jax.Array | jax.ShapeDtypeStruct, shape: Iterable[int]) -> Self:
        # JAX's tree functions pass anything for the array, so nothing is checked here.
        self = object.__new__(cls)
        object.__setattr__(self, "array", array)
        # JAX passes back the tuple that it was given.
        object.__setattr__(self, "shape", shape if type(shape) is tuple else check_shape(shape))
        return self

    @classmethod
    def _from_leaf(cls, leaf: Any, shape: Any = None) -> Self:
        return cls(leaf, shape)

    @property
    def _shape_if_padded(self) -> Shape:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.shape

    # From data without padding.

    @classmethod
    def _padding(cls, fill: object) -> dict[str, Any]:
        return {"pad": True, "fill": 0 if fill is None else fill}

    # Its layout.

    @property
    def padded_shape(self) -> Shape:
        """Sizes of ``array``."""
        return self.array.shape

    @property
    def grid(self) -> ShardGrid:
        """The index math, ``pad=True``; ``ValueError`` if ``array`` has another padded shape."""
        sharding: Any = self.sharding
        grid = grid_of(self.shape, sharding.mesh, sharding.spec, True)
        if not has_padding_for(grid, self.array.shape):
            raise ValueError(
                f"the array of this PaddedArray has shape {self.array.shape}; {self.shape} sharded "
                f"by {format_spec(grid.spec)} over {dict(grid.mesh_shape)} has the padded shape "
                f"{grid.padded_shape}"
            )
        return grid

    # Computing.

    def mask(self) -> jax.Array:
        """Return True for elements and False for padding: a bool array that fits ``array``.

        Its size is 1 in dimensions without padding, so that it broadcasts; it is sharded as
        ``array`` is. Inside ``jit`` it is computed where it is used, and takes no memory.

        ``ValueError`` if ``array`` is a part of the padded array, as inside ``jax.shard_map``,
        ``jax.vmap`` and ``jax.lax.scan``.
        """
        shape, padded_shape = self.shape, self.padded_shape
        if (
            len(shape) != len(padded_shape)
            or any(map(operator.gt, shape, padded_shape))
            or (
                is_tracer(self.array)
                and AxisType.Manual in jax.typeof(self.array).sharding.mesh.axis_types
            )
        ):
            raise ValueError(
                f"this PaddedArray of shape {shape} holds a part of its array, of shape "
                f"{padded_shape}; into jax.shard_map, jax.vmap and jax.lax.scan pass p.array and "
                "p.mask() in its place"
            )
        sides = zip(shape, padded_shape, strict=True)
        sizes = tuple(padded if size != padded else 1 for size, padded in sides)
        try:
            sharding = self.sharding
        except TypeError:  # over Auto axes inside jit, where XLA decides
            return _mask(shape, sizes, None)
        mesh, spec = sharding.mesh, partitions_of(sharding.spec)
        entries = [entry if size > 1 else None for entry, size in zip(spec, sizes, strict=False)]
        sharding = named_sharding(sizes, mesh, entries)
        is_explicit = AxisType.Explicit in mesh.axis_types
        if is_tracer(self.array):
            return _mask(shape, sizes, sharding if is_explicit else None)
        with own_settings():
            return _mask_maker(shape, sizes, sharding, is_explicit)()

    def filled(self, value: jax.typing.ArrayLike) -> jax.Array:
        """Return ``array`` with its padding set to ``value``: 0 before a sum, -inf before a max."""
        array = self.array
        is_traced = is_tracer(array) or is_tracer(value)
        with own_settings():
            mask, dtype = self.mask(), jax.numpy.result_type(array, value)
            if is_traced or dtype != array.dtype or not is_narrow(dtype):
                return jax.numpy.where(mask, array, value)
            # XLA changes narrow NaNs on CPU. Bits have no gradients, so not in a trace.
            value = as_unsigned(jax.numpy.asarray(value, dtype))
            bits = jax.numpy.where(mask, as_unsigned(array), value)
            return jax.lax.bitcast_convert_type(bits, dtype)

    # As a Python object.

    def __eq__(self, other: object) -> bool:
        # jax.tree.map(lambda x: x.sharding, tree) puts shardings into containers, and such trees
        # are compared.
        if not self._is_inert:
            _refuse_operator()
        return isinstance(other, PaddedArray) and (self.array, self.shape) == (
            other.array,
            other.shape,
        )

    __array_priority__ = 200  # so that `numpy_array + p` raises, and does not compute on the host


def _refuse_operator(*_: object) -> NoReturn:
    raise TypeError(
        "a PaddedArray has no operators, which would compute on its padding too; use p.array, or "
        "p.filled(value), which sets the padding"
    )


# NumPy would answer `p + numpy_array` on the host, and Python that any object is true.
for _name in (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
    *("and", "or", "xor", "bool"),
):
    setattr(PaddedArray, f"__{_name}__", _refuse_operator)


def _mask(shape: Shape, sizes: Shape, sharding: NamedSharding | None) -> jax.Array:
    mask = jax.numpy.ones((1,) * len(shape), bool)
    for dimension, (size, padded) in enumerate(zip(shape, sizes, strict=True)):
        if padded > 1:
            kind = np.int32 if padded < 2**31 else np.int64
            with jax.enable_x64(True):
                place = jax.lax.broadcasted_iota(kind, sizes, dimension, out_sharding=sharding)
                is_element = place < kind(size)
            mask = mask & is_element
    return mask


@lru_cache(maxsize=256)
def _mask_maker(
    shape: Shape, sizes: Shape, sharding: NamedSharding, is_explicit: bool
) -> Callable[[], jax.Array]:
    make = partial(_mask, shape, sizes, sharding if is_explicit else None)
    return jax.jit(make, out_shardings=sharding)


jax.tree_util.register_dataclass(PaddedArray, data_fields=["array"], meta_fields=["shape"])
jax.export.register_pytree_node_serialization(
    PaddedArray,
    serialized_name="gda.PaddedArray",
    serialize_auxdata=lambda static: json.dumps(static, default=operator.index).encode(),
    deserialize_auxdata=lambda text: tuple(map(tuple, json.loads(text))),
    from_children=lambda aux_data, children: PaddedArray(*children, *aux_data),
)
