"""The blocks of an array that one process, which need not exist, reads, keeps and writes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gda.layout.boundary import set_module
from gda.layout.indices import Tiling, indices_of, shape_at
from gda.layout.numbering import IntArray, Layout, layout_of
from gda.layout.processes import Processes, ProcessOf, check_process_of, writing_of
from gda.layout.spec import (
    Index,
    Shape,
    SpecLike,
    check_mesh_shape,
    check_shape,
    check_spec,
    format_spec,
    integer,
    nearest_sizes,
)
from gda.layout.text import counted, format_processes, join_some


@set_module("gda")
@dataclass(frozen=True, eq=False, repr=False)
class ProcessView:
    """The blocks of an array that one process reads, keeps and writes. Immutable, hashable.

    ``ShardGrid.view`` returns one, which is empty for a process without devices in the mesh. Every
    attribute costs O(devices of the process), but the first view of a mesh and the first call of
    ``written_blocks`` O(devices of the mesh).

    Attributes:
      process: the number of the process.

    >>> import gda
    >>> grid = gda.ShardGrid((8, 2), {'x': 4, 'y': 2}, ('x',), process_of=[0] * 4 + [1] * 4)
    >>> view = grid.view(1)
    >>> view
    ProcessView(process 1: 4 devices, 2 blocks of shape (2, 2))
    >>> view.positions, view.block_ids, view.coordinates, view.rows
    (array([4, 5, 6, 7]), (2, 3), ((2, 3), (0,)), (slice(4, 8, None),))
    >>> view.indices
    [(slice(4, 6, None), slice(None, None, None)), (slice(6, 8, None), slice(None, None, None))]
    >>> view.is_regular, view.local_shape, view.size
    (True, (4, 2), 8)
    """

    _layout: Layout
    _tiling: Tiling
    _processes: Processes
    process: int

    def __post_init__(self) -> None:
        self.__dict__["process"] = integer(self.process, "the number of a process")
        if self.process < 0:
            raise ValueError(f"process is {self.process}; processes are numbered from 0")

    # The blocks that it reads.

    @cached_property
    def positions(self) -> IntArray:
        """Flat positions of its devices, in device order: int64, read-only."""
        return self._processes.positions(self.process)

    @cached_property
    def block_ids(self) -> tuple[int, ...]:
        """Numbers of its distinct blocks, in the order of the first device that holds each."""
        blocks, _ = self._layout.numbers_at(self.positions)
        return tuple(dict.fromkeys(blocks.tolist()))

    @property
    def indices(self) -> list[Index]:
        """Its distinct indices, in the order of ``block_ids``."""
        return [self._tiling.index(block) for block in self.block_ids]

    @cached_property
    def rows(self) -> tuple[slice, ...]:
        """The rows of dimension 0 that it reads: ascending slices, merged where they touch."""
        if not self._tiling.global_shape:
            return ()
        rows: list[slice] = []
        for part in self.coordinates[0]:
            start, stop = self._tiling.dimensions[0].bounds(part)
            if start == stop and rows:
                continue  # padding alone
            if rows and rows[-1].stop == start:
                start = rows.pop().start
            rows.append(slice(start, stop))
        return tuple(rows)

    @property
    def size(self) -> int:
        """Elements it reads: those of each distinct block once."""
        shape = self._tiling.global_shape
        return sum(math.prod(shape_at(index, shape)) for index in self.indices)

    # Those that it writes.

    def written_blocks(self, turn: int = 0) -> tuple[int, ...]:
        """Return the numbers of the blocks it writes, in the order of ``block_ids``.

        One of the processes that hold a block writes it. If two processes hold the same blocks,
        one writes at most one block more than the other.

        Args:
          turn: assign each block to the process that comes ``turn`` places later among the
            processes that hold it. For the leaves of a tree, pass the number of the leaf, or
            process 0 writes every replicated leaf.
        """
        blocks = np.array(self.block_ids, np.int64)
        writers = writing_of(self._layout, self._processes).writers(
            blocks, integer(turn, "a turn, such as the number of the leaf")
        )
        return tuple(blocks[writers == self.process].tolist())

    # Those that it keeps as one local array.

    @cached_property
    def coordinates(self) -> tuple[tuple[int, ...], ...]:
        """For each dimension the coordinates of its blocks, ascending, each once."""
        return tuple([tuple(sorted(set(column))) for column in self._columns])

    @cached_property
    def is_regular(self) -> bool:
        """True if its blocks are all combinations of ``coordinates``, at least one."""
        return 0 < len(self.block_ids) == math.prod(map(len, self.coordinates))

    @property
    def local_shape(self) -> Shape:
        """The shape of its blocks side by side; ``ValueError`` unless ``is_regular``."""
        self.check_regular()
        return tuple(map(self._local_size, range(len(self.coordinates))))

    def indices_within(self, local_shape: Shape) -> list[Index]:
        """Return the place of each of ``indices`` within local data, start and stop always given.

        Data of the shape ``local_shape`` has the blocks side by side in the order of their
        coordinates. But it may have the whole of a dimension: if its size is the global size,
        blocks have the same place in it as in the whole array. ``ValueError`` if data of this shape
        does not have the blocks, or these do not form a regular grid.

        >>> import gda
        >>> grid = gda.ShardGrid((4, 4), {'x': 2, 'y': 2}, ('x', 'y'), process_of=[0, 0, 1, 1])
        >>> grid.view(1).indices_within((4, 4))
        [(slice(2, 4, None), slice(0, 2, None)), (slice(2, 4, None), slice(2, 4, None))]
        """
        global_shape = self._tiling.global_shape
        local_shape = check_shape(local_shape, "local")
        if len(local_shape) != len(global_shape):
            raise ValueError(
                f"the local data has shape {local_shape}, and global_shape is {global_shape}; "
                "they must have the same number of dimensions"
            )
        if not self.block_ids:
            self.check_regular()
        slices: list[dict[int, slice]] = []
        compact = []
        for dimension, size in enumerate(local_shape):
            if size == global_shape[dimension]:
                slices.append(self._placed(dimension))
                continue
            if size != self._local_size(dimension):
                raise ValueError(
                    f"local data of shape {local_shape} does not fit global_shape {global_shape}, "
                    f"sharded by {format_spec(self._layout.spec)} on the mesh "
                    f"{dict(self._layout.mesh_shape)}: dimension {dimension} has local size "
                    f"{size}; expected is {self._local_size(dimension)}, the "
                    f"{len(self.coordinates[dimension])} blocks of process {self.process} side by "
                    f"side, or {global_shape[dimension]}, the whole dimension"
                )
            compact.append(dimension)
            slices.append(self._side_by_side(dimension))
        combinations = set(zip(*(self._columns[dimension] for dimension in compact), strict=True))
        if compact and len(combinations) < math.prod(len(slices[d]) for d in compact):
            self.check_regular()
        return self._indices_by(slices)

    @cached_property
    def _columns(self) -> list[list[int]]:
        """For each dimension the coordinates of its blocks, in the order of ``block_ids``."""
        columns = self._tiling.columns(np.array(self.block_ids, np.int64))
        return [column.tolist() for column in columns]

    def _placed(self, dimension: int) -> dict[int, slice]:
        bounds = self._tiling.dimensions[dimension].bounds
        return {part: slice(*bounds(part)) for part in self.coordinates[dimension]}

    def _side_by_side(self, dimension: int) -> dict[int, slice]:
        """The slice of the local array for each of its parts of a dimension."""
        slices, stop = {}, 0
        for part, placed in self._placed(dimension).items():
            start, stop = stop, stop + placed.stop - placed.start
            slices[part] = slice(start, stop)
        return slices

    def _local_size(self, dimension: int) -> int:
        return sum(placed.stop - placed.start for placed in self._placed(dimension).values())

    def _indices_by(self, slices: Sequence[Mapping[int, slice]]) -> list[Index]:
        return list(indices_of(slices, self._columns, len(self.block_ids)))

    def check_regular(self) -> None:
        """Raise ``ValueError``, and show the blocks, unless ``is_regular``."""
        if self.is_regular:
            return
        mesh = f"the mesh {dict(self._layout.mesh_shape)}"
        if not self.block_ids:
            raise ValueError(
                f"process {self.process} has no device of {mesh}, so it has no local shape; the "
                f"mesh has devices of {format_processes(self._processes.numbers)}"
            )
        blocks = list(zip(*self._columns, strict=True))
        raise ValueError(
            f"process {self.process} holds the blocks {join_some([*map(str, blocks)])} of "
            f"{format_spec(self._layout.spec)} on {mesh}, which do not form a regular grid, so it "
            "has no local shape; choose another order of the devices or another spec, or use "
            "GlobalArray.from_callback, which reads any blocks"
        )

    # A value: immutable, equal by content.

    def _key(self) -> tuple[Any, ...]:
        layout = self._layout
        mesh = tuple(layout.mesh_shape.items())
        return self._tiling.global_shape, mesh, layout.spec, self._processes, self.process

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, ProcessView) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        devices = counted(len(self.positions), "device")
        blocks = f"{counted(len(self.block_ids), 'block')} of shape {self._tiling.shard_shape}"
        return f"ProcessView(process {self.process}: {devices}, {blocks})"

    def __reduce__(self) -> tuple[object, ...]:
        # Cached results are not pickled, and no names of inner modules.
        return self._of, self._key()

    @classmethod
    def _of(
        cls,
        global_shape: Shape,
        mesh_items: tuple[tuple[str, int], ...],
        spec: SpecLike,
        processes: Processes,
        process: int,
    ) -> ProcessView:
        layout = layout_of(mesh_items, spec, tuple(not size for size in global_shape))
        return cls(layout, Tiling(global_shape, layout.parts), processes, process)


def infer_global_shape(
    local_shape: Iterable[int],
    mesh_shape: Mapping[str, int],
    spec: SpecLike,
    process_of: ProcessOf | Processes,
    process: int,
) -> Shape:
    """Return the global shape for the ``local_shape`` of one process.

    ``ShardGrid(result, mesh_shape, spec, process_of=process_of).view(process).local_shape`` is
    ``local_shape``. Nothing is compared with what other processes have.
    """
    sizes = check_mesh_shape(mesh_shape)
    shape = check_shape(local_shape, "local")
    entries = check_spec(spec, shape, sizes, "local")
    layout = layout_of(tuple(sizes.items()), entries, tuple(not size for size in shape))
    # The blocks of a process do not depend on their size, so each gets one element.
    ones = tuple(parts if size else 0 for size, parts in zip(shape, layout.parts, strict=True))
    processes = check_process_of(process_of, layout)
    view = ProcessView(layout, Tiling(ones, layout.parts), processes, process)
    view.check_regular()
    extents = tuple(map(len, view.coordinates))
    sizes_of_all: list[int] = []
    for dimension, (size, extent) in enumerate(zip(shape, extents, strict=True)):
        parts = layout.parts[dimension]
        if size % extent:
            raise ValueError(
                f"local shape {shape} of process {process} cannot be sharded by "
                f"{format_spec(layout.spec)} on the mesh {sizes}: dimension {dimension} of local "
                f"size {size} holds {extent} of the {parts} blocks, and {size} is not divisible by "
                f"{extent}; {nearest_sizes(size, extent)}"
            )
        sizes_of_all.append(size if extent == parts else size // extent * parts)
    return tuple(sizes_of_all)
