"""What a picture shows: a grid, and what is known of the array and the devices.

Nothing here imports JAX: arrays, shardings and meshes are known by their attributes, so that a plan
is drawn where JAX is not wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gda.grid import ShardGrid
from gda.layout import IntArray, read_only
from gda.spec import Shape, SpecLike, format_spec


@dataclass(frozen=True, eq=False)
class Subject:
    """A grid to be shown.

    Attributes:
      grid: how the array is cut. Without ``process_of`` all devices count as of one process.
      dtype: of the array; None where it is not known, as of a bare grid.
      device_names: a name for each device, in device order, such as ``'TPU 3'``; None where devices
        are numbered by position only.
      kind: what it is of, such as ``'GlobalArray'``.
    """

    grid: ShardGrid
    _: KW_ONLY
    dtype: np.dtype[Any] | None = None
    device_names: tuple[str, ...] | None = None
    kind: str = "ShardGrid"

    @property
    def shape(self) -> Shape:
        return self.grid.global_shape

    @property
    def spec(self) -> str:
        """As a user writes it: ``P('x', None)``."""
        return format_spec(self.grid.spec)

    @property
    def block_bytes(self) -> int | None:
        """Bytes of one block, which are the bytes on one device; None without a dtype."""
        if self.dtype is None:
            return None
        return int(np.prod(self.grid.shard_shape, dtype=object)) * self.dtype.itemsize

    @cached_property
    def holders(self) -> IntArray:
        """Positions of the devices that hold each block: int64 ``[num_shards, num_replicas]``."""
        order = np.argsort(self.grid.block_ids, kind="stable")
        return read_only(order.reshape(self.grid.num_shards, self.grid.num_replicas))

    @cached_property
    def owners(self) -> IntArray:
        """Process of each of ``holders``; all 0 where the grid knows no processes."""
        process_of = self.grid.process_of
        if process_of is None:
            return read_only(np.zeros_like(self.holders))
        return read_only(process_of[self.holders])

    def device_name(self, position: int) -> str:
        return str(position) if self.device_names is None else self.device_names[position]


def subject_of(
    x: Any,
    mesh: Any = None,
    spec: SpecLike | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Subject:
    """Return what there is to show of ``x``.

    Args:
      x: a ``GlobalArray``, a ``jax.Array``, a ``jax.ShapeDtypeStruct`` with a sharding, a
        ``ShardGrid``, a ``Subject``, or a global shape that comes with ``mesh`` and ``spec``.
      mesh: a ``jax.sharding.Mesh`` or the sizes of its axes by name; for a shape only.
      spec: as for ``ShardGrid``; for a shape only.
      dtype: of the elements, for a shape or a grid.

    Raises:
      TypeError: it is none of these, or its sharding names no mesh and spec.
      ValueError: the spec does not go with the shape and the mesh.

    >>> subject_of((8, 2), {'x': 4, 'y': 2}, ('x',), dtype='float32').block_bytes
    16
    """
    is_shape = isinstance(x, Iterable) and not hasattr(x, "shape") and not isinstance(x, str)
    if is_shape:
        if mesh is None or spec is None:
            raise TypeError(f"a shape such as {x!r} is shown with its mesh and its spec")
        return Subject(_grid_on(x, mesh, spec), dtype=_dtype(dtype), **_names(mesh), kind="plan")
    if mesh is not None or spec is not None:
        raise TypeError(
            f"mesh and spec go with a shape; this {type(x).__name__} has its own, so leave them out"
        )
    if isinstance(x, Subject):
        return x
    if isinstance(x, ShardGrid):
        return Subject(x, dtype=_dtype(dtype))
    if dtype is not None:
        raise TypeError(f"dtype goes with a shape or a grid; this {type(x).__name__} has its own")
    return _subject_of_array(x)


def _subject_of_array(x: Any) -> Subject:
    sharding = getattr(x, "sharding", None)
    if sharding is None or not hasattr(x, "shape"):
        raise TypeError(
            "there is a picture of a GlobalArray, a jax.Array, a ShardGrid, or a shape with mesh= "
            f"and spec=, not of {type(x).__name__}; while an array is being traced, "
            "gda.visualize_sharding shows it"
        )
    kind = type(x).__name__
    kind = kind if kind in ("GlobalArray", "ShapeDtypeStruct") else "jax.Array"
    if hasattr(x, "is_deleted") and x.is_deleted():
        kind += " (deleted)"
    subject = subject_on(sharding, x.shape, x.dtype, kind)
    if subject is not None:
        return subject
    raise TypeError(
        f"this {type(x).__name__} has the sharding {sharding!r}, which names no mesh and spec; "
        "give it one with jax.device_put(array, NamedSharding(mesh, spec))"
    )


def subject_on(sharding: Any, shape: Shape, dtype: np.dtype[Any], kind: str) -> Subject | None:
    """Return what there is to show of a sharding; None if it names no mesh and spec."""
    mesh = getattr(sharding, "mesh", None)
    if mesh is not None and hasattr(sharding, "spec"):
        return Subject(_grid_on(shape, mesh, sharding.spec), dtype=dtype, **_names(mesh), kind=kind)
    if len(devices := getattr(sharding, "device_set", ())) == 1:
        (device,) = devices
        grid = ShardGrid(shape, {}, (), process_of=[device.process_index])
        return Subject(grid, dtype=dtype, device_names=(_name(device),), kind=kind)
    return None


def _grid_on(shape: Any, mesh: Any, spec: SpecLike) -> ShardGrid:
    if isinstance(mesh, Mapping):
        return ShardGrid(shape, mesh, spec)
    devices = _devices_of(mesh)
    if not devices:
        return ShardGrid(shape, mesh.shape, spec)
    return ShardGrid(shape, mesh.shape, spec, process_of=[d.process_index for d in devices])


def _names(mesh: Any) -> dict[str, tuple[str, ...] | None]:
    return {"device_names": tuple(map(_name, _devices_of(mesh))) or None}


def _devices_of(mesh: Any) -> list[Any]:
    """Return the devices of a mesh in device order; none of one that is only a shape."""
    try:
        return list(mesh.devices.flat)
    except (AttributeError, ValueError):  # of a mapping, and JAX's for an AbstractMesh
        return []


def _name(device: Any) -> str:
    return f"{device.platform.upper()} {device.id}"


def _dtype(dtype: npt.DTypeLike | None) -> np.dtype[Any] | None:
    if dtype is None:
        return None
    try:
        return np.dtype(dtype)
    except TypeError:
        import ml_dtypes  # not before, as it takes time

        small = getattr(ml_dtypes, dtype, None) if isinstance(dtype, str) else None
        if not isinstance(small, type):
            raise TypeError(
                f"dtype={dtype!r} is no type of elements; give one such as 'float32' or 'bfloat16'"
            ) from None
        return np.dtype(small)
