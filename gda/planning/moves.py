"""The moves of an array or of a whole model.

The document of ``gda reshard --json`` for one array has the keys

- ``source`` and ``target``: the two layouts, as ``gda plan`` has an array;
  ``notes``: the parts that this document omits, in words;
- ``nbytes_kept``, ``nbytes_within_processes``, ``nbytes_between_processes``: the bytes of
  target blocks that their device has already, that come from another device of its process, and
  that come from another process. ``nbytes_moved`` is the sum of the last two; ``num_moves`` counts
  pieces, kept ones included;
- ``received_by_device``, ``sent_by_device``: ``{"largest", "mean"}`` bytes to and from other
  devices; ``received_by_process``, ``sent_by_process``: the same between processes;
- ``largest_sender``, ``largest_receiver``: ``{"device", "nbytes"}``, the first of equals. Bytes
  sent are null if they need too many moves;
- ``nbytes_peak_extra``: the most bytes that a device needs beside its source block;
- ``num_links``: pairs of processes that communicate; ``links``: ``{"source_process",
  "target_process", "nbytes"}`` of each, busiest first, at most 16,384. Both are null if they need
  too many moves.

That of ``--tree``, for a model, has the keys

- ``source`` and ``target``: the totals of the two layouts, as ``gda plan --tree`` has them;
- those for one array, added up over all parameters; ``nbytes_peak_extra`` are the bytes that a
  device holds twice if all parameters move together;
- ``nbytes_peak_per_device``, ``nbytes_peak_per_process``: old and new blocks together;
  ``nbytes_peak_one_by_one``: on a device, if each parameter is freed once it has moved;
- ``processes``: for each its number as ``process``; ``nbytes_kept`` of its new blocks on their
  device, ``nbytes_within`` from another of its devices, ``nbytes_received`` and ``nbytes_sent``
  from and to other processes (null if it needs too many moves); at most 16,384;
- ``parameters``: rows as in ``gda plan --tree``, most bytes between processes first: ``name``,
  ``names``, ``count``, ``shape``, ``dtype``; ``nbytes_kept``, ``nbytes_within_processes``,
  ``nbytes_between_processes`` of all of the row; ``before`` and ``after``, each with ``spec``,
  ``shard_shape``, ``padded_shape`` (``shape`` if the mesh divides it), and ``nbytes_padding`` of
  all of the row on all devices with ``percent_padding``.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from gda.layout.grid import ShardGrid
from gda.layout.numbering import IntArray
from gda.layout.padding import Padding, padding_of
from gda.layout.processes import Processes
from gda.layout.reshard.flow import tiling_of
from gda.layout.reshard.plan import Link, ReshardPlan
from gda.planning.model import ModelPlan
from gda.planning.notation.model_file import Parameter
from gda.planning.notation.name_ranges import with_ranges
from gda.planning.planned_array import LISTED, layout_for_json

# Some answers list every move, about 10 million in a second.
MOST_MOVES = 5_000_000


class Loads(NamedTuple):
    """The bytes that all devices or processes send or receive: the most, and on average.

    ``position`` is the first of those with the most.
    """

    largest: int
    mean: float
    position: int


class ListedMoves:
    """The moves of an array or a model, without the numbers that need too long a list of them.

    Attributes:
      moves: the moves.
      links: bytes from process to process; None if omitted.
      knows_senders: the bytes that each device and process sends are known.
      notes: the omissions, in words.
    """

    def __init__(self, moves: ReshardPlan | ModelMoves, num_listed: int) -> None:
        is_long = num_listed > MOST_MOVES
        self.moves = moves
        self.links = None if is_long else moves.links()
        self.knows_senders = not (is_long and moves.lists_moves)
        what = "links are" if self.knows_senders else "links and bytes sent are"
        self.notes = (
            [f"{what} omitted: {num_listed:,} pieces are too many to list"] if is_long else []
        )

    def loads(self, name: str) -> Loads | None:
        """Return the loads in ``sent_by_device`` and the like; None if they are unknown."""
        if name.startswith("sent") and not self.knows_senders:
            return None
        known = getattr(self.moves, name)
        values = [*map(int, known.values() if isinstance(known, dict) else known)]
        most = max(values)
        return Loads(most, sum(values) / len(values), values.index(most))

    def document(self) -> dict[str, Any]:
        """Return its part of the document of ``--json``."""
        moves, links = self.moves, self.links
        ways = itertools.product(("device", "process"), ("received", "sent"))
        loads = {(name := f"{does}_by_{who}"): self.loads(name) for who, does in ways}
        sent, received = loads["sent_by_device"], loads["received_by_device"]
        return {
            "notes": self.notes,
            "nbytes_kept": moves.nbytes_kept,
            "nbytes_within_processes": moves.nbytes_within_processes,
            "nbytes_between_processes": moves.nbytes_between_processes,
            "nbytes_moved": moves.nbytes_moved,
            "num_moves": moves.num_moves,
            **{
                name: each and {"largest": each.largest, "mean": each.mean}
                for name, each in loads.items()
            },
            "largest_sender": sent and {"device": sent.position, "nbytes": sent.largest},
            "largest_receiver": received
            and {"device": received.position, "nbytes": received.largest},
            "nbytes_peak_extra": moves.nbytes_peak_extra,
            "num_links": None if links is None else len(links),
            "links": None if links is None else [link._asdict() for link in links[:LISTED]],
        }


class Alike(NamedTuple):
    """Parameters that move alike: one of them, before and after, and the names of all."""

    before: Parameter
    after: Parameter
    names: tuple[str, ...]

    def padding(self, grid: ShardGrid) -> Padding:
        """Return the padding of all of them on the devices of a grid."""
        return padding_of([(grid, self.before.dtype.itemsize * len(self.names))])


class _SumOverPlans:
    """An attribute of ``ReshardPlan``, added up over all plans of a model."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, moves: ModelMoves, owner: type) -> int:
        return sum(count * getattr(plan, self._name) for plan, count in moves.plans)


@dataclass(frozen=True)
class ModelMoves:
    """The moves of all parameters of a model, each kind planned once; as in ``ReshardPlan``.

    Attributes:
      source, target: the model before and after, with the same parameters in the same order.
    """

    source: ModelPlan
    target: ModelPlan

    @cached_property
    def alike(self) -> list[Alike]:
        """The parameters, in groups that move alike."""
        pairs: dict[Any, list[tuple[Parameter, Parameter]]] = defaultdict(list)
        for before, after in zip(self.source.parameters, self.target.parameters, strict=True):
            pairs[before.grid, after.grid, before.dtype].append((before, after))
        return [Alike(*some[0], tuple(old.name for old, _ in some)) for some in pairs.values()]

    @cached_property
    def plans(self) -> list[tuple[ReshardPlan, int]]:
        """Each distinct plan, and the number of parameters that it is for."""
        here, there = (
            Processes(np.arange(model.num_devices) // model.devices_per_process)
            for model in (self.source, self.target)
        )
        return [
            (
                ReshardPlan(
                    _with_processes(group.before.grid, here),
                    _with_processes(group.after.grid, there),
                    itemsize=group.before.dtype.itemsize,
                ),
                len(group.names),
            )
            for group in self.alike
        ]

    # In all.

    num_moves = _SumOverPlans()
    nbytes_total = _SumOverPlans()
    nbytes_kept = _SumOverPlans()
    nbytes_moved = _SumOverPlans()
    nbytes_within_processes = _SumOverPlans()
    nbytes_between_processes = _SumOverPlans()
    nbytes_peak_extra = _SumOverPlans()

    @property
    def num_listed(self) -> int:
        """The moves of all distinct plans."""
        return sum(plan.num_moves for plan, _ in self.plans)

    @property
    def lists_moves(self) -> bool:
        return any(plan.lists_moves for plan, _ in self.plans)

    # Bytes that a device holds.

    @property
    def nbytes_peak_per_device(self) -> int:
        return self.source.bytes_per_device + self.nbytes_peak_extra

    @property
    def nbytes_peak_per_process(self) -> int:
        before = self.source.bytes_per_device * self.source.devices_per_process
        return before + self.nbytes_peak_extra * self.target.devices_per_process

    @property
    def nbytes_peak_one_by_one(self) -> int:
        """The most bytes on a device if each parameter is freed once it has moved."""
        peak = held = self.source.bytes_per_device
        for plan, count in self.plans:
            old, new = (
                math.prod(grid.shard_shape) * plan.itemsize for grid in (plan.source, plan.target)
            )
            if extra := plan.nbytes_peak_extra:
                peak = max(peak, held + extra, held + (count - 1) * (new - old) + extra)
            held += count * (new - old)
        return peak

    # By device and by process.

    @cached_property
    def received_by_device(self) -> IntArray:
        counted = [count * plan.received_by_device for plan, count in self.plans]
        return sum(counted, np.zeros(self.target.num_devices, np.int64))

    @cached_property
    def sent_by_device(self) -> IntArray:
        counted = [count * plan.sent_by_device for plan, count in self.plans]
        return sum(counted, np.zeros(self.source.num_devices, np.int64))

    @cached_property
    def received_by_process(self) -> dict[int, int]:
        return self._by_process("received_by_process", self.target)

    @cached_property
    def sent_by_process(self) -> dict[int, int]:
        return self._by_process("sent_by_process", self.source)

    def _by_process(self, name: str, model: ModelPlan) -> dict[int, int]:
        totals = dict.fromkeys(range(model.num_processes), 0)
        for plan, count in self.plans:
            for process, nbytes in getattr(plan, name).items():
                totals[process] += count * nbytes
        return totals

    def links(self) -> list[Link]:
        totals: Counter[tuple[int, int]] = Counter()
        for plan, count in self.plans:
            for sender, receiver, nbytes in plan.links():
                totals[sender, receiver] += count * nbytes
        links = [Link(*pair, nbytes) for pair, nbytes in totals.items()]
        return sorted(links, key=lambda link: (-link.nbytes, link))

    def processes(self, *, knows_senders: bool) -> list[dict[str, Any]]:
        """Return the bytes of each process that has devices before or after."""
        needed = np.zeros(self.target.num_devices, np.int64)
        for plan, count in self.plans:
            sizes = tiling_of(plan.target).sizes(plan.target.block_ids)
            needed += sizes * (plan.itemsize * count)
        kept = self._of_processes(needed - self.received_by_device)
        received = self._of_processes(self.received_by_device)
        from_others = self.received_by_process
        sent = self.sent_by_process if knows_senders else {}
        return [
            {
                "process": process,
                "nbytes_kept": kept.get(process, 0),
                "nbytes_within": received.get(process, 0) - from_others.get(process, 0),
                "nbytes_received": from_others.get(process, 0),
                "nbytes_sent": sent.get(process, 0) if knows_senders else None,
            }
            for process in range(max(self.source.num_processes, self.target.num_processes))
        ]

    def _of_processes(self, nbytes: IntArray) -> dict[int, int]:
        """Add up the bytes of the devices of each process of the target."""
        totals = nbytes.reshape(-1, self.target.devices_per_process).sum(axis=1)
        return dict(enumerate(totals.tolist()))

    def document(self, listed: ListedMoves) -> dict[str, Any]:
        """Return the document of ``gda reshard --tree --json``."""
        return {
            "source": self.source.document_of_totals(),
            "target": self.target.document_of_totals(),
            **listed.document(),
            "nbytes_peak_per_device": self.nbytes_peak_per_device,
            "nbytes_peak_per_process": self.nbytes_peak_per_process,
            "nbytes_peak_one_by_one": self.nbytes_peak_one_by_one,
            "processes": self.processes(knows_senders=listed.knows_senders)[:LISTED],
            "parameters": [row.document() for row in self.rows],
        }

    # By parameter.

    @cached_property
    def rows(self) -> list[MovesRow]:
        """Parameters that move alike and differ only in numbers in their names."""
        rows = [
            MovesRow(name, group._replace(names=tuple(names)), plan)
            for group, (plan, _) in zip(self.alike, self.plans, strict=True)
            for name, names in with_ranges(group.names)
        ]
        return sorted(rows, key=lambda row: -row.nbytes("between_processes"))


class MovesRow(NamedTuple):
    """A row of ``parameters``; the plan is that of one of them."""

    name: str
    alike: Alike
    plan: ReshardPlan

    @property
    def title(self) -> str:
        """Its name and the number of its parameters."""
        count = len(self.alike.names)
        return f"{self.name} (x{count})" if count > 1 else self.name

    @property
    def is_padded(self) -> bool:
        return self.plan.source.is_padded or self.plan.target.is_padded

    def nbytes(self, kind: str) -> int:
        """Return the bytes of all of them that are kept or move."""
        return len(self.alike.names) * getattr(self.plan, f"nbytes_{kind}")

    def document(self) -> dict[str, Any]:
        kinds = ("kept", "within_processes", "between_processes")
        return {
            "name": self.name,
            "names": list(self.alike.names),
            "count": len(self.alike.names),
            "shape": list(self.plan.source.global_shape),
            "dtype": self.alike.before.dtype.name,
            **{f"nbytes_{kind}": self.nbytes(kind) for kind in kinds},
            "before": layout_for_json(self.plan.source, self.alike.padding(self.plan.source)),
            "after": layout_for_json(self.plan.target, self.alike.padding(self.plan.target)),
        }


def _with_processes(grid: ShardGrid, processes: Processes) -> ShardGrid:
    return ShardGrid(grid.global_shape, grid.mesh_shape, grid.spec, pad=True, process_of=processes)
