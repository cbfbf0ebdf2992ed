"""Meshes of TPUs that are not here: ``gda.rehearsal_mesh``.

libtpu, which has the compiler, describes every topology without hardware. Two things in its
behaviour need care: it asks a metadata server unless told not to, and an unexpected name may end
the process, so names are checked before it sees them.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

import jax
from jax.experimental import mesh_utils, topologies
from jax.sharding import Mesh

from gda.launch.accelerators import has_tpu
from gda.layout.boundary import public, set_module
from gda.layout.text import counted, format_mesh
from gda.planning.device_kinds import KINDS

_NAME = re.compile(r"[a-z0-9]+:[1-9]\d*(x[1-9]\d*){1,2}(_(un)?twisted)?")
_AT_MOST_16 = ("v5e", "v6e")
_EXPECTED = "a kind and its chips in each dimension, such as 'v5e:16x16' or 'v5p:4x4x8'"

# libtpu takes a second at most; it hangs if it waits for hardware or a server.
_SECONDS = 60.0

# Without them libtpu asks a metadata server for the accelerator, the hosts and the number of this
# host, warns that there are none, and admits one process at a time.
_WITHOUT_HARDWARE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_lock = threading.Lock()


@set_module("gda")
@public
def rehearsal_mesh(topology: str, mesh_shape: Mapping[str, int], *, num_slices: int = 1) -> Mesh:
    """Return a mesh over the devices of a TPU topology that need not exist.

    Its devices compile and run nothing: they are for ``gda.abstract``, ``gda.rehearse``,
    ``gda.collectives`` and the assertions. It needs libtpu and no TPU, no network and no server,
    and works after JAX was initialised for CPU. The axes are Auto, as those of
    ``jax.sharding.Mesh``; for Explicit axes make
    ``jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=…)`` of it.

    Args:
      topology: the kind of TPU and its chips in each dimension: ``'v5e:16x16'``, ``'v6e:8x8'``,
        ``'v5p:4x4x8'``. A chip is one device, except for ``v2``, ``v3`` and ``tpu7x``, where it is
        two.
      mesh_shape: sizes of the axes by name, in mesh order; their product is the number of devices
        of all slices.
      num_slices: number of slices of this topology, which a slower network connects. The first
        axes go over the slices.

    Returns:
      a mesh with the devices in the order that ``jax.experimental.mesh_utils`` chooses.

    Raises:
      ImportError: libtpu is not installed.
      ValueError: libtpu has no such topology, or the mesh has another number of devices.
      TypeError: an argument has the wrong type.
      TimeoutError: libtpu did not answer within a minute.

    >>> import gda
    >>> mesh = gda.rehearsal_mesh('v5e:4x4', {'data': 8, 'model': 2})  # doctest: +SKIP
    >>> mesh.devices.flat[0].device_kind  # doctest: +SKIP
    'TPU v5 lite'
    """
    if not isinstance(topology, str) or _NAME.fullmatch(topology) is None:
        raise (ValueError if isinstance(topology, str) else TypeError)(
            f"topology must be {_EXPECTED}, not {topology!r:.80}; for CPUs make a "
            "jax.sharding.Mesh of jax.devices()"
        )
    # The programs of larger topologies, which libtpu describes, abort its compiler.
    kind, _, chips = topology.partition(":")
    if kind in _AT_MOST_16 and any(int(size) > 16 for size in re.findall(r"\d+", chips)):
        raise ValueError(
            f"a slice of {kind} has at most 16x16 chips, so there is no {topology}; for more take "
            f"num_slices of {kind}:16x16"
        )
    sizes = _checked_sizes(mesh_shape)
    if type(num_slices) is not int or num_slices < 1:
        raise ValueError(f"num_slices must be a number of slices, 1 or more, not {num_slices!r}")
    within, across = _over_slices(sizes, num_slices)
    devices = _devices_of(topology, num_slices)
    if len(devices) != math.prod(sizes.values()):
        slices = f" in {num_slices} slices" if num_slices > 1 else ""
        raise ValueError(
            f"the mesh {format_mesh(sizes)} has {counted(math.prod(sizes.values()), 'device')}, "
            f"but {topology} has {len(devices):,}{slices}; choose sizes with this product"
        )
    return Mesh(_ordered(devices, within, across), tuple(sizes))


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
    for may_split in (False, True):
        try:
            if max(across, default=1) > 1:
                return mesh_utils.create_hybrid_device_mesh(
                    within, across, devices, allow_split_physical_axes=may_split
                )
            return mesh_utils.create_device_mesh(
                within, devices, allow_split_physical_axes=may_split
            )
        except NotImplementedError:  # an axis of the mesh is a part of one of the torus
            if may_split:
                raise
    raise AssertionError


# libtpu.


# Two descriptions of one topology have different devices, which one program must not mix.
@functools.cache
def _devices_of(topology: str, num_slices: int) -> list[Any]:
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise ImportError(
            "rehearsal_mesh needs libtpu, the compiler for TPUs: pip install 'gda[rehearse]'; it "
            "needs no TPU",
            name="libtpu",
        )
    options: dict[str, Any] = {"num_slices": num_slices} if num_slices > 1 else {}
    if topology.startswith("v4:"):
        options["chip_config_name"] = "megacore"  # as JAX uses a v4: a chip is one device
    try:
        return _within_time(lambda: _description(topology, **options).devices)
    except jax.errors.JaxRuntimeError as error:
        said = str(error).splitlines()[0].rstrip(".")
        if "INVALID_ARGUMENT" not in said:
            raise
        known = _within_time(_known_kinds)
        raise ValueError(
            f"libtpu has no topology {topology}: {said.removeprefix('INVALID_ARGUMENT: ')}; "
            f"expected is {_EXPECTED}; the kinds that it knows are {', '.join(known)}"
        ) from None


def _description(topology: str, **options: Any) -> Any:
    return topologies.get_topology_desc(topology, platform="tpu", **options)


def _known_kinds() -> list[str]:
    known = []
    for kind in KINDS:
        try:
            _description(f"{kind.name}:2x2x1")
        except (jax.errors.JaxRuntimeError, ValueError):
            continue
        known.append(kind.name)
    return known


def _within_time(ask: Any) -> Any:
    """Return the answer of libtpu; ``TimeoutError`` if it gives none."""
    answer: Future[Any] = Future()

    def work() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    with without_hardware():
        # A daemon, because a call that hangs in libtpu cannot be ended.
        threading.Thread(target=work, daemon=True).start()
        if not wait([answer], _SECONDS).done:
            raise TimeoutError(
                f"libtpu did not describe the topology within {_SECONDS:g} s; try it in a new "
                "process, with JAX_PLATFORMS=cpu"
            )
    return answer.result()


@contextmanager
def without_hardware() -> Iterator[None]:
    """Stop libtpu from looking for hardware and a server in this block, unless there is a TPU."""
    with _lock:
        added = {} if has_tpu() else _WITHOUT_HARDWARE.items() - os.environ.items()
        before = {name: os.environ.get(name) for name, _ in added}
        os.environ.update(added)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
