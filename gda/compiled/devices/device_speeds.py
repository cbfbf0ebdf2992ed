"""The speeds of a device: its products and links, as published, and the measured parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# The next wider family of types, at whose speed a device computes that has no units for one.
_WIDER = {"f4": "f8", "f8": "bf16", "s4": "s8", "s8": "bf16", "f16": "bf16"}


class Fit(NamedTuple):
    """The time of collectives in groups of one size, as measured: a start, and a rate.

    Attributes:
      devices: of a group.
      start_seconds: of a collective of few bytes.
      part: of the published speed of the links that a collective of many bytes has.
    """

    devices: int
    start_seconds: float
    part: float


class Measured(NamedTuple):
    """The parts of the published speeds that large operations have, for estimates.

    Attributes:
      products: of ``flops``, in products of bfloat16 of 4096 or more in each dimension, in a step
        of some seconds.
      kernels: of ``flops``, in attention of cuDNN, and in kernels that are not known.
      memory: of the bandwidth of the memory, for more than 100 MB.
      collectives: by kind of collective; ``"any"`` for the others.
      on_several: of the speed of products and kernels, in programs of several devices.
    """

    products: float
    kernels: float
    memory: float
    collectives: Mapping[str, tuple[Fit, ...]]
    on_several: float = 1.0

    def fit(self, kind: str, devices: int) -> Fit:
        """Return the fit of the largest groups of at most ``devices``, or else of the smallest."""
        fits = self.collectives.get(kind) or self.collectives["any"]
        return max((fit for fit in fits if fit.devices <= devices), default=fits[0])


class DeviceSpeeds(NamedTuple):
    """The greatest speeds of one JAX device, as its vendor publishes them, in bytes a second.

    Attributes:
      flops_by_dtype: floating-point operations per second in dense products, by the type as XLA
        names it, ``bf16``, or its family: ``f8``, ``s8``, ``s4``, ``f4``. ``f32`` is the default
        precision, which is one pass of bfloat16 on TPUs and TF32 on GPUs; ``f32.high`` and
        ``f32.highest`` are the others.
      link: one ICI link in one direction; of a GPU, all that it sends over NVLink, or over PCIe if
        it has no switch.
      slow_link: the network between slices or hosts, in one direction.
      links: number of ICI links of a chip; 1 for a GPU.
      die_link: between the two devices of a chip; None if there is no figure or one device.
      peer_link: of a bridge to one other GPU, which only some hosts have; None without.
      reduces_in_switch: the switches can add, as NVLS does since H100.
      hop_seconds: of a message over one ICI link; 0 for a GPU, where ``Fit`` has it.
      slow_hop_seconds: of a message over ``slow_link``.
      kernel_seconds: the start of a kernel.
      clock_hz: of the matrix units of a TPU; None for a GPU.
      measured: the parts of these figures that were measured, here or for the nearest kind.
    """

    flops_by_dtype: Mapping[str, float]
    link: float
    slow_link: float
    measured: Measured
    links: int = 1
    die_link: float | None = None
    peer_link: float | None = None
    reduces_in_switch: bool = False
    hop_seconds: float = 0.0
    slow_hop_seconds: float = 10e-6
    kernel_seconds: float = 2e-6
    clock_hz: float | None = None

    @property
    def flops(self) -> float:
        """Operations per second in dense products of bfloat16."""
        return self.flops_by_dtype["bf16"]

    def flops_of(self, dtype: str, precision: str = "default") -> float:
        """Return operations per second in products of a type of XLA, such as ``f8e4m3fn``.

        A type without units of its own is converted to a wider one. For a type of 32 bits or more
        that is not here, such as ``f64`` or ``s32``, it is the figure of ``f32``: no device is
        faster.
        """
        named = self.flops_by_dtype.get(f"{dtype}.{precision}") or self.flops_by_dtype.get(dtype)
        if named is not None:
            return named
        family = {"u8": "s8", "u4": "s4", "s2": "s4", "u2": "s4", "pred": "s8"}.get(dtype, dtype)
        if family.startswith(("f8", "f4")):
            family = family[:2]
        while family not in self.flops_by_dtype:
            family = _WIDER.get(family, "f32")
        return self.flops_by_dtype[family]
