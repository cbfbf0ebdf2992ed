"""The description of an offer: its leaves, their layouts, and the addresses of its processes.

The first process of the offering program sends it, as JSON; every value is checked before it is
used, because any program may listen at an address.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from gda.arrays.transport.connection import Address, Deadline
from gda.checkpoint.format.manifest_json import leaves_of_json, to_json
from gda.layout.grid import ShardGrid
from gda.layout.processes import Processes
from gda.layout.spec import Shape, SpecEntry
from gda.layout.strict_json import parse_json
from gda.storage.stores.errors import CorruptionError
from gda.trees.records.recorded_tree import (
    ArrayLeaf,
    Leaf,
    PerProcessLeaf,
    RecordedTree,
    check_structure,
)

_LEAVES_AT_A_TIME = 1000


class OfferProcess(NamedTuple):
    """A process that offers: the address that it listens on, and a text for its machine."""

    address: str
    machine: str

    @property
    def place(self) -> Address:
        return Address.of(self.address)


class MeshOfOffer(NamedTuple):
    """A mesh of the offering program: axis sizes by name, and the process of each device.

    Many leaves have one mesh; ``Processes`` hash and compare their devices once.
    """

    shape: tuple[tuple[str, int], ...]
    processes: Processes


class LayoutOfOffer(NamedTuple):
    """The layout of some arrays: a mesh, by its number, and a spec."""

    mesh: int
    spec: tuple[SpecEntry, ...]


@dataclass(frozen=True)
class Catalog(RecordedTree):
    """The description of one version of an offer; the ``array`` of a leaf is that of its layout."""

    name: str
    run: str
    version: int
    meshes: tuple[MeshOfOffer, ...]
    layouts: tuple[LayoutOfOffer, ...]
    servers: tuple[OfferProcess, ...]

    what: ClassVar[str] = "the offer"
    cast_argument: ClassVar[str] = "dtype="
    missing_argument: ClassVar[str] = ""

    def grid_of(self, leaf: ArrayLeaf) -> ShardGrid:
        """Return the grid of a leaf, with the processes that hold its blocks."""
        assert leaf.array is not None
        layout = self.layouts[leaf.array]
        return _grid(leaf.shape, self.meshes[layout.mesh], layout.spec)

    def to_json(self) -> bytes:
        """Return the catalog as JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields["meshes"] = [(shape, held.process_of.tolist()) for shape, held in self.meshes]
        return to_json(fields).encode()


class LayoutNumbers:
    """The distinct meshes and layouts of a catalog while it is made."""

    def __init__(self, num_processes: int) -> None:
        self._whole = MeshOfOffer((("process", num_processes),), Processes(range(num_processes)))
        self._meshes: dict[MeshOfOffer, int] = {}
        self._layouts: dict[LayoutOfOffer, int] = {}

    def number_of(self, grid: ShardGrid | None) -> int:
        """Return the number of a layout; without a grid, every process has the whole array."""
        mesh, spec = self._whole, ()
        if grid is not None:
            processes = grid.processes or Processes([0] * grid.num_devices)  # None of one process
            mesh, spec = MeshOfOffer((*grid.mesh_shape.items(),), processes), grid.spec
        layout = LayoutOfOffer(self._meshes.setdefault(mesh, len(self._meshes)), spec)
        return self._layouts.setdefault(layout, len(self._layouts))

    @property
    def both(self) -> tuple[tuple[MeshOfOffer, ...], tuple[LayoutOfOffer, ...]]:
        return tuple(self._meshes), tuple(self._layouts)


def catalog_of(text: str, peer: str, deadline: Deadline) -> Catalog:
    """Return the catalog in a JSON text; ``ConnectionError`` if it is not valid."""
    try:
        value = parse_json(text)
        name, run, version = value["name"], value["run"], value["version"]
        if not isinstance(name, str) or not isinstance(run, str) or type(version) is not int:
            raise ValueError("it has no name, no run or no version")
        leaves: list[Leaf] = []
        for first in range(0, len(value["leaves"]), _LEAVES_AT_A_TIME):
            deadline.check(peer)  # many take longer than the puller may wait
            where = f"it, from leaf {first} on," if first else "it"
            leaves += leaves_of_json(value["leaves"][first : first + _LEAVES_AT_A_TIME], where)
        catalog = Catalog(
            leaves=tuple(leaves),
            structure=value["structure"],
            name=name,
            run=run,
            version=version,
            meshes=tuple([_mesh(*mesh) for mesh in value["meshes"]]),
            layouts=tuple([_layout(*layout) for layout in value["layouts"]]),
            servers=tuple([OfferProcess(*server) for server in value["servers"]]),
        )
        deadline.check(peer)
        check_structure(catalog.structure, [leaf.path for leaf in catalog.leaves])
        if any(isinstance(leaf, PerProcessLeaf) for leaf in catalog.leaves):
            raise ValueError("it has values of single processes")
        for process in catalog.servers:
            Address.of(process.address)
        known = {*range(len(catalog.servers))}
        if not all({*mesh.processes.numbers} <= known for mesh in catalog.meshes):
            raise ValueError("a mesh has processes without an address")
        for leaf in catalog.array_leaves:
            deadline.check(peer)
            catalog.grid_of(leaf)  # raises unless its layout fits it
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        reason = error if isinstance(error, CorruptionError) else f"{type(error).__name__}: {error}"
        raise ConnectionError(f"{peer} sent a catalog that is not valid: {reason}") from None
    return catalog


def _mesh(shape: Any, process_of: Any) -> MeshOfOffer:
    sizes = tuple([(axis, size) for axis, size in shape])
    if not all(type(size) is int for _, size in sizes):  # 10**10 * [0] would fill the memory
        raise TypeError(f"a mesh {dict(sizes)!s:.80} has an axis whose size is no integer")
    if math.prod([size for _, size in sizes]) != len(process_of):
        raise ValueError(f"a mesh {dict(sizes)} has {len(process_of)} devices")
    return _first_equal(MeshOfOffer(sizes, Processes(process_of)))


@lru_cache(maxsize=64)
def _first_equal(mesh: MeshOfOffer) -> MeshOfOffer:
    """Return one object for equal meshes, so that the keys of ``_grid`` compare at once."""
    return mesh


def _layout(mesh: Any, spec: Any) -> LayoutOfOffer:
    entries = [tuple(entry) if isinstance(entry, list) else entry for entry in spec]
    return LayoutOfOffer(mesh, tuple(entries))


@lru_cache(maxsize=1024)
def _grid(shape: Shape, mesh: MeshOfOffer, spec: Sequence[SpecEntry]) -> ShardGrid:
    return ShardGrid(shape, dict(mesh.shape), spec, pad=True, process_of=mesh.processes)
