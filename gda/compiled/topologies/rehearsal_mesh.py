"""Meshes of devices that are not here: ``gda.rehearsal_mesh``."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from gda.compiled.devices.device_kinds import KINDS, OTHER_NAMES, kind_named
from gda.compiled.topologies.gpus import gpus_of
from gda.compiled.topologies.tpus import tpus_of
from gda.layout.boundary import public, set_module
from gda.layout.text import counted, format_mesh

_GPUS = [kind.name for kind in KINDS if kind.gpu is not None]
_OF_TPUS = re.compile(r"[a-z0-9]+:[1-9]\d*(x[1-9]\d*){1,2}(_(un)?twisted)?")
_OF_GPUS = re.compile(r"[a-z0-9-]+:([1-9]\d*x)?[1-9]\d*")


@set_module("gda")
@public
def rehearsal_mesh(
    topology: str,
    mesh_shape: Mapping[str, int],
    *,
    num_slices: int = 1,
    target_config: str | os.PathLike[str] | None = None,
) -> Mesh:
    """Return a mesh over the devices of a topology of TPUs or GPUs that need not exist.

    Its devices compile and run nothing: they are for ``gda.abstract``, ``gda.rehearse``,
    ``gda.collectives`` and the assertions. It needs the compiler for them, which is libtpu or JAX's
    plugin for CUDA, and no hardware, network or server, and works after JAX was initialised for
    CPU. The axes are Auto, as those of ``jax.sharding.Mesh``; for Explicit axes make
    ``jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=…)`` of it.

    Args:
      topology: for TPUs, the kind and the chips in each dimension: ``'v5e:16x16'``, ``'v6e:8x8'``,
        ``'v5p:4x4x8'``. A chip is one device, except for ``v2``, ``v3`` and ``tpu7x``, where it is
        two. For GPUs, the kind, the hosts and the GPUs of each host: ``'h100:4x8'``, or
        ``'h100:8'`` on one host. The kinds are ``a100``, ``a100-40`` and both with ``-pcie``,
        ``h100``, ``h100-pcie``, ``h200``, ``gh200``, ``h20``, ``b200``, ``gb200``, ``b300``,
        ``gb300``, ``l4``, ``l40s`` and ``rtx6000pro``. Where NVLink connects several hosts, as for
        ``gb200``, give the GPUs that it connects as one host.
      mesh_shape: sizes of the axes by name, in mesh order; their product is the number of devices
        of all slices.
      num_slices: number of slices of this topology of TPUs, which a slower network connects. The
        first axes go over the slices.
      target_config: the description of another kind of GPU, which may have any name: the text of a
        ``GpuTargetConfigProto`` of XLA, or the path of a file that has it.

    Returns:
      a mesh. TPUs are in the order that ``jax.experimental.mesh_utils`` chooses, and GPUs host by
      host, so that the first axes go over the hosts, as ``jax.make_mesh`` has both.

    Raises:
      ImportError: the compiler is not installed, or this version of JAX needs a GPU.
      ValueError: there is no such topology, the mesh has another number of devices, or
        ``target_config`` cannot be read.
      TypeError: an argument has the wrong type.
      FileNotFoundError: there is no file ``target_config``.

    >>> import gda
    >>> mesh = gda.rehearsal_mesh('v5e:4x4', {'data': 8, 'model': 2})  # doctest: +SKIP
    >>> mesh.devices.flat[0].device_kind  # doctest: +SKIP
    'TPU v5 lite'
    """
    if not isinstance(topology, str):
        raise TypeError(_wrong_name(topology))
    kind = topology.partition(":")[0]
    if kind == "cpu":
        raise ValueError(_wrong_name(topology))
    is_gpu = target_config is not None or kind in _GPUS
    if not is_gpu and (kind in OTHER_NAMES or not kind.startswith(("v", "tpu"))):
        kind_named(kind)  # libtpu may know newer ones
    if (_OF_GPUS if is_gpu else _OF_TPUS).fullmatch(topology) is None:
        raise ValueError(_wrong_name(topology))
    sizes = _checked_sizes(mesh_shape)
    if type(num_slices) is not int or num_slices < 1:
        raise ValueError(f"num_slices must be a number of slices, 1 or more, not {num_slices!r}")
    if is_gpu and num_slices > 1:
        raise ValueError(
            f"GPUs have hosts and no slices: omit num_slices, and write {kind}:HOSTSxGPUS, such as "
            f"'{kind}:{num_slices}x8'"
        )
    within, across = _over_slices(sizes, num_slices)
    devices = gpus_of(topology, target_config) if is_gpu else tpus_of(topology, num_slices)
    if len(devices) != math.prod(sizes.values()):
        slices = f" in {num_slices} slices" if num_slices > 1 else ""
        raise ValueError(
            f"the mesh {format_mesh(sizes)} has {counted(math.prod(sizes.values()), 'device')}, "
            f"but {topology} has {len(devices):,}{slices}; choose sizes with this product"
        )
    if is_gpu:
        return Mesh(np.array(devices).reshape(*sizes.values()), tuple(sizes))
    return Mesh(_ordered(devices, within, across), tuple(sizes))


def _wrong_name(topology: Any) -> str:
    return (
        "topology must be a kind and its chips in each dimension, such as 'v5e:16x16' or "
        "'v5p:4x4x8', or a kind with its hosts and the GPUs of each, such as 'h100:4x8' or "
        f"'h100:8', not {topology!r:.80}; for CPUs make a jax.sharding.Mesh of jax.devices()"
    )


def _checked_sizes(mesh_shape: Mapping[str, int]) -> dict[str, int]:
    if not isinstance(mesh_shape, Mapping) or not mesh_shape:
        raise TypeError(
            f"mesh_shape must be sizes by axis, such as {{'data': 64, 'model': 4}}, not "
            f"{mesh_shape!r:.80}"
        )
    for name, size in mesh_shape.items():
        if not isinstance(name, str) or type(size) is not int or size < 1:
            raise ValueError(
                f"mesh_shape has {name!r}: {size!r}; an axis has a name and a size of 1 or more"
            )
    return dict(mesh_shape)


def _over_slices(sizes: Mapping[str, int], num_slices: int) -> tuple[list[int], list[int]]:
    """Return the sizes of the axes within a slice, and across the slices."""
    left, within, across = num_slices, [], []
    for size in sizes.values():
        part = math.gcd(size, left)
        left //= part
        within.append(size // part)
        across.append(part)
    if left > 1:
        raise ValueError(
            f"the axes of the mesh {format_mesh(sizes)} do not divide into {num_slices} slices; "
            f"make the first axis a multiple of {num_slices}"
        )
    return within, across


def _ordered(devices: list[Any], within: list[int], across: list[int]) -> Any:
    def ordered(*, may_split: bool) -> Any:
        options = {"allow_split_physical_axes": may_split}
        if max(across, default=1) > 1:
            return mesh_utils.create_hybrid_device_mesh(within, across, devices, **options)
        return mesh_utils.create_device_mesh(within, devices, **options)

    try:
        return ordered(may_split=False)
    except NotImplementedError:  # an axis of the mesh is a part of one of the torus
        return ordered(may_split=True)
