"""The subject of a picture: a grid, with facts about the array and the devices.

This module knows arrays, shardings and meshes by their attributes and does not import JAX, so that
a plan can be drawn without it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gda.layout.dtype_names import as_dtype, packed_nbytes
from gda.layout.grid import ShardGrid
from gda.layout.numbering import IntArray, read_only
from gda.layout.spec import Shape, SpecLike, axes_by_dimension, format_spec, integers
from gda.layout.text import format_mesh, printable


@dataclass(frozen=True, eq=False)
class Subject:
    """A grid to be shown, without control characters in its texts.

    Attributes:
      grid: the layout of the array. Without ``process_of`` all devices count as of one process.
      device_kind: the word before the number of a device: the platform, such as ``'TPU'``, or
        ``'device'`` if devices are numbered by their place in the mesh.
      device_ids: the numbers in device order; None if they are the places in the mesh.
    """

    grid: ShardGrid
    _: KW_ONLY
    dtype: np.dtype[Any] | None = None
    device_kind: str = "device"
    device_ids: IntArray | None = None
    kind: str = "ShardGrid"
    memory_kind: str | None = None  # None for the default of the devices

    @property
    def shape(self) -> Shape:
        return self.grid.global_shape

    @property
    def has_padding(self) -> bool:
        return math.prod(self.grid.padded_shape) > math.prod(self.shape)

    @property
    def mesh(self) -> str:
        """The sizes of its axes: ``x=4,y=2``."""
        return format_mesh(self.grid.mesh_shape)

    @property
    def spec(self) -> str:
        """The spec as a user writes it: ``P('x', None)``."""
        return printable(format_spec(self.grid.spec))

    def axes_of(self, dimension: int) -> list[tuple[str, int]]:
        """Return the names and sizes of the mesh axes that shard a dimension."""
        mesh_shape = self.grid.mesh_shape
        names = axes_by_dimension(self.grid.spec, len(self.shape), mesh_shape)[dimension]
        return [(printable(name), mesh_shape[name]) for name in names]

    @property
    def block_bytes(self) -> int | None:
        """Bytes of one block, which are the bytes on one device; None without a dtype."""
        if self.dtype is None:
            return None
        return packed_nbytes(math.prod(self.grid.shard_shape), self.dtype)

    @cached_property
    def holders(self) -> IntArray:
        """Positions of the devices that hold each block: int64 ``[num_shards, num_replicas]``."""
        order = np.argsort(self.grid.block_ids, kind="stable")
        return read_only(order.reshape(self.grid.num_shards, self.grid.num_replicas))

    @cached_property
    def owners(self) -> IntArray:
        """Process of each of ``holders``; all 0 if the grid has no process numbers."""
        process_of = self.grid.process_of
        if process_of is None:
            return read_only(np.zeros_like(self.holders))
        return read_only(process_of[self.holders])

    def numbers(self, positions: IntArray) -> IntArray:
        """Return the numbers of the devices at these positions."""
        return positions if self.device_ids is None else self.device_ids[positions]


def subject_of(
    x: object,
    mesh: object = None,
    spec: SpecLike | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Subject:
    """Return the subject of a picture of ``x``, for which the arguments are as for ``text``."""
    if isinstance(x, Sequence) and not isinstance(x, str | bytes):
        return _plan(_check_shape(x), mesh, spec, dtype)
    if mesh is not None or spec is not None or (dtype is not None and not isinstance(x, ShardGrid)):
        raise TypeError(
            "mesh, spec and dtype go with a shape, a sequence of integers such as (8, 2); this "
            f"{type(x).__name__} has its own"
        )
    if isinstance(x, ShardGrid):
        return Subject(x, dtype=_dtype(dtype))
    return x if isinstance(x, Subject) else _subject_of_array(x)


def _check_shape(x: Sequence[Any]) -> Shape:
    try:
        return integers(x)
    except TypeError:
        raise _refusal(x) from None


def _refusal(x: Any) -> TypeError:
    """Return the error for a value without a picture, which it does not show: it may be data."""
    return TypeError(
        "there is a picture of a GlobalArray, a PaddedArray, a ShardGrid, a jax.Array or a "
        "jax.ShapeDtypeStruct with a NamedSharding, and a shape with its mesh and spec, not of "
        f"this {type(x).__name__}; for a tree: jax.tree.map(gda.show, tree)"
    )


def _plan(shape: Shape, mesh: Any, spec: SpecLike | None, dtype: npt.DTypeLike | None) -> Subject:
    if spec is None and hasattr(mesh, "mesh") and hasattr(mesh, "spec"):
        mesh, spec = mesh.mesh, mesh.spec
    if spec is None or (not isinstance(mesh, Mapping) and not hasattr(mesh, "shape")):
        raise TypeError(
            f"a shape such as {shape} is shown with its mesh, a jax.sharding.Mesh or the sizes of "
            f"its axes by name, and its spec: gda.show({shape}, mesh, PartitionSpec('x'))"
        )
    mesh_shape = mesh if isinstance(mesh, Mapping) else mesh.shape
    devices = _devices_of(mesh)
    grid = ShardGrid(shape, mesh_shape, spec, process_of=_process_of(devices))
    return Subject(grid, dtype=_dtype(dtype), kind="plan", **_names_of(devices))


def _subject_of_array(x: Any) -> Subject:
    kind = type(x).__name__
    is_padded = kind == "PaddedArray"
    array = x.array if kind == "GlobalArray" or is_padded else x
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"this {kind} is being traced, so that its layout may not be known yet; JAX tells it "
            "when it compiles: jax.debug.inspect_array_sharding(x, callback=lambda s: "
            "gda.show(x.shape, s))"
        )
    if getattr(array, "sharding", None) is None:
        raise _refusal(x)
    kind = kind if kind in ("GlobalArray", "PaddedArray", "ShapeDtypeStruct") else "jax.Array"
    sharding, mesh = x.sharding, getattr(x.sharding, "mesh", None)
    if mesh is not None and hasattr(sharding, "spec"):
        mesh_shape, spec, devices = mesh.shape, sharding.spec, _devices_of(mesh)
    elif len(getattr(sharding, "device_set", ())) == 1:
        mesh_shape, spec, devices = {}, (), list(sharding.device_set)
    else:
        raise _refusal(x)
    process_of = _process_of(devices)
    grid = ShardGrid(x.shape, mesh_shape, spec, pad=is_padded, process_of=process_of)
    memory = _memory_of(sharding, devices)
    return Subject(grid, dtype=x.dtype, kind=kind, memory_kind=memory, **_names_of(devices))


def _devices_of(mesh: Any) -> list[Any]:
    """Return the devices of a mesh in device order; none for a mesh that is only a shape."""
    try:
        return list(mesh.devices.flat)
    except (AttributeError, ValueError):  # of a mapping, and JAX's for an AbstractMesh
        return []


def _process_of(devices: Sequence[Any]) -> list[int] | None:
    return [device.process_index for device in devices] or None


def _names_of(devices: Sequence[Any]) -> dict[str, Any]:
    if not devices:
        return {}
    ids = np.array([device.id for device in devices], np.int64)
    return {"device_kind": devices[0].platform.upper(), "device_ids": read_only(ids)}


def _memory_of(sharding: Any, devices: Sequence[Any]) -> str | None:
    kind = getattr(sharding, "memory_kind", None)
    if kind is None:
        return None
    default = devices[0].default_memory().kind if devices else "device"
    return None if kind == default else str(kind)


def _dtype(dtype: Any) -> np.dtype[Any] | None:
    return None if dtype is None else as_dtype(dtype)
