"""Arrays without data: deleted, traced, or not arrays at all, in every function."""

import pickle
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, holding, mesh_of

import gda
from gda.arrays.liveness import data_callbacks

MESH = mesh_of({"x": 4, "y": 2})
DATA = batch(8, 2)

# Of a container or an array.
WAYS: dict[str, Callable[[Any], Any]] = {
    "store": lambda x: gda.store(x, np.empty((8, 2), np.float32)),
    "to_numpy": lambda x: gda.to_numpy([x]),
    "to_host_local": lambda x: gda.compat.global_array_to_host_local_array([x], MESH, P("x")),
    "to_global": lambda x: gda.compat.host_local_array_to_global_array([x], MESH, P("x")),
    "from_process_local": lambda x: gda.GlobalArray.from_process_local(x, MESH, P("x")),
    "save": lambda x: gda.checkpoint.save(tempfile.mkdtemp(), [x], overwrite=True),
    "constrain": lambda x: gda.constrain(x, P("y"), mesh=MESH),
    "a block": lambda x: gda.GlobalArray.from_callback((8, 2), MESH, P(), lambda index: x),
}
# Of a container.
METHODS: dict[str, Callable[[Any], Any]] = {
    "reshard": lambda g: g.reshard(P("y")),
    "gather": lambda g: g.gather(),
    "fingerprint": lambda g: g.fingerprint(),
    "copy_to_host_async": lambda g: g.copy_to_host_async(),
    "block_until_ready": lambda g: g.block_until_ready(),
    "pickle": pickle.dumps,
    "local_data": lambda g: g.local_shards[0].data,
}
DELETED = r"\(shape=.*\) was deleted, by delete\(\) or by donating it to a jitted function"
TRACED = "is being traced, so it has no data; "


def given(kind: str) -> Any:
    g = cut(DATA, MESH, P("x"))
    return g if kind == "GlobalArray" else g.array


@pytest.mark.parametrize("kind", ["GlobalArray", "jax.Array"])
@pytest.mark.parametrize("way", WAYS)
def test_an_array_that_was_deleted(way: str, kind: str) -> None:
    array = given(kind)
    array.delete()
    with pytest.raises(RuntimeError, match=DELETED):
        WAYS[way](array)


@pytest.mark.parametrize("way", METHODS)
def test_a_container_that_was_deleted(way: str) -> None:
    g = given("GlobalArray")
    g.delete()
    g.delete()
    assert g.is_deleted()
    with pytest.raises(RuntimeError, match=r"^GlobalArray.* spec=P\('x'\)\) was deleted, by"):
        METHODS[way](g)


def test_buffers_without_data() -> None:
    buffers = [jax.device_put(DATA, device) for device in MESH.devices.flat]
    buffers[1].delete()
    with pytest.raises(RuntimeError, match=r"device_buffers\[1\], a jax.Array.*" + DELETED):
        gda.GlobalArray((8, 2), MESH, P(), buffers)
    with pytest.raises(TypeError, match=r"device_buffers\[0\] " + TRACED):
        jax.jit(lambda x: gda.GlobalArray((8, 2), MESH, P(), [x] * 8).array)(DATA)


@pytest.mark.parametrize("kind", ["GlobalArray", "jax.Array"])
@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("constrain", "to_numpy")])
def test_an_array_that_is_being_traced(way: str, kind: str) -> None:
    def trace(x: jax.Array) -> jax.Array:
        WAYS[way](gda.GlobalArray.from_array(x) if kind == "GlobalArray" else x)
        return x

    with pytest.raises(TypeError, match=TRACED):
        jax.jit(trace)(given("jax.Array"))


@pytest.mark.parametrize("way", [*(way for way in METHODS if way != "local_data"), "delete", "is"])
def test_a_container_that_is_being_traced(way: str) -> None:
    method = {"delete": lambda g: g.delete(), "is": lambda g: g.is_deleted(), **METHODS}[way]
    with pytest.raises(TypeError, match=TRACED):
        gda.jit(lambda x: method(gda.GlobalArray.from_array(x)))(given("GlobalArray"))


@pytest.mark.parametrize("way", ["store", "to_host_local"])
def test_values_that_are_no_array_are_refused(way: str) -> None:
    with pytest.raises(TypeError, match="expected a GlobalArray or a jax.Array, not ndarray"):
        WAYS[way](DATA)
    with pytest.raises(TypeError, match="this GlobalArray holds a ndarray and no jax.Array"):
        WAYS[way](holding(DATA))


@pytest.mark.processes(2, devices=4)
@pytest.mark.parametrize("name", ["gather", "fingerprint"])
def test_an_array_of_one_other_process(name: str) -> None:
    theirs = [device for device in jax.devices() if device.process_index == 1]
    g = gda.GlobalArray.from_callback(
        (4, 2), Mesh(np.array(theirs), ("x",)), P("x"), lambda index: DATA[index], dtype="float32"
    )
    if jax.process_index() == 1:
        assert getattr(g, name)() is not None
        return
    with pytest.raises(ValueError, match="called in process 0 .* only process 1 holds. Call it in"):
        getattr(g, name)()


class StopError(Exception):
    """The exception of a signal handler, which Python may call wherever a function begins."""


def test_mark_of_a_callback_goes_wherever_a_signal_handler_raises() -> None:
    number = 0
    for number in range(1000):
        events = iter(range(number))

        def handler(frame: Any, event: str, _: Any, events: Any = events) -> None:
            is_ours = event == "call" and "gda/arrays/" in frame.f_code.co_filename
            if is_ours and next(events, None) is None:
                sys.setprofile(None)
                raise StopError

        sys.setprofile(handler)
        try:
            gda.GlobalArray.from_callback((8, 2), MESH, P("x"), lambda index: DATA[index])
        except StopError:
            assert not data_callbacks.depth, number
        else:
            break
        finally:
            sys.setprofile(None)
    assert 20 < number < 999  # the last call met no handler
