"""The devices of TPU topologies, from libtpu.

libtpu, which has the compiler, describes every topology without hardware. Two things in its
behaviour need care: it asks a metadata server unless told not to, and an unexpected name may end
the process, so names are checked before it sees them.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from gda.compiled.devices.device_kinds import KINDS
from gda.compiled.topologies.without_hardware import without_hardware
from gda.layout.distribution import install_command

_AT_MOST_16 = ("v5e", "v6e")


# Two descriptions of one topology have different devices, which one program must not mix.
@functools.cache
def tpus_of(topology: str, num_slices: int) -> list[Any]:
    """Return the devices of slices of a topology; errors as ``gda.rehearsal_mesh`` has them."""
    # The programs of other topologies, which libtpu describes, abort its compiler.
    kind, _, chips = topology.partition(":")
    sizes = [int(size) for size in re.findall(r"\d+", chips)]
    _check_dimensions(topology, kind, sizes)
    if kind in _AT_MOST_16 and any(size > 16 for size in sizes):
        raise ValueError(
            f"a slice of {kind} has at most 16x16 chips, so there is no {topology}; for more take "
            f"num_slices of {kind}:16x16"
        )
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise ImportError(
            "rehearsal_mesh needs libtpu, the compiler for TPUs: "
            f"{install_command('rehearse')}; it needs no TPU",
            name="libtpu",
        )
    options: dict[str, Any] = {"num_slices": num_slices} if num_slices > 1 else {}
    if topology.startswith("v4:"):
        options["chip_config_name"] = "megacore"  # as JAX uses a v4: a chip is one device
    try:
        with without_hardware():
            return topologies.get_topology_desc(topology, platform="tpu", **options).devices
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        if "INVALID_ARGUMENT" not in reason:
            raise
        kinds = ", ".join(kind.name for kind in KINDS if kind.gpu is None)
        raise ValueError(
            f"libtpu has no topology {topology}: {reason.removeprefix('INVALID_ARGUMENT: ')}; give "
            "a kind and its chips in each dimension, such as 'v5e:16x16' or 'v5p:4x4x8'; the kinds "
            f"are {kinds}"
        ) from None


def _check_dimensions(topology: str, kind: str, sizes: list[int]) -> None:
    dimensions = next((each.dimensions for each in KINDS if each.name == kind), len(sizes))
    if len(sizes) != dimensions:
        raise ValueError(
            f"a slice of {kind} has {dimensions} dimensions, such as "
            f"{kind}:{'x'.join('4' * dimensions)}, and not {len(sizes)} as {topology}"
        )
