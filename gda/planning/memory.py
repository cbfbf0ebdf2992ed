"""The memory of a model on a kind of device: ``gda plan --tree FILE --device KIND``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gda.planning.device_kinds import DeviceKind
from gda.planning.model import ModelPlan

# optax.adam and optax.adamw have two arrays like each parameter, of its dtype and sharding, and an
# int32 that counts the steps. (Their argument mu_dtype changes the dtype of the first.)
_COPIES, _COUNTER_BYTES = 2, 4


@dataclass(frozen=True)
class ModelMemory:
    """The parameters of a model, and the state of an optimizer, in the memory of a device."""

    model: ModelPlan
    kind: DeviceKind
    optimizer: str | None

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the state of the optimizer on one device."""
        return self._optimizer_bytes(self.model.bytes_per_device)

    @property
    def bytes_left(self) -> int:
        """The memory that is left on a device; negative if there is too little."""
        return self.kind.capacity_bytes - self.model.bytes_per_device - self.optimizer_bytes

    @property
    def fits(self) -> bool:
        return self.bytes_left >= 0

    @property
    def least_devices(self) -> int:
        """The fewest devices with enough memory for the model without replicas."""
        on_devices = sum(parameter.nbytes for parameter in self.model.on_devices)
        everywhere = on_devices * (1 + _COPIES * (self.optimizer is not None))
        return max(1, -(-everywhere // (self.kind.capacity_bytes - self._optimizer_bytes(0))))

    def _optimizer_bytes(self, parameter_bytes: int) -> int:
        return 0 if self.optimizer is None else _COPIES * parameter_bytes + _COUNTER_BYTES

    def document(self) -> dict[str, Any]:
        """Return its part of the document of ``--json``.

        ``nbytes_parameters`` and ``nbytes_optimizer`` are of one device, with padding;
        ``nbytes_left`` is below 0 if there is too little. With fewer than ``least_devices``, the
        model does not fit even if no byte is replicated.
        """
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
        }
