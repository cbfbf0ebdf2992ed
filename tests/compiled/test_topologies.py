"""Meshes of TPUs and GPUs that are not here. Most tests need the compilers, which describe them."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gda
from gda.compiled.devices.device_kinds import KINDS, DeviceKind, kind_named
from gda.compiled.topologies import gpus

PROGRAM = """
import os, sys
import jax, numpy as np, gda
from jax.sharding import NamedSharding, PartitionSpec as P
if 'cpu first' in sys.argv:
    assert jax.numpy.ones(3).sum() == 3
before = dict(os.environ)
mesh = gda.rehearsal_mesh('v5e:2x2', {'x': 4})
x = jax.ShapeDtypeStruct((64, 128), np.float32, sharding=NamedSharding(mesh, P('x')))
(traffic,) = gda.rehearse(lambda x: x.sum(axis=0), x).traffic
assert dict(os.environ) == before
print(mesh.devices.flat[0].device_kind, traffic.axes, jax.devices()[0].platform)
"""

# XLA would print that it tried to compute values again, and that the memory is too small.
PROGRAM_THAT_IS_TOO_LARGE = """
import jax, jax.numpy as jnp, numpy as np, gda
from jax.sharding import PartitionSpec as P
mesh = gda.rehearsal_mesh('a100-40:2', {'x': 2})
x = gda.abstract(jax.ShapeDtypeStruct((2**17, 2**17), np.float32), mesh, P('x'))
fits = gda.rehearse(lambda x: jnp.sort(x @ x.T, axis=0), x).fits
print(fits, jax.devices()[0].platform)
"""


# Bad inputs, which are found before a compiler is loaded.


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v5e", "topology must be a kind and its chips in each dimension, such as 'v5e:16x16'"),
        ("v5e-16", "not 'v5e-16'"),
        ("v5e:0x4", "not 'v5e:0x4'"),
        ("v5e:4x4x4x4", "not 'v5e:4x4x4x4'"),
        ("h100", "or a kind with its hosts and the GPUs of each, such as 'h100:4x8' or 'h100:8'"),
        ("h100:2x2x8", "not 'h100:2x2x8'"),
        ("h300:8", "no kind of device has the name 'h300'; did you mean h200 or h100? known are"),
        ("v5e:4x4\n", r"not 'v5e:4x4\n'"),
        ("cpu:8", "not 'cpu:8'; for CPUs make a jax.sharding.Mesh of jax.devices()"),
        ("v5e:32x32", "a slice of v5e has at most 16x16 chips, so there is no v5e:32x32; for more"),
        ("v5e:4x4x4", "a slice of v5e has 2 dimensions, such as v5e:4x4, and not 3 as v5e:4x4x4"),
        ("v5p:2x4", "a slice of v5p has 3 dimensions, such as v5p:4x4x4, and not 2 as v5p:2x4"),
        ("ironwood:2x2x1", "did you mean tpu7x"),
    ],
)
def test_a_name_that_is_none(topology: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        gda.rehearsal_mesh(topology, {"x": 4})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("h100:8", {"x": 16}, 2), ValueError, "omit num_slices, and write h100:HOSTSxGPUS"),
        (("l40:8", {"x": 8}, 1, "nowhere.txt"), FileNotFoundError, "'nowhere.txt'"),
        ((4, {"x": 4}), TypeError, "topology must be a kind and its chips"),
        (("v5e:2x2", 4), TypeError, "mesh_shape must be sizes by axis, such as {'data': 64"),
        (("v5e:2x2", {"x": 0}), ValueError, "mesh_shape has 'x': 0; an axis has a name and a size"),
        (("v5e:2x2", {"x": 4}, 0), ValueError, "num_slices must be a number of slices, 1 or more"),
        (
            *(("v5e:2x2", {"x": 4, "y": 3}, 5), ValueError),
            "the axes of the mesh x=4,y=3 do not divide into 5 slices; make the first axis a",
        ),
    ],
)
def test_arguments_of_another_kind(
    arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    topology, shape, num_slices, target_config = (*arguments, *(1, None)[len(arguments) - 2 :])
    with pytest.raises(error, match=re.escape(message)):
        gda.rehearsal_mesh(topology, shape, num_slices=num_slices, target_config=target_config)


@pytest.mark.parametrize(
    ("topology", "patched", "message"),
    [
        ("h100:64x8", {"_OLDEST": (0, 8)}, r"plugin for CUDA.*pip install .*\[rehearse-gpu\]"),
        ("h100:64x8", {"_OLDEST": (99, 0)}, r"rehearsals for GPUs need JAX 0.9 or later; the comp"),
        ("v5e:8x4", {}, r"needs libtpu.*pip install .*\[rehearse\]"),
    ],
)
def test_without_a_compiler_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, topology: str, patched: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    for name, value in patched.items():
        monkeypatch.setattr(gpus, name, value)
    with pytest.raises(ImportError, match=message):
        gda.rehearsal_mesh(topology, {"x": 4})


# With libtpu.


@pytest.mark.topology
@pytest.mark.parametrize(
    ("topology", "num_devices", "kind"),
    [
        ("v2:2x2", 8, "TPU v2"),
        ("v3:2x2", 8, "TPU v3"),
        ("v4:2x2x1", 4, "TPU v4"),
        ("v5e:16x16", 256, "TPU v5 lite"),
        ("v5p:4x4x4", 64, "TPU v5"),
        ("v6e:8x8", 64, "TPU v6 lite"),
        ("tpu7x:2x2x1", 8, "TPU7x"),
    ],
)
def test_the_devices_of_a_topology(topology: str, num_devices: int, kind: str) -> None:
    mesh = gda.rehearsal_mesh(topology, {"data": num_devices, "model": 1})
    assert mesh.shape == {"data": num_devices, "model": 1}
    assert {device.device_kind for device in mesh.devices.flat} == {kind}
    assert len({device.id for device in mesh.devices.flat}) == num_devices
    with pytest.raises(ValueError, match=f"but {topology} has {num_devices}; choose sizes with"):
        gda.rehearsal_mesh(topology, {"data": num_devices + 1})


@pytest.mark.topology
def test_an_axis_is_a_ring_of_neighbours() -> None:
    mesh = gda.rehearsal_mesh("v5e:4x4", {"data": 4, "model": 4})
    coordinates = np.array([device.coords for device in mesh.devices.flat]).reshape(4, 4, 3)
    other = gda.rehearsal_mesh("v5e:4x4", {"x": 16})
    assert {*other.devices.flat} == {*mesh.devices.flat}
    for axis in (0, 1):
        steps = np.abs(np.diff(coordinates, axis=axis)).sum(axis=-1)
        assert steps.max() <= 3
        # Along one axis of the mesh, only one of the topology changes.
        assert (np.ptp(coordinates, axis=axis) > 0).sum(axis=-1).max() == 1


@pytest.mark.topology
def test_a_rule_of_specs_is_checked_on_devices_that_are_not_here() -> None:
    mesh = gda.rehearsal_mesh("v5e:4x4", {"data": 4, "model": 4})  # of 4 hosts
    shape = jax.ShapeDtypeStruct((1024, 1024), np.float32)
    last = jax.sharding.Mesh(mesh.devices[-1:], mesh.axis_names)  # without devices of host 0
    for num_replicas, over in ((16, mesh), (4, last)):
        row = gda.layouts(gda.abstract(shape, over, P())).arrays[0]
        assert (row.num_replicas, row.memory_kind) == (num_replicas, None)
    with pytest.raises(AssertionError, match=r"P\('data', 'model'\) would leave 256\.0 KiB"):
        gda.assert_sharded(gda.abstract(shape, mesh, P()), max_replicated_bytes=2**20)
    on_host = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    assert gda.layouts(gda.abstract(shape, on_host)).arrays[0].memory_kind == "pinned_host"


@pytest.mark.topology
def test_the_first_axes_go_over_the_slices() -> None:
    mesh = gda.rehearsal_mesh("v5e:2x2", {"data": 4, "model": 2}, num_slices=2)
    slices = np.array([device.slice_index for device in mesh.devices.flat]).reshape(4, 2)
    assert slices.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
    with pytest.raises(ValueError, match="has 4 devices, but v5e:2x2 has 8 in 2 slices"):
        gda.rehearsal_mesh("v5e:2x2", {"data": 4}, num_slices=2)


@pytest.mark.topology
@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v7:2x2", "libtpu has no topology v7:2x2: Invalid TPU external name"),
        ("v5e:3x5", "libtpu has no topology v5e:3x5"),
    ],
)
def test_an_unknown_topology_lists_the_kinds(topology: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        gda.rehearsal_mesh(topology, {"x": 4})
    assert str(caught.value).endswith("; the kinds are v2, v3, v4, v5e, v5p, v6e, tpu7x")


@pytest.mark.topology
def test_processes_use_libtpu_at_the_same_time_and_say_nothing() -> None:
    names = "TPU_", "XLA_FLAGS", "ALLOW_MULTIPLE_LIBTPU_LOAD"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, order],
            env={**environment, "JAX_PLATFORMS": "cpu" if order else ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for order in ("", "cpu first")
    ]
    for process in started:
        output, noise = process.communicate(timeout=120)
        assert process.returncode == 0, noise
        assert (output, noise) == ("TPU v5 lite ('x',) cpu\n", "")


# With JAX's plugin for CUDA.


def product(mesh: jax.sharding.Mesh) -> gda.Rehearsal:
    """A rehearsal with a collective over each axis: the first of them over the hosts."""
    x = gda.abstract(jax.ShapeDtypeStruct((512, 512), np.float32), mesh, P(*mesh.axis_names))
    return gda.rehearse(lambda x: x @ x.T, x)


@pytest.mark.topology("gpu")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.gpu], ids=lambda kind: kind.name)
def test_each_kind_of_gpu_compiles(kind: DeviceKind) -> None:
    mesh = gda.rehearsal_mesh(f"{kind.name}:2x4", {"data": 2, "model": 4})
    rehearsal = product(mesh)
    assert rehearsal.device_kind == kind.device_kinds[0]
    assert rehearsal.capacity_bytes == int(0.75 * kind.memory_bytes)
    assert rehearsal.argument_bytes == 512 * 512 * 4 // 8
    # XLA may gather or reduce; hosts are slow, and GPUs of one host are not.
    slow = {each.axes: each.nbytes_slow == each.nbytes for each in rehearsal.traffic}
    assert slow == {("data",): True, ("model",): False}


@pytest.mark.topology("gpu")
def test_gpus_come_host_by_host() -> None:
    mesh = gda.rehearsal_mesh("h100:4x8", {"data": 8, "model": 4})
    hosts = np.array([device.process_index for device in mesh.devices.flat]).reshape(4, 8)
    assert (hosts == np.arange(4)[:, None]).all()
    again = gda.rehearsal_mesh("h100:4x8", {"x": 32})
    assert [*again.devices.flat] == [*mesh.devices.flat]
    assert gda.rehearsal_mesh("h100:8", {"x": 8}).devices[7].process_index == 0
    with pytest.raises(ValueError, match="has 16 devices, but h100:4x8 has 32; choose sizes"):
        gda.rehearsal_mesh("h100:4x8", {"x": 16})


@pytest.mark.topology("gpu")
def test_a_target_config_describes_any_other_kind(tmp_path: Path) -> None:
    text = gpus._described(kind_named("h100")).replace("NVIDIA H100 80GB HBM3", "NVIDIA H100 96GB")
    text = text.replace("84942979072", "100000000000")
    (tmp_path / "h100-96.txtpb").write_text(text)
    for given in (text, tmp_path / "h100-96.txtpb"):
        rehearsal = product(gda.rehearsal_mesh("h100-96:4", {"x": 2, "y": 2}, target_config=given))
        assert rehearsal.device_kind == "NVIDIA H100 96GB"
        assert rehearsal.capacity_bytes == 75_000_000_000
    with pytest.raises(ValueError, match="no GpuTargetConfigProto that JAX .* can read"):
        gda.rehearsal_mesh("h100-96:4", {"x": 4}, target_config="gpu_device_info { cores: 3 }")


@pytest.mark.topology("gpu")
def test_a_gpu_compiler_says_nothing_of_its_own() -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM_THAT_IS_TOO_LARGE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "False cpu\n", "")
