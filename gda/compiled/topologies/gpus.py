"""The devices of GPU topologies, from JAX's plugin for CUDA, which has the compiler.

A ``GpuTargetConfigProto`` describes a kind of GPU to XLA. It is written here from the facts of the
table of kinds, and from those that all kinds have in common.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import jax
from jax.errors import JaxRuntimeError
from jax.experimental import topologies

from gda.compiled.devices.device_kinds import DeviceKind, gpu_capacity, kind_named
from gda.compiled.topologies.without_hardware import without_hardware
from gda.layout.distribution import install_command

_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_OLDEST = (0, 9)

_memory_bytes: dict[Any, int] = {}  # by device


def gpus_of(topology: str, target_config: str | os.PathLike[str] | None) -> list[Any]:
    """Return the devices of a topology, host by host; errors as ``gda.rehearsal_mesh`` has them."""
    name, _, sizes = topology.partition(":")
    *hosts, per_host = map(int, sizes.split("x"))
    if target_config is None:
        text = _described(kind_named(name))
    elif isinstance(target_config, str) and "{" in target_config:
        text = target_config
    else:
        text = Path(target_config).read_text()
    return _devices_of(*(hosts or [1]), per_host, text)


def gpu_capacity_of(device: Any) -> int | None:
    """Return the memory that programs have on a device of ``gpus_of``; None for any other."""
    memory_bytes = _memory_bytes.get(device)
    return None if memory_bytes is None else gpu_capacity(memory_bytes)


# Two descriptions of one topology have different devices, which one program must not mix.
@functools.cache
def _devices_of(hosts: int, per_host: int, text: str) -> list[Any]:
    if jax.__version_info__ < _OLDEST:
        raise ImportError(
            f"rehearsals for GPUs need JAX 0.9 or later; the compiler of JAX {jax.__version__} "
            "measures on a GPU; for TPUs this version is enough"
        )
    if not _has_plugin():
        raise ImportError(
            "rehearsal_mesh needs JAX's plugin for CUDA, which has the compiler for GPUs: "
            f"{install_command('rehearse-gpu')}; it needs no GPU",
            name=_PLUGINS[0],
        )
    options = {"topology": f"1x{hosts}x{per_host}", "target_config": text}
    with without_hardware():
        try:
            devices = topologies.get_topology_desc("", platform="cuda", **options).devices
        except JaxRuntimeError as error:
            if "GpuTargetConfigProto" not in str(error):
                raise
            raise ValueError(
                f"target_config is no GpuTargetConfigProto that JAX {jax.__version__} can read: "
                f"{text!r:.80}; give its text form, as the files of XLA in "
                "xla/backends/gpu/target_config/specs have it, or the path of such a file"
            ) from None
    if memory := re.search(r"device_memory_size: *(\d+)", text):
        _memory_bytes.update(dict.fromkeys(devices, int(memory[1])))
    return devices


def _has_plugin() -> bool:
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    return any(importlib.util.find_spec(name) is not None for name in _PLUGINS)


def _described(kind: DeviceKind) -> str:
    facts = kind.gpu
    assert facts is not None
    major, minor = facts.compute_capability
    # As the driver's own description: with it XLA compiles for sm_90a, sm_100a and sm_103a.
    extension = "feature_extension: ACCELERATED_FEATURES" if major in (9, 10) else ""
    # Versions of CUDA and cuDNN, which JAX 0.9 would refuse, change nothing in the programs.
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: {facts.threads_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: {facts.cores}
  fpus_per_core: {facts.fpus_per_core}
  clock_rate_ghz: {facts.clock_ghz}
  memory_bandwidth: {kind.memory_bandwidth}
  device_memory_size: {kind.memory_bytes}
  l2_cache_size: {facts.cache_bytes}
  shared_memory_per_core: {facts.shared_bytes_per_core}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {facts.shared_bytes_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{kind.device_kinds[0]}"
"""
