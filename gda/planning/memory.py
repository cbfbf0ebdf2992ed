"""The memory of a model on a kind of device: ``gda plan --tree FILE --device KIND``.

With ``--json``, the document of the model has ``memory``, an object with the keys

- ``device``, ``optimizer``: the options, the latter null if it is not given; ``notes``: limits of
  ``nbytes_capacity``, in words;
- ``nbytes_capacity``: the memory that programs have on one device; ``nbytes_parameters``,
  ``nbytes_optimizer``: on one device, with padding; ``nbytes_left``: the rest, negative if there is
  too little; ``fits``: true if it is not negative;
- ``least_devices``: fewer devices are not enough, even if no byte is replicated;
- ``suggestion``: null if all fits, or if none is found; else a change that makes it fit:
  ``mesh``, ``num_devices``, ``specs`` (by the names of parameters, for those that change) and
  ``nbytes_left``. It counts memory, not communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from gda.layout.grid import ShardGrid
from gda.planning.device_kinds import DeviceKind
from gda.planning.model import ModelPlan, ParameterRow
from gda.planning.notation.planned_grid import MAX_DEVICES
from gda.planning.planned_array import spec_for_json

# optax.adam has two arrays like each parameter, of its dtype and sharding, and an int32 that counts
# the steps. (Its argument mu_dtype changes the dtype of the first.)
_COPIES, _COUNTER_BYTES = 2, 4


@dataclass(frozen=True)
class FittingLayout:
    """A layout that fits, on the present mesh or one with a larger axis.

    ``rows`` are the parameters that get their ``better_spec`` on this mesh, ``bytes_left`` is the
    memory that it leaves on a device.
    """

    mesh: Mapping[str, int]
    rows: Sequence[ParameterRow]
    bytes_left: int

    @property
    def num_devices(self) -> int:
        return math.prod(self.mesh.values())

    def document(self) -> dict[str, Any]:
        return {
            "mesh": dict(self.mesh),
            "num_devices": self.num_devices,
            "specs": {row.name: spec_for_json(row.better_spec) for row in self.rows},
            "nbytes_left": self.bytes_left,
        }


@dataclass(frozen=True)
class ModelMemory:
    """The parameters of a model, and the state of an optimizer, in the memory of a device.

    With ``pad``, a suggestion may pad sizes that its mesh does not divide.
    """

    model: ModelPlan
    kind: DeviceKind
    optimizer: str | None
    pad: bool

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the state of the optimizer on one device."""
        return self._optimizer_bytes(self.model.bytes_per_device)

    @property
    def bytes_left(self) -> int:
        """The memory that is left on a device; negative if there is too little."""
        return self._bytes_left(self.model.bytes_per_device)

    @property
    def fits(self) -> bool:
        return self.bytes_left >= 0

    @property
    def least_devices(self) -> int:
        """The fewest devices with enough memory for the model without replicas."""
        everywhere = self.model.nbytes * (1 + _COPIES * (self.optimizer is not None))
        return max(1, -(-everywhere // (self.kind.capacity_bytes - self._optimizer_bytes(0))))

    def _optimizer_bytes(self, parameter_bytes: int) -> int:
        return 0 if self.optimizer is None else _COPIES * parameter_bytes + _COUNTER_BYTES

    def _bytes_left(self, parameter_bytes: int) -> int:
        needed = parameter_bytes + self._optimizer_bytes(parameter_bytes)
        return self.kind.capacity_bytes - needed

    @cached_property
    def suggestion(self) -> FittingLayout | None:
        """A change that makes it fit: of specs if that is enough, else of one axis of the mesh.

        Of several with the same number of devices, it is the one that changes the fewest specs.
        """
        if self.fits:
            return None
        for meshes in ([self.model.mesh], *self._larger_meshes()):
            if found := [*filter(None, map(self._suggestion_on, meshes))]:
                return min(found, key=lambda each: len(each.rows))
        return None

    def _larger_meshes(self) -> Iterator[list[Mapping[str, int]]]:
        """Yield the meshes with one axis 2 times as large, then 4 times, and so on."""
        mesh, factor = self.model.mesh, 2
        while self.model.num_devices * factor <= MAX_DEVICES:
            if self.model.num_devices * factor >= self.least_devices:
                yield [{**mesh, name: size * factor} for name, size in mesh.items()]
            factor *= 2

    def _suggestion_on(self, mesh: Mapping[str, int]) -> FittingLayout | None:
        """Return a layout on a mesh that fits and changes few specs; None if there is none."""
        try:
            rows = [self._on_mesh(row, mesh) for row in self.model.rows]
        except ValueError:  # a size that the mesh does not divide
            return None
        parameter_bytes = sum(row.bytes_per_device for row in rows)
        changed: list[ParameterRow] = []
        for row in sorted(rows, key=lambda row: -row.bytes_saved_per_device):
            if self._bytes_left(parameter_bytes) >= 0:
                break
            changed.append(row)
            parameter_bytes -= row.bytes_saved_per_device
        left = self._bytes_left(parameter_bytes)
        return FittingLayout(mesh, changed, left) if left >= 0 else None

    def _on_mesh(self, row: ParameterRow, mesh: Mapping[str, int]) -> ParameterRow:
        grid = row.parameter.grid
        grid = ShardGrid(grid.global_shape, mesh, grid.spec, pad=self.pad)
        return replace(row, parameter=replace(row.parameter, grid=grid))

    def document(self) -> dict[str, Any]:
        """Return its part of the document of ``--json``."""
        return {
            "device": self.kind.name,
            "optimizer": self.optimizer,
            "notes": [self.kind.note] if self.kind.note else [],
            "nbytes_capacity": self.kind.capacity_bytes,
            "nbytes_parameters": self.model.bytes_per_device,
            "nbytes_optimizer": self.optimizer_bytes,
            "nbytes_left": self.bytes_left,
            "fits": self.fits,
            "least_devices": self.least_devices,
            "suggestion": self.suggestion.document() if self.suggestion else None,
        }
