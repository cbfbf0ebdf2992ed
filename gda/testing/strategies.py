"""Hypothesis strategies for meshes, specs, shapes that fit them, and ``GlobalArray``s.

They are for any test suite, like ``hypothesis.extra.numpy``. Everything shrinks to a small,
readable case: few axes, few devices in order, short specs, blocks of one element.

>>> import numpy as np
>>> from hypothesis import given, settings
>>> from gda.testing.strategies import global_arrays
>>> @settings(max_examples=20, deadline=None)
... @given(global_arrays())
... def test_every_shard_is_a_part_of_the_whole(g):
...     for shard in g.addressable_shards:
...         np.testing.assert_array_equal(shard.data, np.asarray(g)[shard.index])
>>> test_every_shard_is_a_part_of_the_whole()

``sharded_cases(mesh_shapes(max_devices=4096))`` makes cases without devices, for code that only
plans. A strategy uses devices when it draws its first example, so a test module may make strategies
before JAX is set up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import AxisType, Mesh, PartitionSpec

from gda.arrays.global_array import GlobalArray
from gda.layout.grid import ShardGrid
from gda.layout.spec import (
    Shape,
    SpecEntry,
    axes_by_dimension,
    check_mesh_shape,
    format_spec,
)

__all__ = [  # noqa: RUF022
    "global_arrays",
    "sharded_cases",
    "ShardedCase",
    "meshes",
    "mesh_shapes",
    "partition_specs",
]

MeshShape = Mapping[str, int]
MeshT = TypeVar("MeshT", bound=Mesh | MeshShape)

_AXIS_NAMES = ("x", "y", "z")
_DTYPES = ("float32", "int32", "bool", "complex64", "uint8", "bfloat16")
_MAX_DIMS = 3
_MAX_BLOCK_SIDE = 3


def __dir__() -> list[str]:
    return list(__all__)


@dataclass(frozen=True, repr=False)
class ShardedCase(Generic[MeshT]):
    """A global shape, a mesh, and a spec that shards the shape over it.

    Attributes:
      global_shape: sizes of the whole array; every dimension is divided by its mesh axes.
      mesh: a ``jax.sharding.Mesh``, or a dict from axis name to size without devices.
      spec: ``PartitionSpec`` with at most one entry per dimension.

    >>> case = ShardedCase((8, 2), {'x': 4, 'y': 2}, PartitionSpec('x'))
    >>> case
    ShardedCase((8, 2), {'x': 4, 'y': 2}, P('x'))
    >>> case.grid.shard_shape
    (2, 2)
    """

    global_shape: Shape
    mesh: MeshT
    spec: PartitionSpec

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Size of each mesh axis by name, in mesh order."""
        return _mesh_shape_of(self.mesh)

    @property
    def grid(self) -> ShardGrid:
        """The elements that every device holds."""
        return ShardGrid(self.global_shape, self.mesh_shape, self.spec)

    def __repr__(self) -> str:
        mesh = _format_mesh(self.mesh) if isinstance(self.mesh, Mesh) else self.mesh_shape
        return f"ShardedCase({self.global_shape}, {mesh}, {format_spec(self.spec)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # Hypothesis and IPython ask for this; else they print the fields of a dataclass, and a mesh
        # without the order of its devices.
        printer.text(repr(self))


def mesh_shapes(
    *, max_devices: int = 8, axis_names: Sequence[str] = _AXIS_NAMES
) -> st.SearchStrategy[dict[str, int]]:
    """Return a strategy for mesh shapes: dicts from axis name to size, in mesh order.

    Args:
      max_devices: the product of the sizes is at most this.
      axis_names: names of the axes, as many as a mesh may have; one of two has the first two.

    Shrinks to fewer and smaller axes, down to ``{'x': 1}``.

    Raises:
      ValueError: no mesh shape fits all of these.

    >>> from hypothesis import find
    >>> find(mesh_shapes(), lambda shape: len(shape) == 2 and shape['y'] > 1)
    {'x': 1, 'y': 2}
    """
    names = tuple(axis_names)
    if not names or max_devices < 1:
        raise ValueError(f"no mesh has the axes {names} and at most {max_devices} devices")
    return _mesh_shapes(names, max_devices)


# Here and not inside the functions: to compose a strategy takes longer than a draw from it.
@st.composite
def _mesh_shapes(draw: st.DrawFn, names: tuple[str, ...], max_devices: int) -> dict[str, int]:
    sizes: list[int] = []
    while not sizes or (_more(draw) and len(sizes) < len(names)):
        most = max_devices // math.prod(sizes)
        # Often small: one large axis would leave only axes of size 1 for the others.
        if not draw(st.booleans()):
            most = min(most, 3)
        sizes.append(draw(st.integers(1, most)))
    return dict(zip(names, sizes, strict=False))


@st.composite
def _meshes(draw: st.DrawFn) -> Mesh:
    available = jax.devices()
    shape = draw(mesh_shapes(max_devices=len(available)))
    if draw(st.booleans()):
        available = draw(st.permutations(available))
    num_devices = math.prod(shape.values())
    chosen = np.empty(num_devices, object)
    chosen[:] = available[:num_devices]
    kind = draw(st.sampled_from((AxisType.Auto, AxisType.Explicit)))
    return Mesh(
        chosen.reshape(tuple(shape.values())), tuple(shape), axis_types=(kind,) * len(shape)
    )


def meshes() -> st.SearchStrategy[Mesh]:
    """Return a strategy for ``jax.sharding.Mesh``es over any of ``jax.devices()``, in any order.

    All axes of one mesh are Auto, or all are Explicit.

    Shrinks to small meshes of Auto axes over the first devices, in order.

    >>> from hypothesis import find
    >>> find(meshes(), lambda mesh: mesh.size == 4).devices.shape
    (4,)
    """
    return _meshes()


def partition_specs(
    mesh: Mesh | MeshShape, *, max_entries: int = _MAX_DIMS
) -> st.SearchStrategy[PartitionSpec]:
    """Return a strategy for the specs of a mesh.

    Entries are ``None``, an axis name, or a tuple of names in any order. There are specs with
    trailing ``None``s, and axes that no entry uses.

    Args:
      mesh: a mesh, or a mapping from axis name to size, in mesh order.
      max_entries: longest spec.

    Shrinks to fewer entries, ``None`` before names, names before tuples, and tuples in the order
    of the mesh: down to ``P()``.

    >>> from hypothesis import find
    >>> spec = find(partition_specs({'x': 4, 'y': 2}), lambda spec: 'y' in spec)
    >>> spec == PartitionSpec('y')
    True
    """
    return _partition_specs(tuple(_mesh_shape_of(mesh)), max_entries)


@st.composite
def _partition_specs(
    draw: st.DrawFn, axis_names: tuple[str, ...], max_entries: int
) -> PartitionSpec:
    trailing = draw(st.sampled_from((0, 0, 1, 2)))
    names_of: list[list[str]] = [[] for _ in range(max_entries)]
    used = set()
    while _more(draw) and names_of and axis_names:
        # Not sampled_from, which draws nothing from a single choice: see _more. A used name is
        # skipped for the same reason: later draws do not depend on it.
        name = axis_names[draw(st.integers(0, len(axis_names) - 1))]
        dimension = draw(st.integers(0, max_entries - 1))
        if name not in used:
            names_of[dimension].append(name)
            used.add(name)
    while names_of and not names_of[-1]:
        names_of.pop()
    entries: list[SpecEntry] = [
        names[0] if len(names) == 1 else (tuple(names) or None) for names in names_of
    ]
    entries += [None] * min(trailing, max_entries - len(entries))
    return PartitionSpec(*entries)


@st.composite
def _global_shapes(
    draw: st.DrawFn, mesh_shape: dict[str, int], spec: PartitionSpec, max_dims: int
) -> Shape:
    """Draw a shape that the spec divides, with blocks of at most 3 elements along a dimension."""
    axes = axes_by_dimension(tuple(spec), len(spec), mesh_shape)
    num_dims = draw(st.integers(len(axes), max_dims))
    shape = []
    for names in axes + ((),) * (num_dims - len(axes)):
        block_side = draw(st.integers(1, _MAX_BLOCK_SIDE))
        # Rarely, because one empty dimension hides everything about the others.
        is_empty = draw(st.integers(0, 15)) == 15
        shape.append(0 if is_empty else block_side * math.prod(mesh_shape[each] for each in names))
    return tuple(shape)


def sharded_cases(
    mesh: st.SearchStrategy[MeshT] | None = None, *, max_dims: int = _MAX_DIMS
) -> st.SearchStrategy[ShardedCase[Any]]:
    """Return a strategy for a mesh, a spec of it and a global shape that it shards evenly.

    Args:
      mesh: a strategy for meshes or mesh shapes; by default ``meshes()``. With ``mesh_shapes()``
        the cases need no devices.
      max_dims: most dimensions. Now and then one has the size 0; else blocks have 1 to 3 elements
        along each.

    Shrinks to few devices in order, a short spec and blocks of a single element.

    >>> from hypothesis import find
    >>> find(sharded_cases(), lambda case: case.grid.num_shards > 1)
    ShardedCase((2,), Mesh({'x': 2}), P('x'))
    >>> find(sharded_cases(mesh_shapes(max_devices=512)), lambda case: case.grid.num_shards > 1)
    ShardedCase((2,), {'x': 2}, P('x'))
    """
    drawn: st.SearchStrategy[Any] = meshes() if mesh is None else mesh

    @st.composite
    def cases(draw: st.DrawFn) -> ShardedCase[Any]:
        over = draw(drawn)
        spec = draw(partition_specs(over, max_entries=max_dims))
        shape = draw(_global_shapes(_mesh_shape_of(over), spec, max_dims))
        return ShardedCase(shape, over, spec)

    return cases()


def global_arrays() -> st.SearchStrategy[GlobalArray]:
    """Return a strategy for ``GlobalArray``s with content, of the cases of ``sharded_cases()``.

    The dtype is float32, int32, bool, complex64, uint8 or bfloat16; values may be NaN. A failing
    example is printed with the order of its devices and the content of the whole array.

    Shrinks to a small case, float32, full of zeros.

    >>> from hypothesis import find
    >>> g = find(global_arrays(), lambda g: g.size == 2)
    >>> g.dtype.name, np.asarray(g).ravel().tolist()
    ('float32', [0.0, 0.0])
    """
    return _global_arrays()


@st.composite
def _global_arrays(draw: st.DrawFn) -> GlobalArray:
    case = draw(sharded_cases())
    dtype = np.dtype(draw(st.sampled_from(_DTYPES)))
    if dtype.isbuiltin == 1:
        data = draw(hnp.arrays(dtype, case.global_shape))
    else:  # hypothesis draws no values for the dtypes that ml_dtypes adds to NumPy
        values = hnp.arrays(np.float32, case.global_shape, elements=st.floats(width=16))
        data = draw(values).astype(dtype)
    # The repr of a GlobalArray never moves data, so it omits the values of a failing example.
    note(f"GlobalArray of {case} with {data!r}")
    return GlobalArray.from_callback(case.global_shape, case.mesh, case.spec, data.__getitem__)


def _more(draw: st.DrawFn) -> bool:
    """Draw a yes, two times of three, or a no; shrinks to no.

    Call it before every part and once more at the end. Then a part is a run of draws, which
    shrinking can remove without a change of the other draws.
    """
    return draw(st.integers(0, 2)) > 0


def _mesh_shape_of(mesh: Mesh | MeshShape) -> dict[str, int]:
    return check_mesh_shape(mesh.shape if isinstance(mesh, Mesh) else mesh)


def _format_mesh(mesh: Mesh) -> str:
    """Return a mesh as text; JAX's own repr omits the order of the devices."""
    text = [str(dict(mesh.shape))]
    ids = [device.id for device in mesh.devices.flat]
    if ids != list(range(len(ids))):
        text.append(f"devices={ids}")
    kinds = {kind.name for kind in mesh.axis_types}
    if kinds != {"Auto"}:
        text.append(f"axis_types={' and '.join(sorted(kinds))}")
    return f"Mesh({', '.join(text)})"
