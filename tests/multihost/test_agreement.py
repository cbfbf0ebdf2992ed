"""Errors of processes with different arrays, in all of them and at once."""

import json
import random
import re
import threading
import time
import zlib
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import gda
from gda.multihost.steps import compare_digests, say_difference

P = PartitionSpec
ME = 1  # the process that is different in most of these tests


def shaped(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def is_me() -> bool:
    return jax.process_index() == ME


def line(reverse: bool = False, kind: AxisType = AxisType.Auto, axis: str = "x") -> Mesh:
    devices = jax.devices()[::-1] if reverse else jax.devices()
    return Mesh(np.array(devices), (axis,), axis_types=(kind,))


def zeros(*shape: int) -> Any:
    return lambda index: np.zeros(
        [len(range(n)[s]) for s, n in zip(index, shape, strict=True)], np.float32
    )


def refused(*tree: Any, **options: Any) -> str:
    with pytest.raises(gda.DisagreementError) as caught:
        gda.check_processes_agree(*tree, timeout=50, **options)
    return str(caught.value)


# Usual cases.


@pytest.mark.processes(4, devices=2)
def test_processes_that_agree_go_on() -> None:
    g = gda.GlobalArray.from_callback((8, 2), line(), P("x"), lambda i: np.zeros((1, 2)))
    tree = {"g": g, "array": g.array, "host": np.zeros(3), "loss": 0.5, "name": "x", "none": None}
    for _ in range(3):
        gda.check_processes_agree(tree, name="everything", timeout=50)


@pytest.mark.processes(4, devices=2)
def test_a_difference_is_said_with_path_and_processes() -> None:
    me, others = is_me(), ", processes 0, 2, 3: "
    explicit = line(kind=AxisType.Explicit if me else AxisType.Auto)
    with gda.checking_agreement(False):  # arrays that would add up to a wrong sum
        n = 16 if me else 8
        g = gda.GlobalArray.from_callback((n,), line(), P("x"), lambda i: np.ones(n // 8))
    for tree, said in [
        ({"w": shaped(n), "b": shaped(2)}, f"at w, process 1: shape (16,){others}(8,)"),
        (g, f"process 1: shape (16,){others}(8,)"),
        (shaped(jax.process_index() + 1), "0: shape (1,), process 1: (2,), process 2: (3,), proc"),
        ([shaped(2, dtype="i4" if me else "f4")], f"process 1: dtype int32{others}float32"),
        ([NamedSharding(line(), P() if me else P("x"))], f"process 1: spec P(){others}P('x')"),
        (line(reverse=me), "process 1: device order"),
        (line(axis="y" if me else "x"), f"mesh {{'y': 8}} of Auto axes{others}{{'x': 8}} of Auto"),
        (explicit, "process 1: mesh {'x': 8} of Explicit axes"),
        (
            [1, 2, *([3] if me else [])],
            "the processes do not agree: only in process 1: 2",
        ),
        ((0, 0) if me else [0, 0], f"process 1: structure (*, *){others}[*, *]"),
        ({"w": np.zeros(n) if me else g.array}, f"at w, process 1: shape (16,){others}(8,)"),
        (np.zeros(8, np.float32) if me else g.array, f"process 1: spec missing{others}P('x')"),
    ]:
        assert said in refused(tree)
    message = refused(0, name="optimizer" if me else "params")
    assert f"process 1: call check 'optimizer'{others}check 'params'. They are at" in message
    assert "process 1 at check 'optimizer' (test_agreement.py:" in message


def encoded(*fields: tuple[str, str, str]) -> bytes:
    return zlib.compress(json.dumps(fields).encode())


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rate: float) -> None:
        self.w = nnx.Param(np.zeros((2, 2)))
        self.dropout = nnx.Dropout(rate, rngs=rngs)


class Model(nnx.Module):
    def __init__(self, *rates: float) -> None:
        rngs = nnx.Rngs(0, dropout=1)
        self.blocks = nnx.List([Block(rngs, rate) for rate in rates])


@pytest.mark.processes(2, devices=4)
def test_the_first_places_in_large_trees_are_said_in_few_words() -> None:
    # Another rate, which no leaf shows, in a text of 10,000 characters.
    message = refused(Model(0.1, 0.1, 0.2 if is_me() else 0.1, 0.1))
    assert "agree: process 0: structure …" in message
    assert re.search(r"False, 0\.1, 'dropout'.*, process 1: .* False, 0\.2, 'dropout'", message)
    assert len(message) < 600


def test_a_message_has_some_1000_characters_at_most() -> None:
    chance = random.Random(7)

    def word() -> str:
        return "".join(chance.choices("ab.[]' \n", k=chance.choice([1, 20, 5000])))

    for _ in range(8):
        groups = [[i] for i in range(chance.randint(2, 8))]
        paths, fields = [word() for _ in range(5)], ["shape", "structure", word()[:20]]
        payloads = {
            i: encoded(
                *((chance.choice(paths), chance.choice(fields), word()) for _ in range(9)),
                ("", "structure", word()),
                ("", "call", f"{i}"),
            )
            for [i] in groups
        }
        places = {
            i: {"digest": f"{i}", "place": f"check 'params' (train.py:{i})"} for [i] in groups
        }
        message = say_difference(groups, payloads).decode() + compare_digests(places)["places"]
        assert "process 0: call 0, process 1: 1" in message
        assert len(message) < 1000


# Programs.


@pytest.mark.processes(2, devices=4)
def test_another_number_in_a_program_is_found_before_it_runs() -> None:
    w = gda.GlobalArray.from_callback((8,), line(), P("x"), zeros(8)).array

    def lowered(rate: float) -> Any:
        def step(w: jax.Array) -> jax.Array:
            jax.debug.callback(lambda w: None, w.sum())
            return w * 0.5 - rate * w

        return jax.jit(step).lower(w)

    gda.check_processes_agree({"w": w}, program=lowered(0.1), timeout=50)
    number = r"line \d+: %\w+ = stablehlo\.constant dense<{}> : tensor<f32>"
    assert re.search(
        rf"agree: at program, process 0: text {number.format('1.250000e-01')}, process 1: "
        + number.format("2.500000e-01"),
        refused(program=lowered(0.25 if is_me() else 0.125)),
    )
    gda.check_processes_agree(program=lowered(0.1).compile(), timeout=50)
    compiled = lowered(0.25 if is_me() else 0.125).compile()
    assert "agree: at program, process 0: text line" in refused(program=compiled)


# Inside constructors.


@pytest.mark.processes(4, devices=2)
def test_constructors_check_before_they_read() -> None:
    reads = []
    for build in (gda.GlobalArray.from_callback, gda.GlobalArray.from_batched_callback):
        # The plugin has switched the check on.
        with pytest.raises(gda.DisagreementError, match=r"process 1: shape \(16,\), processes"):
            build((16 if is_me() else 8,), line(), P("x"), reads.append)
    assert reads == []


def buffers(n: int) -> list[jax.Array]:
    return [jax.device_put(np.zeros(n // 8, np.float32), d) for d in line().local_devices]


# The last argument of each, for an array of n elements.
CONSTRUCTORS: dict[str, Callable[[int], Any]] = {
    "GlobalArray": buffers,
    "GlobalArray.from_callback": zeros,
    "GlobalArray.from_batched_callback": lambda n: lambda indices: [*map(zeros(n), indices)],
    "GlobalArray.from_batched_callback_with_devices": lambda n: lambda request: buffers(n),
    "GlobalArray.from_process_local": lambda n: np.zeros(n // 4, np.float32),
}


@pytest.mark.processes(4, devices=2)
def test_every_constructor_refuses_another_shape_in_every_process() -> None:
    def build(name: str, n: int) -> gda.GlobalArray:
        content = CONSTRUCTORS[name](n)
        if name == "GlobalArray.from_process_local":
            return gda.GlobalArray.from_process_local(content, line(), P("x"))
        return attrgetter(name)(gda)((n,), line(), P("x"), content)

    for name in CONSTRUCTORS:
        with gda.checking_agreement(timeout=50):
            with pytest.raises(gda.DisagreementError) as caught:
                build(name, 16 if is_me() else 8)
            message = str(caught.value)
            assert re.match(rf"(end of )?{re.escape(name)} \(test_agreement.py:\d+\): ", message)
            assert "process 1: shape (16,), processes 0, 2, 3: (8,)" in message
            # All are in step afterwards.
            assert build(name, 8).shape == (8,)


@pytest.mark.processes(4, devices=2)
def test_a_callback_that_raises_or_returns_another_dtype_is_known_to_all() -> None:
    def read(index: Any) -> Any:
        if is_me():
            raise OSError("the disk is gone")
        return np.zeros(1, np.float32)

    kind = OSError if is_me() else gda.DisagreementError
    for _ in range(2):
        with gda.checking_agreement(timeout=50), pytest.raises(kind) as caught:
            gda.GlobalArray.from_callback((8,), line(), P("x"), read)
        assert ("" if is_me() else "process 1 failed: OSError: ") + "the disk" in str(caught.value)
    dtype = np.int32 if is_me() else np.float32
    with pytest.raises(gda.DisagreementError, match="process 1: dtype int32"):
        gda.GlobalArray.from_callback((8,), line(), P("x"), lambda i: np.zeros(1, dtype))


@pytest.mark.processes(2, devices=4)
def test_a_call_within_a_callback_that_fails_for_all_ends_the_construction_at_once() -> None:
    g = gda.GlobalArray.from_callback((8,), line(), P("x"), zeros(8))

    def read(index: Any) -> Any:
        if is_me():
            g.gather()
        return zeros(8)(index)

    began = time.monotonic()
    with gda.checking_agreement(timeout=100):
        for _ in range(2):
            with pytest.raises(gda.DisagreementError, match="process 1: GlobalArray.gather"):
                gda.GlobalArray.from_callback((8,), line(), P("x"), read)
        assert time.monotonic() - began < 50
        # An error of an earlier call is none of the next one, also while that is handled.
        try:
            gda.GlobalArray.from_callback((8,), line(), P("x"), read)
        except gda.DisagreementError:
            with pytest.raises(ZeroDivisionError if is_me() else gda.DisagreementError):
                gda.GlobalArray.from_callback((8,), line(), P("x"), read_or_fail)
    assert time.monotonic() - began < 90


def read_or_fail(index: Any) -> Any:
    return 1 / 0 if is_me() else zeros(8)(index)


@pytest.mark.processes(4, devices=2)
def test_only_the_processes_of_the_mesh_take_part() -> None:
    mesh = Mesh(np.array([d for d in jax.devices() if d.process_index in (1, 2)]), ("x",))
    with gda.checking_agreement(timeout=50):
        if jax.process_index() in (1, 2):
            gda.GlobalArray.from_callback((4,), mesh, P("x"), lambda i: np.zeros(1, np.float32))
        if jax.process_index() == 3:
            own = Mesh(np.array(jax.local_devices()), ("x",))
            gda.GlobalArray.from_callback((4,), own, P("x"), lambda i: np.zeros(2, np.float32))


# In one process.


def test_one_process_agrees_with_itself_and_checks_its_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gda.check_processes_agree({"w": shaped(3), "x": object()})
    step: Any = jax.jit(lambda x: x)
    gda.check_processes_agree(program=step.lower(1.0))
    with pytest.raises(TypeError, match=r"pass a lowered function, as program=jax.jit\(step\).low"):
        gda.check_processes_agree(program=step)
    with pytest.raises(ValueError, match="timeout must be a number of seconds above 0, not 0"):
        gda.checking_agreement(timeout=0)
    monkeypatch.setenv("GDA_CHECK_AGREEMENT_TIMEOUT_SECONDS", "soon")
    with pytest.raises(ValueError, match="TIMEOUT_SECONDS must be a number of seconds above 0"):
        gda.check_processes_agree(0)


# The comparison, for more processes than this machine could start.


def test_groups_come_smallest_first_and_of_many_a_few_and_the_majority() -> None:
    def decided(digests: dict[int, str]) -> dict[str, Any]:
        return compare_digests(
            {process: {"digest": each, "place": "here"} for process, each in digests.items()}
        )

    assert decided(dict.fromkeys(range(10_000), "same")) == {}
    said = decided(dict.fromkeys(range(1000), "many") | {7: "few", 900: "few", 3: "one"})
    assert said["groups"][:2] == [[3], [7, 900]]
    assert said["spokesmen"] == [3, 7, 0]
    digests = {i: str(i) for i in range(100)} | dict.fromkeys(range(100, 200), "rest")
    said = decided(digests)
    assert len(said["groups"]) == 8
    assert said["groups"][-1] == list(range(100, 200))


def test_many_differences_are_counted() -> None:
    def leaves(size: int) -> bytes:
        return encoded(*((f"[{i}]", "shape", f"({size},)") for i in range(20)))

    groups = [[1], [0, *range(2, 5000)]]
    said = say_difference(groups, {1: leaves(2), 0: leaves(3)}).decode()
    assert said.count("process 1: shape (2,), processes 0, 2-4999: (3,)") == 8
    assert said.endswith("and 12 more")


# Beside the main thread, and with what can be used only once.


@pytest.mark.processes(4, devices=2)
def test_other_threads_check_only_on_request() -> None:
    def prefetch() -> None:
        for i in range(6):
            gda.GlobalArray.from_callback((8 + 8 * i,), line(), P("x"), zeros(8 + 8 * i))
            gda.check_processes_agree(i, name="prefetch", timeout=50)

    thread = threading.Thread(target=prefetch, name="prefetch")
    with gda.checking_agreement(timeout=50):
        thread.start()
        for _ in range(12):
            gda.GlobalArray.from_callback((8,), line(), P("x"), zeros(8))
        thread.join()


@pytest.mark.processes(4, devices=2)
def test_checks_change_neither_arguments_nor_their_errors() -> None:
    with gda.checking_agreement(timeout=50):
        g = gda.GlobalArray.from_callback(iter([8]), line(), iter(["x"]), zeros(8))
    assert (g.shape, g.grid.spec) == ((8,), ("x",))
    for arguments in [((8,), line(), None), (8, line(), P("x")), ((8,), line(), P("x", "x"))]:
        messages = []
        for is_on in (True, False):
            with (
                gda.checking_agreement(is_on, timeout=50),
                pytest.raises((TypeError, ValueError)) as caught,
            ):
                gda.GlobalArray.from_callback(*arguments, zeros(8))
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
