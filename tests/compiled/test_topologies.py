"""Meshes of TPUs that are not here. Most tests need libtpu, which describes them."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gda
from gda.compiled import topologies

# In one process JAX runs on its CPU first.
PROGRAM = """
import os, sys, time
import jax, numpy as np, gda
from jax.sharding import NamedSharding, PartitionSpec as P
if 'cpu first' in sys.argv:
    assert jax.numpy.ones(3).sum() == 3
before = dict(os.environ)
mesh = gda.rehearsal_mesh('v5e:2x2', {'x': 4})
assert dict(os.environ) == before
x = jax.ShapeDtypeStruct((64, 128), np.float32, sharding=NamedSharding(mesh, P('x')))
(traffic,) = gda.rehearse(lambda x: x.sum(axis=0), x).traffic
assert dict(os.environ) == before
print(mesh.devices.flat[0].device_kind, traffic.axes, jax.devices()[0].platform)
"""


# Bad inputs, which are found before libtpu is loaded.


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v5e", "topology must be a kind and its chips in each dimension, such as 'v5e:16x16'"),
        ("v5e-16", "not 'v5e-16'"),
        ("v5e:4", "not 'v5e:4'"),
        ("v5e:0x4", "not 'v5e:0x4'"),
        ("v5e:4x4x4x4", "not 'v5e:4x4x4x4'"),
        ("V5E:4x4", "not 'V5E:4x4'"),
        ("v5e:4x4\n", r"not 'v5e:4x4\n'"),
        ("v5e:32x32", "a slice of v5e has at most 16x16 chips, so there is no v5e:32x32; for more"),
    ],
)
def test_a_name_that_is_none(topology: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        gda.rehearsal_mesh(topology, {"x": 4})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((4, {"x": 4}), TypeError, "topology must be a kind and its chips"),
        (("v5e:2x2", 4), TypeError, "mesh_shape must be sizes by axis, such as {'data': 64"),
        (("v5e:2x2", {}), TypeError, "mesh_shape must be sizes by axis"),
        (("v5e:2x2", {"x": 0}), ValueError, "mesh_shape has 'x': 0; an axis has a name and a size"),
        (("v5e:2x2", {"x": 4.0}), ValueError, "mesh_shape has 'x': 4.0"),
        (("v5e:2x2", {3: 4}), ValueError, "mesh_shape has 3: 4"),
        (("v5e:2x2", {"x": 4}, 0), ValueError, "num_slices must be a number of slices, 1 or more"),
        (("v5e:2x2", {"x": 4}, True), ValueError, "not True"),
        (
            *(("v5e:2x2", {"x": 4, "y": 3}, 5), ValueError),
            "the axes of the mesh x=4,y=3 do not divide into 5 slices; make the first axis a",
        ),
    ],
)
def test_arguments_of_another_kind(
    arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    topology, shape, *slices = arguments
    with pytest.raises(error, match=re.escape(message)):
        gda.rehearsal_mesh(topology, shape, num_slices=slices[0] if slices else 1)


def test_without_libtpu_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(ImportError, match=r"needs libtpu.*pip install 'gda\[rehearse\]'") as caught:
        gda.rehearsal_mesh("v5e:8x4", {"x": 32})
    assert caught.value.name == "libtpu"


def test_a_description_that_never_comes_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_LIBRARY_PATH", "libtpu.so")
    monkeypatch.setattr(topologies, "_description", lambda *_, **__: time.sleep(3600))
    monkeypatch.setattr(topologies, "_SECONDS", 0.1)
    before = dict(os.environ)
    with pytest.raises(TimeoutError, match=r"libtpu did not describe the topology within 0\.1 s"):
        gda.rehearsal_mesh("v5e:8x4", {"x": 32})
    assert dict(os.environ) == before


def test_other_errors_of_libtpu_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("ABORTED: it is in use")

    monkeypatch.setenv("TPU_LIBRARY_PATH", "libtpu.so")
    monkeypatch.setattr(topologies, "_description", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ABORTED: it is in use"):
        gda.rehearsal_mesh("v5e:8x4", {"x": 32})


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
    for axis in (0, 1):
        steps = np.abs(np.diff(coordinates, axis=axis)).sum(axis=-1)
        assert steps.max() <= 3
        # Along one axis of the mesh, only one of the topology changes.
        assert (np.ptp(coordinates, axis=axis) > 0).sum(axis=-1).max() == 1


@pytest.mark.topology
def test_the_same_topology_has_the_same_devices() -> None:
    one, other = (gda.rehearsal_mesh("v5e:2x2", shape) for shape in ({"x": 4}, {"a": 2, "b": 2}))
    assert {*one.devices.flat} == {*other.devices.flat}


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
        ("h100:8x1", "libtpu has no topology h100:8x1"),
        ("v5e:3x5", "libtpu has no topology v5e:3x5"),
    ],
)
def test_an_unknown_topology_lists_the_kinds(topology: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        gda.rehearsal_mesh(topology, {"x": 4})
    assert re.search(r"the kinds that it knows are .*v4, v5e, v5p, v6e", str(caught.value))


@pytest.mark.topology
def test_processes_use_libtpu_at_the_same_time_and_say_nothing() -> None:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TPU_", "XLA_FLAGS", "ALLOW_MULTIPLE_LIBTPU_LOAD"))
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, order],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for order in ("", "")
    ]
    for process in started:
        output, noise = process.communicate(timeout=120)
        assert process.returncode == 0, noise
        assert output == "TPU v5 lite ('x',) cpu\n"
        assert noise == ""


@pytest.mark.topology
def test_it_works_after_jax_has_run_on_a_cpu() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, "cpu first"],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ran.returncode, ran.stdout) == (0, "TPU v5 lite ('x',) cpu\n"), ran.stderr
    assert ran.stderr == ""
