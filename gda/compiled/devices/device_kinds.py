"""Kinds of accelerators with their memory and speeds, and the meshes over many of them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gda.compiled.devices.device_speeds import DeviceSpeeds, Fit, Measured
from gda.layout.text import counted, did_you_mean, nearest

_MIB, _GIB, _TERA, _GIGA = 2**20, 2**30, 10**12, 10**9
_MOST_DEVICES = 100_000
_MOST_TRIED = 1024


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


def gpu_capacity(memory_bytes: int) -> int:
    """Return the part of a GPU's memory that JAX takes: 75 %, or as the environment sets it."""
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    given = next((os.environ[name] for name in names if os.environ.get(name)), "0.75")
    try:
        return int(memory_bytes * float(given))
    except ValueError:
        raise ValueError(
            f"XLA_CLIENT_MEM_FRACTION must be a number such as 0.9, not {given!r:.80}"
        ) from None


class _Chip(NamedTuple):
    """A GPU without its memory and links; ``teraflops`` by type."""

    teraflops: Mapping[str, float]
    facts: GpuFacts


class _GpuLinks(NamedTuple):
    """The links of a GPU, in GB/s and one direction, and what was measured of collectives.

    ``to_others`` goes over NVLink or PCIe, ``to_hosts`` over its network adapter, and ``bridge`` to
    one other GPU. Switches that ``add`` do so in all-reduces.
    """

    to_others: float
    to_hosts: float
    collectives: Mapping[str, tuple[Fit, ...]]
    add: bool = False
    bridge: float | None = None


def _tpu(
    name: str,
    device_kinds: str,
    gib: float,
    bandwidth: int,
    teraflops: Mapping[str, float],
    ici: float,
    dcn: float,
    clock_ghz: float,
    *,
    parts: tuple[float, float] = (0.9, 0.85),
    per_chip: int = 1,
    dimensions: int = 2,
    smallest_ring: int | None = None,
    die_link: float | None = None,
) -> DeviceKind:
    """Return a row; rates are in GB/s and one direction, ``device_kinds`` between commas."""
    bf16 = teraflops["bf16"]
    passes = {"f32": bf16, "f32.high": bf16 / 3, "f32.highest": bf16 / 6}
    speeds = DeviceSpeeds(
        {dtype: each * _TERA for dtype, each in (passes | dict(teraflops)).items()},
        link=ici * _GIGA,
        slow_link=dcn * _GIGA,
        measured=Measured(parts[0], *parts, {"any": (Fit(2, 2e-6, 0.9),)}),
        links=2 * dimensions,
        die_link=None if die_link is None else die_link * _GIGA,
        hop_seconds=1e-6,
        kernel_seconds=1.5e-6,
        clock_hz=clock_ghz * _GIGA,
    )
    return DeviceKind(
        name,
        tuple(device_kinds.split(", ")),
        memory_bytes=int(gib * _GIB),
        memory_bandwidth=bandwidth * _GIGA,
        speeds=speeds,
        devices_per_chip=per_chip,
        dimensions=dimensions,
        smallest_ring=smallest_ring or (16 if dimensions == 2 else 4),
    )


def _gpu(
    name: str,
    device_kinds: str,
    memory_bytes: int,
    bandwidth: float,
    chip: _Chip,
    links: _GpuLinks,
    parts: tuple[float, float],
) -> DeviceKind:
    """Return a row; ``bandwidth`` in GB/s, ``parts`` are those of ``Measured``."""
    speeds = DeviceSpeeds(
        {dtype: each * _TERA for dtype, each in chip.teraflops.items()},
        link=links.to_others * _GIGA,
        slow_link=links.to_hosts * _GIGA,
        measured=Measured(
            parts[0], _ATTENTION * parts[0], parts[1], links.collectives, _ON_SEVERAL
        ),
        peer_link=links.bridge and links.bridge * _GIGA,
        reduces_in_switch=links.add,
    )
    names = tuple(f"NVIDIA {each}" for each in device_kinds.split(", "))
    bandwidth_bytes = round(bandwidth * _GIGA)
    return DeviceKind(name, names, memory_bytes, bandwidth_bytes, speeds, gpu=chip.facts)


def _teraflops(bf16: float, tf32: float, f32: float, **narrow: float) -> dict[str, float]:
    return {"bf16": bf16, "f32": tf32, "f32.highest": f32, **narrow}


def _hopper(teraflops: Mapping[str, float], cores: int, ghz: float, cache_mib: int = 50) -> _Chip:
    facts = GpuFacts(cores, 128, ghz, cache_mib * _MIB, 233_472, 232_448, (9, 0))
    return _Chip(teraflops, facts)


def _blackwell(
    teraflops: Mapping[str, float], cores: int, ghz: float, cache_bytes: int, minor: int = 0
) -> _Chip:
    facts = GpuFacts(cores, 128, ghz, cache_bytes, 233_472, 232_448, (10, minor))
    return _Chip(teraflops, facts)


def _small(
    teraflops: Mapping[str, float],
    cores: int,
    ghz: float,
    cache_mib: int,
    capability: tuple[int, int],
) -> _Chip:
    cache = cache_mib * _MIB
    return _Chip(teraflops, GpuFacts(cores, 128, ghz, cache, 131_072, 101_376, capability, 1536))


# Attention of cuDNN, as a part of the best products: 595 to 617 TFLOP/s forward on one H100, for
# heads of 128 and 2,048 to 16,384 tokens: arXiv 2407.08608. FlashAttention-2 on A100 has 50 % to
# 73 % of the peak: arXiv 2307.08691.
_ATTENTION = 0.75
# Products of a step on several GPUs, as a part of those on one, of which the kernels of NCCL take
# multiprocessors: from the steps that docs/step-times.md calls fits. Products of H100 and H200: of
# an H100 that was measured here; of h100-96, from such a step.
_ON_SEVERAL = 0.78

# Measured parts. Products: the best of many shapes, github.com/stas00/ml-engineering
# (compute/accelerator). Collectives between GPUs: the table of measured collectives in XLA's
# compiler for GPUs, as a start and a rate; each rate is the bus bandwidth at 1 GiB, 2(n-1)/n of an
# all-reduce and (n-1)/n of the others, over the published link. A rate of NCCL on A100 is that of
# github.com/NVIDIA/nccl-tests/issues/178. v6e and tpu7x: products, memory and all-gathers of
# github.com/AI-Hypercomputer/tpu-recipes (microbenchmarks). Where nothing was measured it is the
# figure of the nearest kind: all other TPUs, collectives of v6e, GH200, H20, B300 and GB300, all of
# L4, L40S and RTX PRO 6000, and each start over PCIe.
_NVLINK3 = _GpuLinks(300, 25, {"any": (Fit(2, 30e-6, 0.74),)})
_NVLINK4 = _GpuLinks(
    450,
    50,
    {
        "any": (Fit(2, 15e-6, 0.60), Fit(4, 17e-6, 0.72), Fit(8, 30e-6, 0.76)),
        "all-reduce": (Fit(2, 20e-6, 0.54), Fit(4, 35e-6, 0.66), Fit(8, 38e-6, 0.88)),
        "reduce-scatter": (Fit(2, 20e-6, 0.72),),
        "all-to-all": (Fit(2, 33e-6, 0.75),),
    },
    add=True,
)
_NVLINK5 = _GpuLinks(
    900,
    50,
    {
        "any": (Fit(8, 34e-6, 0.66), Fit(64, 82e-6, 0.74)),
        "all-reduce": (Fit(8, 50e-6, 0.67), Fit(64, 100e-6, 0.83)),
        "reduce-scatter": (Fit(8, 34e-6, 0.71), Fit(64, 82e-6, 0.78)),
        "all-to-all": (Fit(8, 36e-6, 0.67), Fit(64, 82e-6, 0.71)),
    },
    add=True,
)
_NVLINK5_FAST = _NVLINK5._replace(to_hosts=100)
_OVER_PCIE = {"any": (Fit(2, 30e-6, 0.81),)}
_PCIE4 = _GpuLinks(32, 32, _OVER_PCIE)
_PCIE5 = _GpuLinks(64, 64, _OVER_PCIE)
_BRIDGE3 = _GpuLinks(32, 25, _OVER_PCIE, bridge=300)
_BRIDGE4 = _GpuLinks(64, 50, _OVER_PCIE, bridge=300)

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
# in xla/backends/gpu/target_config. Those of gh200, h20, l4, l40s, rtx6000pro and b300 are of
# nvidia-smi, because the ones there are more than that, or absent; those of h100-96, a form of
# 500 W, of github.com/pytorch/torchtitan (benchmarks); that of h200 is what JAX found on one, which
# is less than the 143,771 MiB of nvidia-smi. Products: NVIDIA's data sheets, without
# sparsity; those of H20 and RTX PRO 6000 are of other pages. Half of the NVLink bandwidth goes in
# each direction. Between hosts, it is the network adapter that a DGX has for each GPU; one that
# NVIDIA sells in no such system has that of its PCIe slot. A rack of GB200 or GB300 counts as a
# host, as NVLink connects it.
_A100 = _Chip(
    _teraflops(312, 156, 19.5, s8=624),
    GpuFacts(108, 64, 1.41, 40 * _MIB, 167_936, 166_912, (8, 0)),
)
_H100 = _hopper(_teraflops(989.4, 494.7, 66.9, f8=1979, s8=1979), 132, 1.98)
_H100_PCIE = _hopper(_teraflops(756, 378, 51, f8=1513, s8=1513), 114, 1.755)
_H20 = _hopper(_teraflops(148, 74, 44, f8=296, s8=296), 78, 1.98, cache_mib=60)
_TERAFLOPS_B200 = _teraflops(2250, 1125, 80, f8=4500, s8=4500, f4=9000)
_TERAFLOPS_GB200 = _teraflops(2500, 1250, 80, f8=5000, s8=5000, f4=10_000)
_B200 = _blackwell(_TERAFLOPS_B200, 148, 1.965, 132_644_864)
_GB200 = _blackwell(_TERAFLOPS_GB200, 152, 2.062, 135_528_448)
_B300 = _blackwell({**_TERAFLOPS_B200, "s8": 160, "f4": 14_000}, 148, 1.965, 132_644_864, minor=3)
_GB300 = _blackwell({**_TERAFLOPS_GB200, "s8": 165, "f4": 15_000}, 152, 2.07, 135_528_448, minor=3)
_L4 = _small(_teraflops(121, 60, 30.3, f8=242, s8=242), 58, 2.04, 48, (8, 9))
_L40S = _small(_teraflops(362, 183, 91.6, f8=733, s8=733), 142, 2.52, 96, (8, 9))
_RTX = _small(_teraflops(500, 250, 125, f8=1000, s8=1000, f4=2000), 188, 2.6, 128, (12, 0))
_RTX_NAMES = ", ".join(
    f"RTX PRO 6000 Blackwell {edition} Edition"
    for edition in ("Server", "Workstation", "Max-Q Workstation")
)

_V3 = {"bf16": 123 / 2}
_V5E = {"bf16": 197, "s8": 394, "s4": 788}
_V5P = {"bf16": 459, "f8": 459, "s8": 918, "s4": 1840}
_V6E = {"bf16": 918, "f8": 918, "s8": 1836, "s4": 3680}
_TPU7X = {"bf16": 2307 / 2, "f8": 4614 / 2}

KINDS = (
    # GiB and GB/s of its memory, products, GB/s of a link and to other slices, GHz.
    _tpu("v2", "TPU v2", 7.48, 350, {"bf16": 46 / 2}, 62, 25 / 8, 0.70, per_chip=2),
    _tpu("v3", "TPU v3", 15.48, 450, _V3, 100, 25 / 8, 0.94, per_chip=2, smallest_ring=32),
    _tpu("v4", "TPU v4", 30.75, 1200, {"bf16": 275, "s8": 275}, 47, 25 / 4, 1.05, dimensions=3),
    _tpu("v5e", "TPU v5 lite, TPU v5e", 15.75, 819, _V5E, 50, 25 / 8, 1.50),
    _tpu("v5p", "TPU v5, TPU v5p", 95.73, 2765, _V5P, 100, 50 / 8, 1.75, dimensions=3),
    _tpu("v6e", "TPU v6 lite", 31.24, 1640, _V6E, 100, 100 / 8, 1.75, parts=(0.90, 0.83)),
    _tpu(
        "tpu7x",
        "TPU7x",
        gib=94.74,
        bandwidth=3690,
        teraflops=_TPU7X,
        ici=100,
        dcn=50 / 8,
        clock_ghz=2.2,
        parts=(0.83, 0.87),
        per_chip=2,
        dimensions=3,
        die_link=600,
    ),
    # Bytes and GB/s of its memory, chip, links, measured parts of products and memory.
    _gpu("a100-40", "A100-SXM4-40GB", 42_331_013_120, 1555.2, _A100, _NVLINK3, (0.87, 0.91)),
    _gpu("a100-40-pcie", "A100-PCIE-40GB", 42_331_013_120, 1555.2, _A100, _BRIDGE3, (0.81, 0.91)),
    _gpu("a100", "A100-SXM4-80GB", 85_100_068_864, 2039.04, _A100, _NVLINK3, (0.87, 0.91)),
    _gpu("a100-pcie", "A100 80GB PCIe", 85_100_068_864, 1935, _A100, _BRIDGE3, (0.81, 0.91)),
    _gpu("h100", "H100 80GB HBM3", 84_942_979_072, 3352.32, _H100, _NVLINK4, (0.70, 0.93)),
    _gpu("h100-96", "H100", 102_048_464_896, 2400, _H100, _NVLINK4, (0.61, 0.93)),
    _gpu("h100-pcie", "H100 PCIe", 84_942_979_072, 2039.04, _H100_PCIE, _BRIDGE4, (0.80, 0.93)),
    _gpu("h200", "H200", 143_157 * _MIB, 4800, _H100, _NVLINK4, (0.70, 0.93)),
    _gpu("gh200", "GH200 480GB, GH200 120GB", 97_871 * _MIB, 4000, _H100, _NVLINK4, (0.84, 0.93)),
    _gpu("h20", "H20", 97_871 * _MIB, 4000, _H20, _NVLINK4, (0.80, 0.93)),
    _gpu("b200", "B200", 191_514_411_008, 7672.32, _B200, _NVLINK5, (0.78, 0.90)),
    _gpu("gb200", "GB200", 197_897_748_480, 7928.064, _GB200, _NVLINK5, (0.73, 0.90)),
    _gpu("b300", "B300 SXM6 AC", 275_040 * _MIB, 7672.32, _B300, _NVLINK5_FAST, (0.79, 0.90)),
    _gpu("gb300", "GB300", 297_021_079_552, 7928.064, _GB300, _NVLINK5_FAST, (0.79, 0.90)),
    _gpu("l4", "L4", 23_034 * _MIB, 300, _L4, _PCIE4, (0.80, 0.90)),
    _gpu("l40s", "L40S", 46_068 * _MIB, 864, _L40S, _PCIE4, (0.80, 0.90)),
    _gpu("rtx6000pro", _RTX_NAMES, 97_887 * _MIB, 1792, _RTX, _PCIE5, (0.80, 0.90)),
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


def topologies_of(name: str) -> Iterator[str]:
    """Yield the topologies of a kind, the smallest first: those that one can rent.

    A slice of TPUs doubles in one dimension; GPUs are in hosts of 8, or 64 where a rack is one.
    """
    kind = kind_named(name)
    if kind.gpu is not None:
        per_host = 64 if kind.name.startswith("gb") else 8
        for count in (2**n for n in range(_MOST_TRIED.bit_length())):
            hosts = count // per_host
            yield f"{kind.name}:{f'{hosts}x{per_host}' if hosts > 1 else count}"
        return
    sizes = [1, 1] if kind.dimensions == 2 else [2, 2, 1]
    most = 256 if kind.dimensions == 2 else _MOST_TRIED
    while math.prod(sizes) <= most:
        yield f"{kind.name}:{'x'.join(map(str, sizes))}"
        at = max(range(len(sizes)), key=lambda n: (-sizes[n], n))
        sizes[at] *= 2
        if math.prod(sizes) == 2:  # a host has no 1x2
            sizes = [2, 2]


def mesh_sizes_of(names: Sequence[str], num_devices: int) -> list[dict[str, int]]:
    """Return all meshes with these axes over so many devices."""
    first, *others = names
    if not others:
        return [{first: num_devices}]
    sizes = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    return [
        {first: size, **rest}
        for size in sizes
        for rest in mesh_sizes_of(others, num_devices // size)
    ]
