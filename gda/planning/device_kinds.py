"""Kinds of accelerators with their memory and speeds, and the meshes over many of them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gda.layout.text import counted, did_you_mean, nearest
from gda.planning.notation.mistakes import MistakesError

_GIB, _TERA, _GIGA = 2**30, 10**12, 10**9
_MOST_DEVICES = 100_000


class DeviceSpeeds(NamedTuple):
    """The greatest speeds of one JAX device, as its vendor publishes them.

    Attributes:
      flops: floating-point operations per second in dense products of bfloat16.
      link: bytes per second that it sends over its links within a slice or a host.
      slow_link: the same between slices or hosts.
    """

    flops: float
    link: float
    slow_link: float


@dataclass(frozen=True)
class GpuFacts:
    """The facts about a GPU that its compiler needs beside its memory.

    Attributes:
      cores: its streaming multiprocessors.
      fpus_per_core, clock_ghz: units for float32 of each, and their greatest clock.
      cache_bytes: of the level-2 cache.
      shared_bytes_per_core, shared_bytes_per_block: shared memory; per block the most that a kernel
        may ask for.
      compute_capability: the major number; the minor one is 0.
    """

    cores: int
    fpus_per_core: int
    clock_ghz: float
    cache_bytes: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int
    compute_capability: int


@dataclass(frozen=True)
class DeviceKind:
    """A kind of accelerator.

    Attributes:
      name: as in names of topologies: ``v5e``, ``h100``.
      device_kinds: the values of ``jax.Device.device_kind`` that mean it.
      memory_bytes: the memory of one JAX device, without a part that is reserved on TPUs.
      memory_bandwidth: bytes per second of one JAX device; None if no figure is here.
      speeds: None if no figures are here.
      devices_per_chip: the JAX devices of one chip.
      dimensions: of the torus that links its chips; 0 for a GPU.
      gpu: more facts about a GPU; None for a TPU.
    """

    name: str
    device_kinds: tuple[str, ...]
    memory_bytes: int
    memory_bandwidth: int | None = None
    speeds: DeviceSpeeds | None = None
    devices_per_chip: int = 1
    dimensions: int = 0
    gpu: GpuFacts | None = None

    @property
    def capacity_bytes(self) -> int:
        """The memory that programs have on one JAX device."""
        return self.memory_bytes if self.gpu is None else gpu_capacity(self.memory_bytes)

    @property
    def note(self) -> str:
        """A limit that the figure of the memory does not contain, in words."""
        if self.gpu is not None:
            return (
                "JAX takes this part of the memory; XLA_CLIENT_MEM_FRACTION sets it, by default "
                "0.75"
            )
        is_half = self.devices_per_chip == 2
        return "a chip is two devices in JAX; this is the memory of one" if is_half else ""


def gpu_capacity(memory_bytes: int) -> int:
    """Return the part of the memory of a GPU that JAX takes: by default 75 %.

    The environment sets another part, here as on the GPU.
    """
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    given = next((os.environ[name] for name in names if os.environ.get(name)), "0.75")
    try:
        return int(memory_bytes * float(given))
    except ValueError:
        raise MistakesError(
            f"XLA_CLIENT_MEM_FRACTION must be a number such as 0.9, not {given!r:.80}"
        ) from None


def _speeds(teraflops: float, link: float, slow_link: float) -> DeviceSpeeds:
    return DeviceSpeeds(teraflops * _TERA, link * _GIGA, slow_link * _GIGA)


def _tpu(
    name: str,
    *device_kinds: str,
    gib: float,
    bandwidth: int,
    speeds: DeviceSpeeds | None = None,
    per_chip: int = 1,
    dimensions: int = 2,
) -> DeviceKind:
    return DeviceKind(
        name, device_kinds, int(gib * _GIB), bandwidth * _GIGA, speeds, per_chip, dimensions
    )


def _gpu(
    name: str,
    *device_kinds: str,
    memory: tuple[int, int],
    speeds: DeviceSpeeds | None,
    gpu: GpuFacts,
) -> DeviceKind:
    return DeviceKind(name, device_kinds, *memory, speeds, gpu=gpu)


_AMPERE = GpuFacts(108, 64, 1.41, 40 * 2**20, 167_936, 166_912, 8)


def _hopper(cores: int, clock_ghz: float) -> GpuFacts:
    return GpuFacts(cores, 128, clock_ghz, 50 * 2**20, 233_472, 232_448, 9)


def _blackwell(cores: int, clock_ghz: float, cache_bytes: int) -> GpuFacts:
    return GpuFacts(cores, 128, clock_ghz, cache_bytes, 233_472, 232_448, 10)


# The memory of TPUs: "available HBM" in GiB, in the message of the compiler of libtpu 0.0.50.1 for
# a program that does not fit. It is less than the vendor's figure for a chip
# (cloud.google.com/tpu/docs), because a part is reserved. With the topology v4:2x2x1, that compiler
# has two devices per chip of 15.25 GiB each; JAX on a v4 has one, as with the option
# chip_config_name="megacore". Memory and bandwidth of GPUs: as the CUDA driver reports them; XLA's
# repository has these figures, in xla/backends/gpu/target_config; those of h200 and gh200 are of
# nvidia-smi, because the ones there are more than that, or absent.
#
# Speeds of TPUs: docs.cloud.google.com/tpu/docs/v5e and /tpu7x, which compares generations. Half of
# the ICI bandwidth there goes in each direction, and on a tpu7x half of a chip is a device. Between
# slices, the figure is the bandwidth per chip of the data center network; that of the memory is of
# the same pages, of one device. GPUs, as SXM modules, the
# fastest of each kind: NVIDIA's data sheets of A100, H100, H200, HGX B200 and GB200 NVL72; without
# sparsity, and half of the NVLink bandwidth in each direction. Between hosts, it is the network
# adapter that a DGX has for each GPU: 200 Gbit/s with A100, else 400. A rack of GB200 counts as a
# host, as NVLink connects it.
KINDS = (
    _tpu("v2", "TPU v2", gib=7.48, bandwidth=350, per_chip=2),
    _tpu("v3", "TPU v3", gib=15.48, bandwidth=450, per_chip=2),
    _tpu("v4", "TPU v4", gib=30.75, bandwidth=1200, dimensions=3),
    _tpu(
        "v5e", "TPU v5 lite", "TPU v5e", gib=15.75, bandwidth=819, speeds=_speeds(197, 200, 25 / 8)
    ),
    _tpu(
        "v5p",
        "TPU v5",
        "TPU v5p",
        gib=95.73,
        bandwidth=2765,
        speeds=_speeds(459, 600, 50 / 8),
        dimensions=3,
    ),
    _tpu(
        "v6e",
        "TPU v6 lite",
        "TPU v6e",
        gib=31.24,
        bandwidth=1640,
        speeds=_speeds(918, 400, 100 / 8),
    ),
    _tpu(
        *("tpu7x", "TPU7x"),
        gib=94.74,
        bandwidth=3690,
        speeds=_speeds(2307 / 2, 300, 50 / 8),
        per_chip=2,
        dimensions=3,
    ),
    _gpu(
        *("a100-40", "NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        memory=(42_331_013_120, 1_555_200_000_000),
        speeds=_speeds(312, 300, 25),
        gpu=_AMPERE,
    ),
    _gpu(
        *("a100", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
        memory=(85_100_068_864, 2_039_040_000_000),
        speeds=_speeds(312, 300, 25),
        gpu=_AMPERE,
    ),
    _gpu(
        *("h100", "NVIDIA H100 80GB HBM3"),
        memory=(84_942_979_072, 3_352_320_000_000),
        speeds=_speeds(989, 450, 50),
        gpu=_hopper(132, 1.98),
    ),
    _gpu(
        *("h100-pcie", "NVIDIA H100 PCIe"),
        memory=(84_942_979_072, 2_039_040_000_000),
        speeds=None,
        gpu=_hopper(114, 1.755),
    ),
    _gpu(
        *("h200", "NVIDIA H200"),
        memory=(143_771 * 2**20, 4_800_000_000_000),
        speeds=_speeds(989, 450, 50),
        gpu=_hopper(132, 1.98),
    ),
    _gpu(
        *("gh200", "NVIDIA GH200 480GB", "NVIDIA GH200 120GB"),
        memory=(97_871 * 2**20, 4_000_000_000_000),
        speeds=_speeds(989, 450, 50),
        gpu=_hopper(132, 1.98),
    ),
    _gpu(
        *("b200", "NVIDIA B200"),
        memory=(191_514_411_008, 7_672_320_000_000),
        speeds=_speeds(2250, 900, 50),
        gpu=_blackwell(148, 1.965, 132_644_864),
    ),
    _gpu(
        *("gb200", "NVIDIA GB200"),
        memory=(197_897_748_480, 7_928_064_000_000),
        speeds=_speeds(2500, 900, 50),
        gpu=_blackwell(152, 2.062, 135_528_448),
    ),
)


# Names of kinds that people use and libtpu does not know.
OTHER_NAMES = {"v7x": "tpu7x", "ironwood": "tpu7x", "trillium": "v6e"}


def kind_named(name: str) -> DeviceKind:
    """Return the kind of a name, in capitals or not; an error has the known names."""
    known = {kind.name: kind for kind in KINDS}
    if (kind := known.get(name.strip().lower())) is not None:
        return kind
    meant = OTHER_NAMES.get(name.strip().lower())
    hint = did_you_mean([meant] if meant else nearest(name.strip(), known, 2)) or ";"
    raise ValueError(
        f"no kind of device has the name {name!r:.80}{hint} known are {', '.join(known)}"
    )


def kind_of_device(device_kind: str) -> DeviceKind | None:
    """Return the kind of ``jax.Device.device_kind``; None if it is not in the table."""
    return next((kind for kind in KINDS if device_kind in kind.device_kinds), None)


def is_on_host(memory_kind: str | None) -> bool:
    """Return True for the memory of a host; None is the default memory of the devices."""
    return memory_kind is not None and memory_kind.endswith("host")


def speeds_of_device(device_kind: str) -> DeviceSpeeds | None:
    """Return the speeds of ``jax.Device.device_kind``; None if they are not in the table."""
    kind = kind_of_device(device_kind)
    return None if kind is None else kind.speeds


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
