"""Kinds of accelerators with their memory and speeds, and the meshes over many of them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gda.layout.text import counted, did_you_mean, nearest
from gda.planning.device_speeds import DeviceSpeeds, Fit, Measured
from gda.planning.notation.mistakes import MistakesError

_MIB, _GIB, _TERA, _GIGA = 2**20, 2**30, 10**12, 10**9
_MOST_DEVICES = 100_000


@dataclass(frozen=True)
class GpuFacts:
    """The facts about a GPU that its compiler needs beside its memory.

    Attributes:
      cores: its streaming multiprocessors.
      fpus_per_core, clock_ghz: units for float32 of each, and their greatest clock.
      cache_bytes: of the level-2 cache.
      shared_bytes_per_core, shared_bytes_per_block: shared memory; per block the most that a kernel
        may ask for.
      compute_capability: the major and the minor number.
      threads_per_core: the most at once.
    """

    cores: int
    fpus_per_core: int
    clock_ghz: float
    cache_bytes: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int
    compute_capability: tuple[int, int]
    threads_per_core: int = 2048


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
      smallest_ring: the chips that a dimension of a slice needs to close to a ring; in three
        dimensions all close or none. 0 for a GPU.
      gpu: more facts about a GPU; None for a TPU.
    """

    name: str
    device_kinds: tuple[str, ...]
    memory_bytes: int
    memory_bandwidth: int | None = None
    speeds: DeviceSpeeds | None = None
    devices_per_chip: int = 1
    dimensions: int = 0
    smallest_ring: int = 0
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


def _tpu(
    name: str,
    *device_kinds: str,
    gib: float,
    bandwidth: int,
    teraflops: Mapping[str, float],
    ici: float,
    dcn: float,
    clock_ghz: float,
    measured: Measured | None = None,
    per_chip: int = 1,
    dimensions: int = 2,
    smallest_ring: int = 16,
    die_link: float | None = None,
) -> DeviceKind:
    """Return a row; ``ici``, ``dcn`` and ``die_link`` in GB/s and one direction."""
    bf16 = teraflops["bf16"]
    passes = {"f32": bf16, "f32.high": bf16 / 3, "f32.highest": bf16 / 6}
    speeds = DeviceSpeeds(
        {dtype: each * _TERA for dtype, each in (passes | dict(teraflops)).items()},
        link=ici * _GIGA,
        slow_link=dcn * _GIGA,
        measured=measured or _TPU_MEASURED,
        links=2 * dimensions,
        die_link=None if die_link is None else die_link * _GIGA,
        hop_seconds=1e-6,
        kernel_seconds=1.5e-6,
        clock_hz=clock_ghz * _GIGA,
    )
    torus = (per_chip, dimensions, smallest_ring)
    return DeviceKind(name, device_kinds, int(gib * _GIB), bandwidth * _GIGA, speeds, *torus)


def _gpu(
    name: str,
    *device_kinds: str,
    memory: tuple[int, int],
    teraflops: Mapping[str, float],
    links: Mapping[str, float],
    measured: Measured,
    gpu: GpuFacts,
) -> DeviceKind:
    """Return a row; ``links`` in GB/s and one direction: ``nvlink`` or ``pcie``, and ``nic``."""
    speeds = DeviceSpeeds(
        {dtype: each * _TERA for dtype, each in teraflops.items()},
        link=(links.get("nvlink") or links["pcie"]) * _GIGA,
        slow_link=links["nic"] * _GIGA,
        measured=measured,
        peer_link=links["bridge"] * _GIGA if "bridge" in links else None,
        reduces_in_switch="nvlink" in links and gpu.compute_capability >= (9, 0),
    )
    return DeviceKind(name, device_kinds, *memory, speeds, gpu=gpu)


def _teraflops(
    bf16: float, tf32: float, f32: float, f8: float = 0, s8: float = 0, f4: float = 0
) -> dict[str, float]:
    figures = {"bf16": bf16, "f32": tf32, "f32.highest": f32, "f8": f8, "s8": s8, "f4": f4}
    return {dtype: each for dtype, each in figures.items() if each}


def _a100(
    name: str, device_kind: str, memory: tuple[int, int], *, is_pcie: bool = False
) -> DeviceKind:
    over_pcie = {"pcie": 32, "bridge": 300}
    return _gpu(
        *(name, device_kind),
        memory=memory,
        teraflops=_teraflops(312, 156, 19.5, s8=624),
        links={**(over_pcie if is_pcie else {"nvlink": 300}), "nic": 25},
        measured=Measured(0.81, 0.91, _PCIE) if is_pcie else Measured(0.87, 0.91, _NVLINK3),
        gpu=GpuFacts(108, 64, 1.41, 40 * _MIB, 167_936, 166_912, (8, 0)),
    )


def _hopper(cores: int, clock_ghz: float, cache_mib: int = 50) -> GpuFacts:
    return GpuFacts(cores, 128, clock_ghz, cache_mib * _MIB, 233_472, 232_448, (9, 0))


def _blackwell(cores: int, clock_ghz: float, cache_bytes: int, minor: int = 0) -> GpuFacts:
    return GpuFacts(cores, 128, clock_ghz, cache_bytes, 233_472, 232_448, (10, minor))


def _small(cores: int, clock_ghz: float, cache_mib: int, capability: tuple[int, int]) -> GpuFacts:
    return GpuFacts(
        cores, 128, clock_ghz, cache_mib * _MIB, 131_072, 101_376, capability, threads_per_core=1536
    )


# Measured parts. Products: the best of many shapes, github.com/stas00/ml-engineering
# (compute/accelerator). Collectives between GPUs: the table of measured collectives in XLA's
# compiler for GPUs, as a start and a rate; each rate is the bus bandwidth at 1 GiB, 2(n-1)/n of an
# all-reduce and (n-1)/n of the others, over the published link. A rate of NCCL on A100 is that of
# github.com/NVIDIA/nccl-tests/issues/178. v6e and tpu7x: products, memory and all-gathers of
# github.com/AI-Hypercomputer/tpu-recipes (microbenchmarks). Where nothing was measured it is the
# figure of the nearest kind: all other TPUs, collectives of v6e, GH200, H20, B300 and GB300, all of
# L4, L40S and RTX PRO 6000, and each start over PCIe.
_ICI = {"any": (Fit(2, 2e-6, 0.9),)}
_TPU_MEASURED = Measured(0.9, 0.85, _ICI)
_NVLINK4 = {
    "any": (Fit(2, 15e-6, 0.60), Fit(4, 17e-6, 0.72), Fit(8, 30e-6, 0.76)),
    "all-reduce": (Fit(2, 20e-6, 0.54), Fit(4, 35e-6, 0.66), Fit(8, 38e-6, 0.88)),
    "reduce-scatter": (Fit(2, 20e-6, 0.72),),
    "all-to-all": (Fit(2, 33e-6, 0.75),),
}
_NVLINK3 = {"any": (Fit(2, 30e-6, 0.74),)}
_NVLINK5 = {
    "any": (Fit(8, 34e-6, 0.66), Fit(64, 82e-6, 0.74)),
    "all-reduce": (Fit(8, 50e-6, 0.67), Fit(64, 100e-6, 0.83)),
    "reduce-scatter": (Fit(8, 34e-6, 0.71), Fit(64, 82e-6, 0.78)),
    "all-to-all": (Fit(8, 36e-6, 0.67), Fit(64, 82e-6, 0.71)),
}
_PCIE = {"any": (Fit(2, 30e-6, 0.81),)}

# The memory of TPUs: "available HBM" in GiB, in the message of the compiler of libtpu 0.0.50.1 for
# a program that does not fit. It is less than the vendor's figure for a chip
# (cloud.google.com/tpu/docs), because a part is reserved. With the topology v4:2x2x1, that compiler
# has two devices per chip of 15.25 GiB each; JAX on a v4 has one, as with the option
# chip_config_name="megacore".
#
# Speeds of TPUs: docs.cloud.google.com/tpu/docs, the page of each kind; half of a chip is a device
# of v2, v3 and tpu7x. A link of ICI has half of its bandwidth in each direction. Of v2 and v3 the
# links are those of the paper "A domain-specific supercomputer for training deep neural networks"
# and of jax-ml.github.io/scaling-book; types of 8 and 4 bits where the pages have none, and the
# products of v2, are those of jax.experimental.pallas.tpu.get_tpu_info. The network between slices
# is the bandwidth per chip of the data center network; v2, v3 and v4: 25 GB/s a host, as that book
# has it. Between the two dies of a tpu7x: six times a link, of one page alone. Clocks are not
# published: they follow from the products and the number of matrix units.
#
# Memory and bandwidth of GPUs: as the CUDA driver reports them; XLA's repository has these figures,
# in xla/backends/gpu/target_config. Those of h200, gh200, h20, l4, l40s, rtx6000pro and b300 are of
# nvidia-smi, because the ones there are more than that, or absent. Products: NVIDIA's data sheets,
# without sparsity; those of H20 and RTX PRO 6000 are of other pages. Half of the NVLink bandwidth
# goes in each direction. Between hosts, it is the network adapter that a DGX has for each GPU; one
# that NVIDIA sells in no such system has that of its PCIe slot. A rack of GB200 or GB300 counts as
# a host, as NVLink connects it.
KINDS = (
    _tpu(
        *("v2", "TPU v2"),
        gib=7.48,
        bandwidth=350,
        teraflops={"bf16": 46 / 2},
        ici=62,
        dcn=25 / 8,
        clock_ghz=0.70,
        per_chip=2,
    ),
    _tpu(
        *("v3", "TPU v3"),
        gib=15.48,
        bandwidth=450,
        teraflops={"bf16": 123 / 2},
        ici=100,
        dcn=25 / 8,
        clock_ghz=0.94,
        per_chip=2,
        smallest_ring=32,
    ),
    _tpu(
        *("v4", "TPU v4"),
        gib=30.75,
        bandwidth=1200,
        teraflops={"bf16": 275, "s8": 275},
        ici=47,
        dcn=25 / 4,
        clock_ghz=1.05,
        dimensions=3,
        smallest_ring=4,
    ),
    _tpu(
        *("v5e", "TPU v5 lite", "TPU v5e"),
        gib=15.75,
        bandwidth=819,
        teraflops={"bf16": 197, "s8": 394, "s4": 788},
        ici=50,
        dcn=25 / 8,
        clock_ghz=1.50,
    ),
    _tpu(
        *("v5p", "TPU v5", "TPU v5p"),
        gib=95.73,
        bandwidth=2765,
        teraflops={"bf16": 459, "f8": 459, "s8": 918, "s4": 1840},
        ici=100,
        dcn=50 / 8,
        clock_ghz=1.75,
        dimensions=3,
        smallest_ring=4,
    ),
    _tpu(
        *("v6e", "TPU v6 lite"),
        gib=31.24,
        bandwidth=1640,
        teraflops={"bf16": 918, "f8": 918, "s8": 1836, "s4": 3680},
        ici=100,
        dcn=100 / 8,
        clock_ghz=1.75,
        measured=Measured(0.90, 0.83, _ICI),
    ),
    _tpu(
        *("tpu7x", "TPU7x"),
        gib=94.74,
        bandwidth=3690,
        teraflops={"bf16": 2307 / 2, "f8": 4614 / 2},
        ici=100,
        dcn=50 / 8,
        clock_ghz=2.2,
        measured=Measured(0.83, 0.87, _ICI),
        per_chip=2,
        dimensions=3,
        smallest_ring=4,
        die_link=600,
    ),
    _a100("a100-40", "NVIDIA A100-SXM4-40GB", (42_331_013_120, 1_555_200_000_000)),
    _a100(
        "a100-40-pcie", "NVIDIA A100-PCIE-40GB", (42_331_013_120, 1_555_200_000_000), is_pcie=True
    ),
    _a100("a100", "NVIDIA A100-SXM4-80GB", (85_100_068_864, 2_039_040_000_000)),
    _a100("a100-pcie", "NVIDIA A100 80GB PCIe", (85_100_068_864, 1_935_000_000_000), is_pcie=True),
    _gpu(
        *("h100", "NVIDIA H100 80GB HBM3"),
        memory=(84_942_979_072, 3_352_320_000_000),
        teraflops=_teraflops(989.4, 494.7, 66.9, f8=1979, s8=1979),
        links={"nvlink": 450, "nic": 50},
        measured=Measured(0.80, 0.93, _NVLINK4),
        gpu=_hopper(132, 1.98),
    ),
    _gpu(
        *("h100-pcie", "NVIDIA H100 PCIe"),
        memory=(84_942_979_072, 2_039_040_000_000),
        teraflops=_teraflops(756, 378, 51, f8=1513, s8=1513),
        links={"pcie": 64, "bridge": 300, "nic": 50},
        measured=Measured(0.80, 0.93, _PCIE),
        gpu=_hopper(114, 1.755),
    ),
    _gpu(
        *("h200", "NVIDIA H200"),
        memory=(143_771 * _MIB, 4_800_000_000_000),
        teraflops=_teraflops(989.4, 494.7, 66.9, f8=1979, s8=1979),
        links={"nvlink": 450, "nic": 50},
        measured=Measured(0.80, 0.93, _NVLINK4),
        gpu=_hopper(132, 1.98),
    ),
    _gpu(
        *("gh200", "NVIDIA GH200 480GB", "NVIDIA GH200 120GB"),
        memory=(97_871 * _MIB, 4_000_000_000_000),
        teraflops=_teraflops(989.4, 494.7, 66.9, f8=1979, s8=1979),
        links={"nvlink": 450, "nic": 50},
        measured=Measured(0.84, 0.93, _NVLINK4),
        gpu=_hopper(132, 1.98),
    ),
    _gpu(
        *("h20", "NVIDIA H20"),
        memory=(97_871 * _MIB, 4_000_000_000_000),
        teraflops=_teraflops(148, 74, 44, f8=296, s8=296),
        links={"nvlink": 450, "nic": 50},
        measured=Measured(0.80, 0.93, _NVLINK4),
        gpu=_hopper(78, 1.98, cache_mib=60),
    ),
    _gpu(
        *("b200", "NVIDIA B200"),
        memory=(191_514_411_008, 7_672_320_000_000),
        teraflops=_teraflops(2250, 1125, 80, f8=4500, s8=4500, f4=9000),
        links={"nvlink": 900, "nic": 50},
        measured=Measured(0.78, 0.90, _NVLINK5),
        gpu=_blackwell(148, 1.965, 132_644_864),
    ),
    _gpu(
        *("gb200", "NVIDIA GB200"),
        memory=(197_897_748_480, 7_928_064_000_000),
        teraflops=_teraflops(2500, 1250, 80, f8=5000, s8=5000, f4=10_000),
        links={"nvlink": 900, "nic": 50},
        measured=Measured(0.73, 0.90, _NVLINK5),
        gpu=_blackwell(152, 2.062, 135_528_448),
    ),
    _gpu(
        *("b300", "NVIDIA B300 SXM6 AC"),
        memory=(275_040 * _MIB, 7_672_320_000_000),
        teraflops=_teraflops(2250, 1125, 80, f8=4500, s8=160, f4=14_000),
        links={"nvlink": 900, "nic": 100},
        measured=Measured(0.79, 0.90, _NVLINK5),
        gpu=_blackwell(148, 1.965, 132_644_864, minor=3),
    ),
    _gpu(
        *("gb300", "NVIDIA GB300"),
        memory=(297_021_079_552, 7_928_064_000_000),
        teraflops=_teraflops(2500, 1250, 80, f8=5000, s8=165, f4=15_000),
        links={"nvlink": 900, "nic": 100},
        measured=Measured(0.79, 0.90, _NVLINK5),
        gpu=_blackwell(152, 2.07, 135_528_448, minor=3),
    ),
    _gpu(
        *("l4", "NVIDIA L4"),
        memory=(23_034 * _MIB, 300_000_000_000),
        teraflops=_teraflops(121, 60, 30.3, f8=242, s8=242),
        links={"pcie": 32, "nic": 32},
        measured=Measured(0.80, 0.90, _PCIE),
        gpu=_small(58, 2.04, 48, (8, 9)),
    ),
    _gpu(
        *("l40s", "NVIDIA L40S"),
        memory=(46_068 * _MIB, 864_000_000_000),
        teraflops=_teraflops(362, 183, 91.6, f8=733, s8=733),
        links={"pcie": 32, "nic": 32},
        measured=Measured(0.80, 0.90, _PCIE),
        gpu=_small(142, 2.52, 96, (8, 9)),
    ),
    _gpu(
        "rtx6000pro",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        memory=(97_887 * _MIB, 1_792_000_000_000),
        teraflops=_teraflops(500, 250, 125, f8=1000, s8=1000, f4=2000),
        links={"pcie": 64, "nic": 64},
        measured=Measured(0.80, 0.90, _PCIE),
        gpu=_small(188, 2.6, 128, (12, 0)),
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
