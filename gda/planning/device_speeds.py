"""Speeds of accelerators, as their vendors publish them."""

from __future__ import annotations

from typing import NamedTuple

_TERA, _GIGA = 10**12, 10**9


class DeviceSpeeds(NamedTuple):
    """The greatest speeds of one JAX device.

    Attributes:
      flops: floating-point operations per second in dense products of bfloat16.
      link: bytes per second that it sends over its links within a slice or a host.
      slow_link: the same between slices or hosts.
    """

    flops: float
    link: float
    slow_link: float


# TPUs: docs.cloud.google.com/tpu/docs/v5e and /tpu7x, which compares generations. Half of the ICI
# bandwidth there goes in each direction, and on a tpu7x half of a chip is a device. Between slices,
# the figure is the bandwidth per chip of the data center network. GPUs, as SXM modules: NVIDIA's
# data sheets of A100, H100, H200, HGX B200 and GB200 NVL72; without sparsity, and half of the
# NVLink bandwidth in each direction. Between hosts, it is the network adapter that a DGX has for
# each GPU: 200 Gbit/s with A100, else 400. A rack of GB200 counts as a host, as NVLink connects it.
_A100 = DeviceSpeeds(312 * _TERA, 300 * _GIGA, 25 * _GIGA)
_HOPPER = DeviceSpeeds(989 * _TERA, 450 * _GIGA, 50 * _GIGA)
_SPEEDS = {
    "TPU v5 lite": DeviceSpeeds(197 * _TERA, 200 * _GIGA, 25 / 8 * _GIGA),
    "TPU v5": DeviceSpeeds(459 * _TERA, 600 * _GIGA, 50 / 8 * _GIGA),
    "TPU v6 lite": DeviceSpeeds(918 * _TERA, 400 * _GIGA, 100 / 8 * _GIGA),
    "TPU7x": DeviceSpeeds(2307 / 2 * _TERA, 300 * _GIGA, 50 / 8 * _GIGA),
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA H100 80GB HBM3": _HOPPER,
    "NVIDIA H200": _HOPPER,
    "NVIDIA B200": DeviceSpeeds(2250 * _TERA, 900 * _GIGA, 50 * _GIGA),
    "NVIDIA GB200": DeviceSpeeds(2500 * _TERA, 900 * _GIGA, 50 * _GIGA),
}


def speeds_of_device(device_kind: str) -> DeviceSpeeds | None:
    """Return the speeds of ``jax.Device.device_kind``; None for a kind that is not in the table."""
    return _SPEEDS.get(device_kind)
