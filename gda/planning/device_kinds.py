"""Kinds of accelerators with the memory of a device, and the meshes over many of them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gda.layout.text import counted, did_you_mean, nearest

_GIB = 2**30
_GB = 10**9
_MOST_DEVICES = 100_000


@dataclass(frozen=True)
class DeviceKind:
    """A kind of accelerator.

    Attributes:
      name: as in names of TPU topologies: ``v5e``; for GPUs such as ``h100``.
      device_kinds: the values of ``jax.Device.device_kind`` that mean it.
      capacity_bytes: the memory that programs have on one JAX device.
      note: a limit that the figure does not contain, in words.
      devices_per_chip: the JAX devices of one chip.
    """

    name: str
    device_kinds: tuple[str, ...]
    capacity_bytes: int
    note: str = ""
    devices_per_chip: int = 1


def _tpu(
    name: str, device_kinds: tuple[str, ...], available: float, per_chip: int = 1
) -> DeviceKind:
    note = "a chip is two devices in JAX; this is the memory of one" if per_chip == 2 else ""
    return DeviceKind(name, device_kinds, int(available * _GIB), note, per_chip)


def _gpu(name: str, device_kinds: tuple[str, ...], gigabytes: int) -> DeviceKind:
    note = "by default JAX takes 75 % of the memory of a GPU; XLA_CLIENT_MEM_FRACTION sets this"
    return DeviceKind(name, device_kinds, gigabytes * _GB, note)


# TPUs: "available HBM" in GiB, in the message of the compiler of libtpu 0.0.50.1 for a program that
# does not fit. It is less than the vendor's figure for a chip (cloud.google.com/tpu/docs), because
# a part is reserved. With the topology v4:2x2x1, that compiler has two devices per chip of
# 15.25 GiB each; JAX on a v4 has one, as with the option chip_config_name="megacore". GPUs: the GB
# on nvidia.com/en-us/data-center.
KINDS = (
    _tpu("v2", ("TPU v2",), 7.48, per_chip=2),
    _tpu("v3", ("TPU v3",), 15.48, per_chip=2),
    _tpu("v4", ("TPU v4",), 30.75),
    _tpu("v5e", ("TPU v5 lite", "TPU v5e"), 15.75),
    _tpu("v5p", ("TPU v5", "TPU v5p"), 95.73),
    _tpu("v6e", ("TPU v6 lite", "TPU v6e"), 31.24),
    _tpu("tpu7x", ("TPU7x",), 94.74, per_chip=2),
    _gpu("a100-40gb", ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"), 40),
    _gpu("a100-80gb", ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"), 80),
    _gpu("h100", ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"), 80),
    _gpu("h200", ("NVIDIA H200",), 141),
    _gpu("b200", ("NVIDIA B200",), 180),
)


def kind_named(name: str) -> DeviceKind:
    """Return the kind of a name, in capitals or not; an error has the known names."""
    known = {kind.name: kind for kind in KINDS}
    if (kind := known.get(name.strip().lower())) is not None:
        return kind
    hint = did_you_mean(nearest(name.strip(), known, 2)) or ";"
    raise ValueError(
        f"no kind of device has the name {name!r:.80}{hint} known are {', '.join(known)}"
    )


def kind_of_device(device_kind: str) -> DeviceKind | None:
    """Return the kind of ``jax.Device.device_kind``; None if it is not in the table."""
    return next((kind for kind in KINDS if device_kind in kind.device_kinds), None)


def num_devices_of(topology: str) -> int:
    """Return the number of devices of a topology; any number for a name that is wrong."""
    name, _, sizes = topology.partition(":")
    per_chip = next((kind.devices_per_chip for kind in KINDS if kind.name == name), 1)
    count = math.prod(map(int, re.findall(r"\d+", sizes))) * per_chip
    if count > _MOST_DEVICES:
        raise ValueError(f"{topology} would have {counted(count, 'device')}")
    return count


def meshes_of(names: Sequence[str], num_devices: int) -> list[dict[str, int]]:
    """Return all meshes with these axes over so many devices."""
    first, *others = names
    if not others:
        return [{first: num_devices}]
    sizes = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    return [
        {first: size, **rest} for size in sizes for rest in meshes_of(others, num_devices // size)
    ]
