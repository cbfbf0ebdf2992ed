"""The layout of each array of a tree: as a table, in a golden file, and as an assertion."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from gda.arrays.padded_array import PaddedArray
from gda.layout.boundary import public, set_module
from gda.layout.dtype_names import packed_nbytes
from gda.layout.grid import ShardGrid, better_spec
from gda.layout.spec import Shape, SpecEntry, format_layout, format_spec
from gda.layout.text import (
    counted,
    format_bytes,
    format_mesh,
    format_more,
    printable,
    typed_shape,
)
from gda.mesh import is_on_host, is_tracer, memory_kind_of, mesh_grid, sharding_of
from gda.show.array_table import ROWS_SHOWN, array_table
from gda.show.report import Report, Table
from gda.storage.golden_files import check_golden
from gda.trees.leaves import Tree, held_by, is_container, names_of, with_paths
from gda.trees.name_ranges import alike_in_ranges, counted_name

_ARRAYS = (jax.ShapeDtypeStruct, np.ndarray, jax.Array, jax.Ref)


@set_module("gda")
@public
def layouts(tree: Tree) -> Layouts:
    """Return the layout of each array of a tree, those with most bytes on a device first.

    It reads no data, needs no device and never communicates, so that a rule of specs is checked
    before anything is allocated.

    Args:
      tree: a pytree of ``jax.Array``s, ``GlobalArray``s, ``PaddedArray``s and
        ``jax.ShapeDtypeStruct``s. NumPy arrays, and shapes without a sharding, are listed with all
        their bytes on each device that gets them. Numbers and other leaves are ignored.

    Raises:
      ValueError: a sharding does not fit its shape; with a note of the path.
      TypeError: the tree is a function, such as that which makes the arrays.
      LayoutUnknownError: an array is being traced over Auto axes.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> w = jax.ShapeDtypeStruct((1024, 64), np.float32, sharding=NamedSharding(mesh, P('x')))
    >>> b = jax.ShapeDtypeStruct((64,), np.float32, sharding=NamedSharding(mesh, P()))
    >>> print(gda.layouts({'w': w, 'b': b, 'step': 3}))
    256.2 KiB in 2 arrays, 64.2 KiB on each device; mesh x=4,y=2
    <BLANKLINE>
    array                    spec    replicas  per device
    w      float32[1024,64]  P('x')         2    64.0 KiB
    b      float32[64]       P()            8       256 B
    """
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_container)[0]
    of_each = with_paths(tree, partial(_layout_of, cache(_facts_of)), *zip(*found, strict=True))
    rows = [row for row in of_each if row is not None]
    if not rows and callable(tree):
        raise TypeError(
            f"expected a tree of arrays, not the function {tree!r:.80}; pass the shapes of its "
            "result, jax.eval_shape(function, ...)"
        )
    return Layouts(tuple(sorted(rows, key=lambda row: -row.nbytes_per_device)))


@set_module("gda")
@public
def assert_sharded(tree: Tree, *, max_replicated_bytes: int = 2**20) -> None:
    """Fail if large arrays of a tree lie whole on every device. For tests, and before a run.

    An array on one device, and one without a sharding, is whole too, if the meshes of the tree
    have more devices, or those of the program in a tree without any mesh. It reads no data and
    never communicates.

    Args:
      tree: as for ``layouts``: arrays, or shapes with shardings, before anything is allocated.
      max_replicated_bytes: the most bytes of an array that may be whole on every device.

    Raises:
      AssertionError: there are such arrays; the message has their paths, bytes and layouts, and a
        spec that would shard them.
      ValueError, TypeError, LayoutUnknownError: as ``layouts``.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> shapes = [jax.ShapeDtypeStruct((1024, 1024), np.float32) for _ in range(3)]
    >>> gda.assert_sharded(gda.abstract(shapes, mesh, P('x', 'y')))
    >>> gda.assert_sharded(gda.abstract(shapes, mesh, [P('x'), P(), P()]))
    Traceback (most recent call last):
        ...
    AssertionError: 2 arrays of more than 1.0 MiB are not sharded over the 8 devices:
      1-2 (x2): float32[1024,1024], 4.0 MiB, P() on x=4,y=2; P('x', 'y') would leave 512.0 KiB
    shard them, or pass max_replicated_bytes= if they are to be whole on every device
    """
    found = layouts(tree)
    sizes = [row.num_devices for row in found.arrays if row.mesh is not None]
    num_devices = max(sizes) if sizes else jax.device_count()
    whole = [row for row in found.arrays if row.is_whole and row.nbytes > max_replicated_bytes]
    if num_devices == 1 or not whole:
        return
    lines = [f"  {row.title}: {_of_whole(row.first, found.mesh)}" for row in _rows_of(whole)]
    more = [f"  {format_more(len(lines) - ROWS_SHOWN)}"] if len(lines) > ROWS_SHOWN else []
    first = (
        f"{counted(len(whole), 'array')} of more than {format_bytes(max_replicated_bytes)} "
        f"{'is' if len(whole) == 1 else 'are'} not sharded over the {num_devices:,} devices:"
    )
    last = "shard them, or pass max_replicated_bytes= if they are to be whole on every device"
    raise AssertionError("\n".join([first, *lines[:ROWS_SHOWN], *more, last]))


def _of_whole(row: ArrayLayout, mesh: Mapping[str, int] | None) -> str:
    """Return the words for an array that is whole, with a better spec on its mesh or another."""
    text = f"{row.kind}, {format_bytes(row.nbytes)}, {row.layout}"
    if (on := row.mesh or mesh) is None:
        return text
    spec = better_spec(ShardGrid(row.shape, on, (), pad=True))
    if not spec:
        return f"{text}; no axis divides its sizes, but gda.PaddedArray pads them"
    nbytes = row.nbytes // ShardGrid(row.shape, on, spec).num_shards
    return f"{text}; {printable(format_spec(spec))} would leave {format_bytes(nbytes)}"


@set_module("gda")
class ArrayLayout(NamedTuple):
    """The layout of one array of a tree.

    Attributes:
      path: its path, such as ``'layers/0/weight'``, as functions of specs get it.
      shape: of the elements; of a ``PaddedArray`` without padding.
      dtype: the name of the dtype.
      mesh: sizes of the axes by name, in mesh order; None for an array without a mesh.
      spec: the spec in its shortest form; None for an array without a mesh.
      block_shape: the shape of the block on each device, with padding.
      num_devices: the devices of the mesh, 1 for an array on one device, 0 without a sharding.
      num_replicas: the devices that hold each block.
      nbytes: bytes of the array once, without padding; of types below a byte as devices pack them,
        so that two elements of int4 take one.
      nbytes_per_device: bytes of the block on each device, with padding.
      memory_kind: the kind of memory; None for the default of the devices.

    >>> import gda, jax, numpy as np
    >>> row = gda.layouts({'w': jax.ShapeDtypeStruct((8, 2), np.float32)}).arrays[0]
    >>> row.path, row.layout, row.nbytes_per_device, row.is_whole
    ('w', 'no sharding', 64, True)
    """

    path: str
    shape: Shape
    dtype: str
    mesh: dict[str, int] | None
    spec: tuple[SpecEntry, ...] | None
    block_shape: Shape
    num_devices: int
    num_replicas: int
    nbytes: int
    nbytes_per_device: int
    memory_kind: str | None

    @property
    def is_whole(self) -> bool:
        """True if each of its devices holds all elements."""
        return self.num_replicas == self.num_devices

    @property
    def kind(self) -> str:
        """Dtype and shape, as XLA writes them."""
        return typed_shape(self.dtype, self.shape)

    @property
    def layout(self) -> str:
        """The spec and the mesh as text, with the kind of memory."""
        if self.mesh is None or self.spec is None:
            text = counted(self.num_devices, "device") if self.num_devices else "no sharding"
        else:
            text = format_layout(self.spec, self.mesh)
        return text if self.memory_kind is None else f"{text}, {self.memory_kind}"


@dataclass(frozen=True)
class _LayoutRow:
    """Arrays of one shape, dtype and layout whose paths differ only in numbers."""

    path: str
    count: int
    first: ArrayLayout

    @property
    def title(self) -> str:
        return counted_name(self.path or "the array", self.count)

    @property
    def nbytes_per_device(self) -> int:
        return self.count * self.first.nbytes_per_device


@set_module("gda")
@dataclass(frozen=True, repr=False)
class Layouts(Report):
    """The layouts of the arrays of a tree, those with most bytes on a device first.

    ``gda.layouts`` makes it; ``print`` and notebooks show it as a table.

    Attributes:
      arrays: the layout of each array; of equal size, in the order of the tree.

    >>> import gda, jax.numpy as jnp
    >>> found = gda.layouts({'w': jnp.zeros((1024, 2)), 'b': jnp.zeros(2)})
    >>> [row.path for row in found.arrays], found.nbytes
    (['w', 'b'], 8200)
    """

    arrays: tuple[ArrayLayout, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays once, without padding."""
        return sum(row.nbytes for row in self.arrays)

    @property
    def nbytes_per_device(self) -> int:
        """Bytes on a device that has a block of each array, with padding, without the host's."""
        return sum(row.nbytes_per_device for row in self.arrays if not is_on_host(row.memory_kind))

    @property
    def nbytes_on_host(self) -> int:
        """Bytes of the blocks of one device that are in the memory of its host."""
        return sum(row.nbytes_per_device for row in self.arrays if is_on_host(row.memory_kind))

    @property
    def mesh(self) -> dict[str, int] | None:
        """The mesh of all arrays that have one; None if there is none, or several."""
        known = {format_mesh(row.mesh): row.mesh for row in self.arrays if row.mesh is not None}
        return known.popitem()[1] if len(known) == 1 else None

    @property
    def headline(self) -> str:
        """The sums, in words."""
        on = f"; mesh {format_mesh(self.mesh)}" if self.mesh else ""
        if self.nbytes_on_host:
            on = f", {format_bytes(self.nbytes_on_host)} on its host{on}"
        return (
            f"{format_bytes(self.nbytes)} in {counted(len(self.arrays), 'array')}, "
            f"{format_bytes(self.nbytes_per_device)} on each device{on}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dicts, tuples, strings and numbers, for JSON."""
        return {
            "nbytes": self.nbytes,
            "nbytes_per_device": self.nbytes_per_device,
            "nbytes_on_host": self.nbytes_on_host,
            "arrays": [row._asdict() for row in self.arrays],
        }

    @public
    def check(self, path: str | os.PathLike[str]) -> None:
        """Compare shape, dtype and layout of each array with a golden file. For tests.

        ``pytest --gda-update-golden`` writes the file; without pytest, the environment variable
        ``GDA_UPDATE_GOLDEN=1`` does.

        Args:
          path: the golden file, a JSON document.

        Raises:
          AssertionError: the tree has other arrays or layouts; the message has the differences.
          FileNotFoundError: there is no golden file.
          ValueError: the file is not a golden file, or two arrays have one path.

        >>> import gda, jax.numpy as jnp, os, tempfile
        >>> found = gda.layouts({'w': jnp.zeros((8, 2))})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     os.environ['GDA_UPDATE_GOLDEN'] = '1'
        ...     found.check(folder + '/layout.json')  # writes it
        ...     del os.environ['GDA_UPDATE_GOLDEN']
        ...     found.check(folder + '/layout.json')  # compares
        """
        found: dict[str, str] = {}
        for row in self.arrays:
            if row.path in found:
                raise ValueError(
                    f"two arrays of the tree have the path {row.path!r}, by which a file tells "
                    "them apart; a key must not have a slash"
                )
            found[row.path] = f"{row.kind} {row.layout}"
        document = {"arrays": dict(sorted(found.items()))}
        check_golden("the layout", document, Path(path), _differences)

    def _parts(self) -> list[str | Table]:
        table = _table_of(_rows_of(self.arrays), self.mesh)
        return [self.headline, "", *table] if table else [self.headline]


def _rows_of(arrays: Iterable[ArrayLayout]) -> list[_LayoutRow]:
    known = {(row.path, (row.kind, row.layout)): row for row in arrays}
    rows = [
        _LayoutRow(path, len(names), known[names[0], of])
        for path, names, of in alike_in_ranges(known)
    ]
    return sorted(rows, key=lambda row: -row.nbytes_per_device)


def _table_of(rows: Sequence[_LayoutRow], mesh: Mapping[str, int] | None) -> list[str | Table]:
    """Return a table; if all arrays with a mesh share ``mesh``, a spec is enough for a layout."""
    on_mesh = f" on {format_mesh(mesh)}" if mesh else ""

    def cells(row: _LayoutRow) -> list[str]:
        first = row.first
        layout, replicas = first.layout.removesuffix(on_mesh), f"{first.num_replicas:,}"
        return [row.title, first.kind, layout, replicas, format_bytes(row.nbytes_per_device)]

    header = ["array", "", "spec" if mesh else "layout", "replicas", "per device"]
    return array_table(header, rows, cells, lambda row: row.nbytes_per_device)


# The layout of one leaf, and the differences between two files.


def _layout_of(facts_of: Callable[..., dict[str, Any]], keys: Any, leaf: Any) -> ArrayLayout | None:
    array = held_by(leaf)
    if not isinstance(array, _ARRAYS):
        return None
    sharding = sharding_of(array) if is_tracer(array) else getattr(array, "sharding", None)
    facts = facts_of(sharding, leaf.shape, array.dtype, isinstance(leaf, PaddedArray))
    return ArrayLayout(path="/".join(names_of(keys)), **facts)


def _facts_of(sharding: Any, shape: Shape, dtype: Any, is_padded: bool) -> dict[str, Any]:
    """Return the fields of a layout without its path; ``shape`` is without padding."""
    mesh = spec = None
    block_shape, num_devices, num_replicas = shape, 0, 0
    if isinstance(sharding, NamedSharding):
        grid = mesh_grid(shape, sharding, pad=is_padded)
        mesh, spec, block_shape = dict(grid.mesh_shape), grid.spec, grid.shard_shape
        num_devices, num_replicas = grid.num_devices, grid.num_replicas
    elif sharding is not None:
        block_shape, num_devices = sharding.shard_shape(shape), len(sharding.device_set)
        blocks = [-(-n // max(1, step)) for n, step in zip(shape, block_shape, strict=True)]
        num_replicas = num_devices // max(1, math.prod(blocks))
    return {
        "shape": shape,
        "dtype": str(dtype),
        "mesh": mesh,
        "spec": spec,
        "block_shape": block_shape,
        "num_devices": num_devices,
        "num_replicas": num_replicas,
        "nbytes": packed_nbytes(math.prod(shape), dtype),
        "nbytes_per_device": packed_nbytes(math.prod(block_shape), dtype),
        "memory_kind": None if sharding is None else memory_kind_of(sharding),
    }


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each difference between two golden documents."""
    old, new = before["arrays"], after["arrays"]
    pairs = ((path, (old.get(path), new.get(path))) for path in {**old, **new})
    changed = ((path, pair) for path, pair in pairs if pair[0] != pair[1])
    for path, _, (was, now) in alike_in_ranges(changed):
        if was is None or now is None:
            yield f"{path} is {'gone' if now is None else 'new'}: {was or now}"
        else:
            yield f"{path}: {now}, not {was}"
