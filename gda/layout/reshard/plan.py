"""The moves that change the layout of an array, and their bytes, without devices.

A piece is the part of a target block that one source block has. It comes from the nearest device
that holds it: the target device itself (such bytes are *kept*), else one of its process, else any.
Several near devices send equal shares, and between processes the holders of a block answer the
requests to it in turn: ``docs/design/reshard.md`` has the rule.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gda.layout.boundary import set_module
from gda.layout.grid import ShardGrid
from gda.layout.indices import indices_of
from gda.layout.numbering import IntArray, read_only
from gda.layout.reshard.flow import Flow, homes_of, numbers_of, ranks_of, summed
from gda.layout.spec import Index, format_spec
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
class Load(NamedTuple):
    """The bytes that one device sends to other devices, or gets from them.

    ``ReshardPlan.largest_sender`` and ``ReshardPlan.largest_receiver`` return one.

    Attributes:
      position: position of the device in its grid.
      nbytes: bytes sent or received; the bytes that the device keeps do not count.

    >>> from gda import ReshardPlan, ShardGrid
    >>> halves, whole = ShardGrid((4,), {'x': 2}, ('x',)), ShardGrid((4,), {'x': 1}, ())
    >>> ReshardPlan(halves, whole, itemsize=4).largest_sender
    Load(position=1, nbytes=8)
    """

    position: int
    nbytes: int


@set_module("gda")
class Link(NamedTuple):
    """The bytes that one process sends to another; ``ReshardPlan.links`` returns them.

    Attributes:
      source_process, target_process: numbers of the sending and of the receiving process.
      nbytes: bytes of all moves from the one to the other.

    >>> from gda import ReshardPlan, ShardGrid
    >>> rows = ShardGrid((4, 4), {'x': 2}, ('x',), process_of=[0, 1])
    >>> columns = ShardGrid((4, 4), {'x': 2}, (None, 'x'), process_of=[0, 1])
    >>> ReshardPlan(rows, columns, itemsize=4).links()[0]
    Link(source_process=0, target_process=1, nbytes=16)
    """

    source_process: int
    target_process: int
    nbytes: int


@set_module("gda")
@dataclass(frozen=True, eq=False, repr=False)
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

    The totals do not list the moves, so that 65,536 devices in processes of 4 or 8 take a fraction
    of a second, even if each sends to each: ``docs/design/reshard.md``.

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
        is_known = source.processes is not None
        if is_known != (target.processes is not None) and numbers_of(source) != numbers_of(target):
            known, unknown = ("source", "target") if source.processes else ("target", "source")
            raise ValueError(
                f"the {known} has process numbers and the {unknown} has none; make both grids with "
                "process_of=, or neither"
            )
        self.__dict__["itemsize"] = _check_itemsize(self.itemsize)
        if target.num_devices * math.prod(target.shard_shape) * self.itemsize >= 2**63:
            raise OverflowError(
                f"the blocks of {target!r} have 2**63 bytes or more together, too many to add up"
            )
        self.__dict__["source_ids"] = _check_ids(self.source_ids, source, "source_ids")
        self.__dict__["target_ids"] = _check_ids(self.target_ids, target, "target_ids")

    # In all.

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
        return int(self.received_by_device.sum())

    @property
    def nbytes_within_processes(self) -> int:
        """Bytes that go to another device of the same process."""
        return 0 if self._flow is None else int(self._flow.near.received.sum()) * self.itemsize

    @property
    def nbytes_between_processes(self) -> int:
        """Bytes that go from one process to another."""
        return self.nbytes_moved - self.nbytes_within_processes

    @property
    def nbytes_peak_extra(self) -> int:
        """The most bytes that any device needs beside its source block: those of its target block.

        0 if every device keeps its block. Buffers of the transport are not counted.
        """
        is_equal = self.source.shard_shape == self.target.shard_shape
        block_bytes = math.prod(self.target.shard_shape) * self.itemsize
        return 0 if is_equal and not self.nbytes_moved else block_bytes

    # By device and by process.

    @cached_property
    def received_by_device(self) -> IntArray:
        """Bytes that each target device gets from others: int64 ``[target.num_devices]``."""
        if self._flow is None:
            return read_only(np.zeros(self.target.num_devices, np.int64))
        return read_only(self._flow.received * self.itemsize)

    @cached_property
    def sent_by_device(self) -> IntArray:
        """Bytes that each source device sends to others: int64 ``[source.num_devices]``."""
        if self._flow is None:
            return read_only(np.zeros(self.source.num_devices, np.int64))
        near, far = self._flow.sent
        return read_only((near + far) * self.itemsize)

    @property
    def received_by_process(self) -> dict[int, int]:
        """Bytes that each process of the target gets from other processes."""
        flow = self._flow
        if flow is None:
            return dict.fromkeys(numbers_of(self.target), 0)
        return _by_process((flow.received - flow.near.received) * self.itemsize, self.target)

    @property
    def sent_by_process(self) -> dict[int, int]:
        """Bytes that each process of the source sends to other processes."""
        if self._flow is None:
            return dict.fromkeys(numbers_of(self.source), 0)
        _, far = self._flow.sent
        return _by_process(far * self.itemsize, self.source)

    @property
    def largest_sender(self) -> Load:
        """The source device that sends most, the first of several."""
        return _largest(self.sent_by_device)

    @property
    def largest_receiver(self) -> Load:
        """The target device that gets most, the first of several."""
        return _largest(self.received_by_device)

    # Move by move.

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
            nbytes = (run.pieces.sizes * self.itemsize).tolist()
            sources, targets = run.sources.tolist(), run.targets.tolist()
            yield from map(Move, sources, targets, of_source, of_target, nbytes)

    def links(self) -> list[Link]:
        """Return the bytes that each process sends to each other, most first; O(``num_moves``)."""
        senders, receivers = numbers_of(self.source), numbers_of(self.target)
        totals: Counter[int] = Counter()
        for run in () if self._flow is None else self._flow.runs():
            pairs = ranks_of(self.source)[run.sources] * len(receivers)
            pairs += ranks_of(self.target)[run.targets]
            distinct, places = np.unique(pairs[run.is_far], return_inverse=True)
            sizes = summed(places, run.pieces.sizes[run.is_far], len(distinct))
            totals.update(dict(zip(distinct.tolist(), sizes.tolist(), strict=True)))
        links = []
        for pair, size in totals.items():
            sender, receiver = divmod(pair, len(receivers))
            links.append(Link(senders[sender], receivers[receiver], size * self.itemsize))
        return sorted(links, key=lambda link: (-link.nbytes, link))

    @cached_property
    def _flow(self) -> Flow | None:
        if 0 in self.source.global_shape:
            return None
        source_ids, target_ids = (
            np.arange(grid.num_devices) if ids is None else np.asarray(ids)
            for grid, ids in [(self.source, self.source_ids), (self.target, self.target_ids)]
        )
        return Flow(self.source, self.target, homes_of(source_ids, target_ids))

    # A value: immutable, equal by content.

    def _key(self) -> tuple[Any, ...]:
        ids = [
            None if ids is None else tuple(np.asarray(ids).tolist())
            for ids in (self.source_ids, self.target_ids)
        ]
        return self.source, self.target, self.itemsize, *ids

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, ReshardPlan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[object, ...]:
        # Cached results are not pickled.
        source, target, itemsize, source_ids, target_ids = self._key()
        make = partial(ReshardPlan, itemsize=itemsize, source_ids=source_ids, target_ids=target_ids)
        return make, (source, target)

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


def _by_process(by_device: IntArray, grid: ShardGrid) -> dict[int, int]:
    numbers = numbers_of(grid)
    totals = summed(ranks_of(grid), by_device, len(numbers))
    return dict(zip(numbers, totals.tolist(), strict=True))


def _largest(by_device: IntArray) -> Load:
    position = int(np.argmax(by_device))
    return Load(position, int(by_device[position]))


def _check_itemsize(itemsize: Any) -> int:
    try:
        size = operator.index(itemsize)
    except TypeError:
        size = 0
    if size < 1 or isinstance(itemsize, bool):
        raise TypeError(
            "itemsize must be the bytes of one element, such as np.dtype('float32').itemsize, not "
            f"{itemsize!r}"
        )
    return size


def _check_ids(ids: Iterable[int] | None, grid: ShardGrid, name: str) -> IntArray | None:
    if ids is None:
        return None
    try:
        # Not np.asarray of all: of numbers beyond int64 it makes floats or objects.
        values = np.array([operator.index(number) for number in ids], np.int64)
    except (TypeError, OverflowError):
        raise TypeError(
            f"{name} must be integers from -2**63 to 2**63 - 1, one for each device, not "
            f"{reprlib.repr(ids)}"
        ) from None
    if values.shape != (grid.num_devices,):
        raise ValueError(
            f"{name} has the shape {values.shape}, but the mesh {dict(grid.mesh_shape)} has "
            f"{grid.num_devices} devices; give one number for each, in device order"
        )
    ordered = np.sort(values)
    if (twice := ordered[1:][ordered[1:] == ordered[:-1]]).size:
        raise ValueError(f"{name} has {twice[0]} twice; each device has a number of its own")
    return read_only(values)
