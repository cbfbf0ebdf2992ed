"""The index math: the elements of an array that each device of a mesh holds, in closed form.

It needs no JAX and no devices. ``gda/layout/numbering.py`` says how blocks are numbered, and why.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import product
from typing import Any

import numpy as np

from gda.layout.boundary import hide_own_frames, set_module
from gda.layout.indices import Dimension, Tiling
from gda.layout.numbering import IntArray, Layout, layout_of, numbers_of, read_only
from gda.layout.process_view import ProcessView
from gda.layout.processes import Processes, ProcessOf, check_process_of
from gda.layout.spec import (
    Index,
    Shape,
    SpecEntry,
    SpecLike,
    axes_by_dimension,
    check_mesh_shape,
    check_shape,
    check_spec,
    entries_of,
    format_spec,
    indivisible_error,
    integer,
    integers,
)
from gda.layout.text import counted


@set_module("gda")
class ShardGrid:
    """A global shape, sharded over a mesh by a spec; immutable, hashable, comparable.

    Args:
      global_shape: sizes of the array, non-negative integers.
      mesh_shape: size of each mesh axis by name, in mesh order, such as ``{'x': 4, 'y': 2}``.
        For a ``jax.sharding.Mesh``, pass ``mesh.shape``.
      spec: ``PartitionSpec`` or any sequence of ``None``, axis names and tuples of axis names, at
        most as long as the shape.
      pad: takes sizes that the mesh does not divide. Blocks of such a dimension have
        ``ceil(size / ways)`` elements, and the last ones fewer or none. Every answer has the
        elements of the array only; ``shard_shape`` and ``padded_shape`` have the padding too.
      process_of: the process of each device, non-negative integers in device order; for a
        ``jax.Device``, this is ``process_index``. ``view`` needs it. To share it between grids,
        pass ``other.processes``.

    Raises:
      ValueError: the spec does not fit the shape and the mesh, or ``process_of`` does not fit the
        mesh. The message names specs and sizes that fit.

    Devices are numbered by *flat position*: row-major over the mesh, the order of
    ``mesh.devices.flat``. A device ``i`` is given by it, or by mesh coordinates; ``IndexError`` if
    it is outside the mesh. Blocks are numbered row-major over the blocks of each dimension.

    >>> grid = ShardGrid((8, 2), {'x': 4, 'y': 2}, ('x', 'y'))
    >>> grid.shard_shape, grid.num_shards, grid.num_replicas
    ((2, 1), 8, 1)
    >>> grid.index(3)
    (slice(2, 4, None), slice(1, 2, None))
    >>> ShardGrid((8, 2), {'x': 4, 'y': 2}, (None, 'y')).replica_ids
    array([0, 0, 1, 1, 2, 2, 3, 3])
    >>> padded = ShardGrid((5,), {'x': 4}, ('x',), pad=True)
    >>> padded.padded_shape, padded.indices()
    ((8,), [(slice(0, 2, None),), (slice(2, 4, None),), (slice(4, 5, None),), (slice(5, 5, None),)])
    """

    global_shape: Shape
    shard_shape: Shape
    _layout: Layout
    # On the class, so that most grids need not be given them.
    processes: Processes | None = None
    is_padded: bool = False

    def __init__(
        self,
        global_shape: Iterable[int],
        mesh_shape: Mapping[str, int],
        spec: SpecLike,
        *,
        pad: bool = False,
        process_of: ProcessOf | Processes | None = None,
    ) -> None:
        try:
            shape = check_shape(global_shape)
            layout = _layout_of(shape, mesh_shape, spec)
            if any(map(operator.mod, shape, layout.parts)):
                if not pad:
                    raise indivisible_error(layout.axes, shape, layout.mesh_shape)
                shard_shape = Tiling(shape, layout.parts).shard_shape
                self.__dict__["is_padded"] = True
            else:
                shard_shape = tuple(map(operator.floordiv, shape, layout.parts))
            # Not by attribute: those are closed, see __setattr__.
            this = self.__dict__
            this["global_shape"] = shape
            this["shard_shape"] = shard_shape
            this["_layout"] = layout
            if process_of is not None:
                this["processes"] = check_process_of(process_of, layout)
        except Exception as error:  # not by a decorator, which would cost a part of a microsecond
            hide_own_frames(error)
            raise

    @property
    def mesh_shape(self) -> Mapping[str, int]:
        """Size of each mesh axis by name, in mesh order; read-only."""
        return self._layout.mesh_shape

    @property
    def spec(self) -> tuple[SpecEntry, ...]:
        """The spec in its shortest form: no trailing ``None``, no tuples of one name."""
        return self._layout.spec

    @property
    def parts(self) -> Shape:
        """The parts that each dimension has; 1 for one of size 0, whose parts are all equal."""
        return self._tiling.parts

    @property
    def padded_shape(self) -> Shape:
        """The shape of the array with its padding: the global shape if the mesh divides it."""
        return tuple(map(operator.mul, self.shard_shape, self._layout.parts))

    @property
    def num_devices(self) -> int:
        """The number of devices of the mesh."""
        return self._layout.num_devices

    @property
    def num_shards(self) -> int:
        """The number of distinct blocks of the array."""
        return self._layout.num_shards

    @property
    def num_replicas(self) -> int:
        """The number of devices that hold each block."""
        return self._layout.num_replicas

    @property
    def process_of(self) -> IntArray | None:
        """Process of every device: int64 ``[num_devices]``, read-only; None if it was not given."""
        return None if self.processes is None else self.processes.process_of

    @property
    def num_processes(self) -> int:
        """The number of processes of the mesh; ``ValueError`` without ``process_of``."""
        return len(self._known_processes().numbers)

    # One device: O(axes of the mesh), whatever its size.

    def index(self, i: int | Sequence[int]) -> Index:
        """Return the elements that the device at ``i`` holds: one slice per dimension, as in JAX.

        ``slice(None)`` for a dimension that is not sharded, else ``slice(start, stop)``.

        >>> ShardGrid((8, 2), {'x': 4, 'y': 2}, ('x',)).index((3, 0))
        (slice(6, 8, None), slice(None, None, None))
        """
        return self.block_index(self.block_id(i))

    def replica_id(self, i: int | Sequence[int]) -> int:
        """Return the number of devices before ``i``, in device order, that hold the same block."""
        return self._layout.numbers(self._position(i))[1]

    def block_id(self, i: int | Sequence[int]) -> int:
        """Return the number, from 0 to ``num_shards - 1``, of the block the device ``i`` holds."""
        return self._layout.numbers(self._position(i))[0]

    def block_index(self, block: int) -> Index:
        """Return the index of the block with number ``block``; ``IndexError`` if there is none."""
        block = integer(block, "the number of a block")  # slices of NumPy integers print badly
        if not 0 <= block < self.num_shards:
            raise IndexError(
                f"block {block} is outside the {self.num_shards} blocks of {self!r}; they are "
                "numbered from 0"
            )
        return self._tiling.index(block)

    @cached_property
    def _tiling(self) -> Tiling:
        return Tiling(self.global_shape, self._layout.parts)

    def shards_at(self, positions: Iterable[int]) -> list[tuple[Index, int]]:
        """Return ``(index, replica_id)`` of the devices at some flat positions.

        Costs O(``len(positions)``), whatever the size of the mesh; devices that hold the same
        block share one index.

        >>> ShardGrid((8,), {'x': 4, 'y': 2}, ('y',)).shards_at([0, 2])
        [((slice(0, 4, None),), 0), ((slice(0, 4, None),), 1)]
        """
        if type(positions) is not range:
            positions = integers(positions, "flat positions of devices, such as [0, 3]")
        numbers = numbers_of if len(positions) <= 4096 else numbers_of.__wrapped__  # keeps nothing
        shards = numbers(self._layout, positions)
        indices = {block: self._tiling.index(block) for block in dict(shards)}
        return [(indices[block], replica) for block, replica in shards]

    def locate(self, point: Sequence[int]) -> IntArray:
        """Return the flat positions of the devices that hold the element at ``point``.

        Entry ``r`` is the device with replica id ``r``: int64 ``[num_replicas]``, at that cost.
        ``IndexError`` if the point is outside the global shape, or has another rank.

        >>> ShardGrid((8, 2), {'x': 4, 'y': 2}, ('x',)).locate((5, 1))
        array([4, 5])
        """
        given = integers(point, "the position of an element, such as (0, 1)")
        if len(given) != len(self.global_shape) or not all(
            0 <= p < size for p, size in zip(given, self.global_shape, strict=True)
        ):
            raise IndexError(
                f"point {given} is outside the global shape {self.global_shape}; give a number for "
                "each dimension, from 0 to below its size"
            )
        return self._layout.holders(self._tiling.block_at(given))

    def _position(self, i: int | Sequence[int]) -> int:
        # Not by type: coordinates may come in a NumPy array, and positions as NumPy integers.
        is_one = hasattr(i, "__index__") and not hasattr(i, "__len__")
        return operator.index(i) if is_one else self._layout.position(i)  # pyright: ignore

    # All devices: O(devices), vectorised. Numbers are kept for all grids of a mesh and spec.

    def indices(self) -> list[Index]:
        """Return the index of every device, in device order; equal indices are one object."""
        dimensions = self._tiling.dimensions
        blocks = [*product(*[map(each.slice_of, range(each.parts)) for each in dimensions])]
        return [blocks[number] for number in self.block_ids.tolist()]

    @cached_property
    def starts(self) -> IntArray:
        """First element of every device's block: int64 ``[num_devices, ndim]``, read-only."""
        return self._ends(Dimension.starts)

    @cached_property
    def stops(self) -> IntArray:
        """One past the last element of every device's block: int64 ``[num_devices, ndim]``."""
        return self._ends(Dimension.stops)

    def _ends(self, ends_of: Callable[[Dimension, Any], IntArray]) -> IntArray:
        layout = self._layout
        if max(self.global_shape, default=0) >= 2**63:
            raise OverflowError(f"{self!r} has elements beyond int64; ask index(i) for a device")
        ends = np.empty((*layout.sizes, len(self.global_shape)), np.int64)
        for number, dimension in enumerate(self._tiling.dimensions):
            ends[..., number] = ends_of(dimension, layout.parts_along(number))
        return read_only(ends.reshape(self.num_devices, len(self.global_shape)))

    @property
    def replica_ids(self) -> IntArray:
        """Replica id of every device: int64 ``[num_devices]``, read-only."""
        return self._layout.replica_ids

    @property
    def block_ids(self) -> IntArray:
        """Number of the block that every device holds: int64 ``[num_devices]``, read-only."""
        return self._layout.block_ids

    # One process.

    def view(self, process: int) -> ProcessView:
        """Return the blocks that one process reads, keeps and writes; the process need not exist.

        ``ValueError`` if the number is negative, or the grid was made without ``process_of``.

        >>> ShardGrid((8,), {'x': 4}, ('x',), process_of=[0, 0, 1, 1]).view(1).indices
        [(slice(4, 6, None),), (slice(6, 8, None),)]
        """
        return ProcessView(self._layout, self._tiling, self._known_processes(), process)

    def _known_processes(self) -> Processes:
        if self.processes is None:
            raise ValueError(
                f"{self!r} has no process numbers; make it with process_of=, the process of each "
                "device in device order"
            )
        return self.processes

    # A value: immutable, equal by content.

    def _key(self) -> tuple[object, ...]:
        return self.global_shape, tuple(self.mesh_shape.items()), self.spec, self.processes

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, ShardGrid) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        arguments = f"{self.global_shape}, {dict(self.mesh_shape)}, {format_spec(self.spec)}"
        arguments += ", pad=True" * self.is_padded
        if self.processes is not None:
            arguments += f", process_of=<{counted(self.num_processes, 'process', 'processes')}>"
        return f"ShardGrid({arguments})"

    def _repr_html_(self) -> str:
        import gda  # only notebooks need it: pictures know grids, and grids no pictures

        return gda.show.html(self)

    def __reduce__(self) -> tuple[object, ...]:
        options: dict[str, Any] = {"pad": True} if self.is_padded else {}
        if self.processes is not None:
            options["process_of"] = self.process_of
        make = partial(ShardGrid, **options) if options else ShardGrid
        return make, (self.global_shape, dict(self.mesh_shape), self.spec)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a ShardGrid is immutable; make a new one with another {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("a ShardGrid is immutable")


def _layout_of(shape: Shape, mesh_shape: Mapping[str, int], spec: SpecLike) -> Layout:
    empty = tuple([not size for size in shape]) if 0 in shape else (False,) * len(shape)
    try:
        # Mostly the arguments are hashable and were seen before. To the cache 4.0 would be 4, but
        # a sum of integers and others is no integer. An iterator can be read only once, below.
        if type(sum(mesh_shape.values())) is int and not hasattr(spec, "__next__"):
            return layout_of(tuple(mesh_shape.items()), spec, empty)
    except (AttributeError, TypeError, ValueError):
        pass  # reported below, in detail
    sizes = check_mesh_shape(mesh_shape)
    return layout_of(tuple(sizes.items()), check_spec(spec, shape, sizes), empty)


def better_spec(grid: ShardGrid) -> tuple[SpecEntry, ...]:
    """Return the spec with unused mesh axes added, if their sizes divide a dimension.

    The largest axis comes first. Each becomes the last axis of the dimension with the largest
    blocks, so that the present axes stay in place.
    """
    of_grid = axes_by_dimension(grid.spec, len(grid.global_shape), grid.mesh_shape)
    axes = [list(names) for names in of_grid]
    left = list(grid.shard_shape)
    used = {name for names in axes for name in names}
    sizes = sorted(grid.mesh_shape.items(), key=lambda item: -item[1])
    for name, size in sizes:
        dimensions = [d for d, rest in enumerate(left) if rest and rest % size == 0]
        if name not in used and size > 1 and dimensions:
            chosen = max(dimensions, key=left.__getitem__)
            axes[chosen].append(name)
            left[chosen] //= size
    return entries_of(tuple(map(tuple, axes)))
