"""The moves that change the layout of an array, and their bytes, without devices.

A piece is the part of a target block that one source block has. It comes from the nearest device
that holds it: the target device itself (such bytes are *kept*), else one of its process, else any.
Several near devices send equal shares, and between processes the holders of a block answer the
requests to it in turn: ``docs/design/reshard.md`` has the rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gda.layout.boundary import set_module
from gda.layout.grid import ShardGrid
from gda.layout.indices import indices_of
from gda.layout.reshard.flow import Flow, homes_of, numbers_of
from gda.layout.spec import Index, format_spec, integer
from gda.layout.text import counted, format_bytes


@set_module("gda")
class Move(NamedTuple):
    """One piece of one block, from one device to another or within one.

    Attributes:
      source: position of the sending device in the source grid.
      target: position of the receiving device in the target grid.
      source_index: place of the piece in the block of the sender.
      target_index: place of the piece in the block of the receiver.
      nbytes: bytes of the piece.

    >>> from gda import ReshardPlan, ShardGrid
    >>> halves, whole = ShardGrid((4,), {'x': 2}, ('x',)), ShardGrid((4,), {'x': 1}, ())
    >>> *_, last = ReshardPlan(halves, whole, itemsize=4).moves()
    >>> last.source, last.target, last.target_index, last.nbytes
    (1, 0, (slice(2, 4, None),), 8)
    """

    source: int
    target: int
    source_index: Index
    target_index: Index
    nbytes: int


@set_module("gda")
@dataclass(frozen=True, repr=False)
class ReshardPlan:
    """The moves that turn one layout of an array into another; neither needs devices.

    Args:
      source: the layout of the array now.
      target: the new layout, of the same global shape, over the same or other devices, more or
        fewer. The devices of a grid without process numbers count as devices of process 0.
      itemsize: bytes of one element, such as ``np.dtype('float32').itemsize``.
      source_ids, target_ids: a number for each device of either grid, in device order; devices with
        equal numbers are the same. By default the positions: device 3 of one is device 3 of the
        other. Of a mesh they are ``[d.id for d in mesh.devices.flat]``.

    Raises:
      ValueError: the global shapes differ, only one grid knows its processes and they are not
        process 0 alone, or the numbers are not one for each device, each different.

    The totals do not list the moves, so that 65,536 devices take a fraction of a second, even if
    each sends to each: ``docs/design/reshard.md``.

    >>> from gda import ReshardPlan, ShardGrid
    >>> rows = ShardGrid((4, 4), {'x': 2}, ('x', None))
    >>> columns = ShardGrid((4, 4), {'x': 2}, (None, 'x'))
    >>> plan = ReshardPlan(rows, columns, itemsize=4)
    >>> plan.nbytes_kept, plan.nbytes_moved
    (32, 32)
    >>> list(plan.moves())[1]  # doctest: +NORMALIZE_WHITESPACE
    Move(source=1, target=0, source_index=(slice(0, 2, None), slice(0, 2, None)),
         target_index=(slice(2, 4, None), slice(0, 2, None)), nbytes=16)
    """

    source: ShardGrid
    target: ShardGrid
    _: KW_ONLY
    itemsize: int
    source_ids: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None
    target_ids: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None

    def __post_init__(self) -> None:
        for name in ("source", "target"):
            if not isinstance(grid := getattr(self, name), ShardGrid):
                raise TypeError(
                    f"{name} must be a gda.ShardGrid, not {type(grid).__name__}; of a GlobalArray "
                    "it is g.grid"
                )
        source, target = self.source, self.target
        if source.global_shape != target.global_shape:
            raise ValueError(
                f"the source has the global shape {source.global_shape} and the target "
                f"{target.global_shape}; a reshard changes the layout only"
            )
        if math.prod(source.global_shape) * target.num_replicas >= 2**63:
            raise ValueError(
                f"all target blocks of the global shape {source.global_shape} together have 2**63 "
                "elements or more; a plan counts fewer"
            )
        is_known = source.processes is not None
        if is_known != (target.processes is not None) and numbers_of(source) != numbers_of(target):
            known, unknown = ("source", "target") if source.processes else ("target", "source")
            raise ValueError(
                f"the {known} has process numbers and the {unknown} has none; make both grids with "
                "process_of=, or neither"
            )
        self.__dict__["itemsize"] = integer(
            self.itemsize, "itemsize, the bytes of one element, such as 4 of float32"
        )
        if self.itemsize < 1:
            raise ValueError(f"itemsize must be the bytes of one element, not {self.itemsize}")
        self.__dict__["source_ids"] = _check_ids(self.source_ids, source, "source_ids")
        self.__dict__["target_ids"] = _check_ids(self.target_ids, target, "target_ids")

    @property
    def num_moves(self) -> int:
        """The number of moves, those within one device included."""
        return 0 if self._flow is None else self._flow.num_pieces

    @property
    def nbytes_total(self) -> int:
        """Bytes of all target blocks; those kept, within and between processes add up to it."""
        elements = math.prod(self.target.global_shape) * self.target.num_replicas
        return elements * self.itemsize

    @property
    def nbytes_kept(self) -> int:
        """Bytes that are on their target device already."""
        return self.nbytes_total - self.nbytes_moved

    @property
    def nbytes_moved(self) -> int:
        """Bytes that go from one device to another."""
        return 0 if self._flow is None else int(self._flow.received.sum()) * self.itemsize

    @property
    def nbytes_within_processes(self) -> int:
        """Bytes that go to another device of the same process."""
        return 0 if self._flow is None else self._flow.received_near * self.itemsize

    @property
    def nbytes_between_processes(self) -> int:
        """Bytes that go from one process to another."""
        return self.nbytes_moved - self.nbytes_within_processes

    def moves(self) -> Iterator[Move]:
        """Yield every move once, sorted by target device, also those within one device."""
        if self._flow is None:
            return
        slices = [segments.slices for segments in self._flow.pieces.dimensions]
        for run in self._flow.runs():
            columns = [segments.tolist() for segments in run.pieces.segments]
            of_source, of_target = (
                indices_of([known[side] for known in slices], columns, len(run.sources))
                for side in (0, 1)
            )
            nbytes = [size * self.itemsize for size in run.pieces.sizes.tolist()]
            sources, targets = run.sources.tolist(), run.targets.tolist()
            yield from map(Move, sources, targets, of_source, of_target, nbytes)

    @cached_property
    def _flow(self) -> Flow | None:
        if 0 in self.source.global_shape:
            return None
        source_ids, target_ids = (
            np.arange(grid.num_devices) if ids is None else np.asarray(ids)
            for grid, ids in [(self.source, self.source_ids), (self.target, self.target_ids)]
        )
        return Flow(self.source, self.target, homes_of(source_ids, target_ids))

    def __repr__(self) -> str:
        source, target = (
            f"{format_spec(grid.spec)} on {dict(grid.mesh_shape)}"
            for grid in (self.source, self.target)
        )
        shape = self.source.global_shape
        return (
            f"ReshardPlan({shape}: {source} -> {target}, {counted(self.num_moves, 'move')}; "
            f"{format_bytes(self.nbytes_kept)} kept, "
            f"{format_bytes(self.nbytes_within_processes)} within processes, "
            f"{format_bytes(self.nbytes_between_processes)} between processes)"
        )


def _check_ids(ids: Any, grid: ShardGrid, name: str) -> tuple[int, ...] | None:
    if ids is None:
        return None
    values = np.asarray(ids)
    if values.dtype.kind not in "iu" and values.size:
        raise TypeError(
            f"{name} must give a number for each device in device order, integers such as "
            f"[d.id for d in mesh.devices.flat], not {values.dtype}"
        )
    if values.shape != (grid.num_devices,):
        raise ValueError(
            f"{name} has the shape {values.shape}, but the mesh {dict(grid.mesh_shape)} has "
            f"{grid.num_devices} devices; give one number for each, in device order"
        )
    ordered = np.sort(values)
    if (twice := ordered[1:][ordered[1:] == ordered[:-1]]).size:
        raise ValueError(f"{name} has {twice[0]} twice; each device has a number of its own")
    return tuple(values.tolist())
