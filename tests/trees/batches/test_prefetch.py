"""Batches made ahead of the step, against a plain loop over the same iterator."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from meshes import ORDERS, batch, ordered_mesh
from running import python
from trials import rarely

import gda


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "gda-prefetch"]


def until(holds: Callable[[], bool]) -> None:
    """Return when something holds that another thread does; fail after a long time."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    if threads():
        gc.collect()
    until(lambda: not threads())


class Counter:
    """An iterator of arrays full of 0, 1, ..., whose state is the next number in a dict of its own.

    It counts how often it was ``asked`` for a batch and ``closed``.
    """

    def __init__(self, stop: int = 1000) -> None:
        self.state = {"next": 0}
        self.stop = stop
        self.asked = self.closed = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        self.asked += 1
        if self.state["next"] >= self.stop:
            raise StopIteration
        self.state["next"] += 1
        return np.full(8, self.state["next"] - 1)

    def get_state(self) -> dict[str, int]:
        return self.state  # the next batch changes it

    def set_state(self, state: dict[str, int]) -> None:
        if not 0 <= state["next"] <= self.stop:
            raise IndexError(f"there is no batch {state['next']}")
        self.state = state

    def close(self) -> None:
        self.closed += 1


def number(array: Any) -> int:
    (value,) = set(np.asarray(array).flat)
    return int(value)


# Batches.


def test_batches_come_in_order_with_their_specs(mesh: Mesh) -> None:
    class Example(NamedTuple):
        tokens: Any
        step: Any
        nothing: None = None

    host = [Example({"a": batch(8, 4) + i, "b": batch(4) - i}, i) for i in range(5)]
    spec = Example({"a": P("x", "y"), "b": P("y")}, P())
    made = list(gda.prefetch(host, mesh, spec))
    assert len(made) == 5
    for given_, got in zip(host, made, strict=True):
        assert isinstance(got, Example)
        assert isinstance(got.tokens["a"], gda.GlobalArray)
        assert (got.tokens["a"].spec, got.tokens["b"].spec) == (P("x", "y"), P("y"))
        assert got.step is given_.step
        jax.tree.map(np.testing.assert_array_equal, gda.to_numpy(got), given_)


def test_any_iterable_of_anything_that_is_an_array(auto_mesh: Mesh) -> None:
    class Tensor:
        """An array of another library, such as torch."""

        shape = (8,)

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            return batch(8)

    class Loader:
        """An iterable that is no iterator, such as a loader for several epochs."""

        def __iter__(self) -> Iterator[Any]:
            yield {"a": Tensor(), "b": jnp.arange(8.0), "c": list(range(8)), "d": np.zeros(8)}

    spec_of = lambda path, leaf: P(*"x" * leaf.ndim)  # noqa: E731
    (made,) = gda.prefetch(Loader(), auto_mesh, spec_of)
    np.testing.assert_array_equal(made["a"], batch(8))
    np.testing.assert_array_equal(made["b"], batch(8))
    assert (made["c"], made["d"].dtype) == (list(range(8)), np.float32)
    with jax.enable_x64(True):  # as where it was called
        batches = gda.prefetch(Loader(), auto_mesh, spec_of)
    assert next(batches)["d"].dtype == np.float64
    assert list(batches) == []


@pytest.mark.parametrize("over", [lambda scratch: scratch, jax.device_put], ids=["numpy", "jax"])
def test_the_iterator_may_use_its_memory_again(
    auto_mesh: Mesh, over: Callable[[np.ndarray], Any]
) -> None:
    def loader(shape: tuple[int, ...]) -> Iterator[Any]:
        scratch = gda.aligned_empty(shape, np.float32)  # JAX would take it over without a copy
        for step in range(6):
            scratch[:] = step
            time.sleep(0.002 * (step % 3))  # a slow one is waited for
            yield over(scratch)
        scratch[:] = -1

    for spec in (P("x"), P(None, "y")):
        made = list(gda.prefetch(loader((64, 16)), auto_mesh, spec))
        assert [number(array) for array in made] == list(range(6))


@pytest.mark.parametrize("size", [1, 3])
def test_no_more_than_size_are_fetched_ahead(auto_mesh: Mesh, size: int) -> None:
    source = Counter()
    with gda.prefetch(source, auto_mesh, P("x"), size=size) as batches:
        for step in range(6):
            until(lambda: source.asked == step + size)  # noqa: B023
            time.sleep(0.01)  # in which it could fetch more
            assert source.asked == step + size
            assert number(next(batches)) == step


# Errors.


class Leaf:
    shape, dtype, ndim = (8,), np.dtype(np.float32), 1

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise StopIteration


def test_errors_come_after_the_batches_before(auto_mesh: Mesh) -> None:
    def broken(kind: type[BaseException]) -> Iterator[np.ndarray]:
        yield batch(8)
        raise kind("broken")

    def of(leaf: Any) -> Iterator[Any]:
        yield batch(8)
        yield leaf

    for loader, kind, message in [
        (broken(KeyError), KeyError, "broken"),
        (broken(KeyboardInterrupt), KeyboardInterrupt, "broken"),
        (of(np.full(8, 2**40)), gda.DoesNotFitError, "does not fit"),
        (of(Leaf()), RuntimeError, "a leaf of a batch raised StopIteration"),
    ]:
        batches = gda.prefetch(loader, auto_mesh, P("x"), size=5)
        until(lambda: not threads())
        next(batches)
        with pytest.raises(kind, match=message) as raised:
            next(batches)
        assert raised.value.__notes__[-1] == "gda: in batch 1 of prefetch, counted from 0"
        if message == "broken":
            assert "broken" in {entry.name for entry in raised.traceback}
        assert list(batches) == []


def test_arguments_are_checked_before_anything_is_taken(auto_mesh: Mesh) -> None:
    source = Counter()
    for arguments, size, message in [
        ((3, auto_mesh, P()), 2, "takes an iterable of batches, not int; pass the loader"),
        ((source, auto_mesh), 2, "a mesh was given without a spec"),
        ((source, None, P()), 2, r"was given without a mesh; pass the mesh"),
        ((source, auto_mesh, {"a": "x"}), 2, r"spec/a is 'x', not a Partit"),
        ((source, auto_mesh, P()), 0, "size is 0; prefetch at least 1 batch"),
        ((source, auto_mesh, P()), 1.5, "cannot be interpreted as an integer"),
    ]:
        with pytest.raises(ValueError if size == 0 else TypeError, match=message):
            gda.prefetch(*arguments, size=size)
    assert source.asked == 0
    assert threads() == []


# The end.


@pytest.mark.parametrize("end", ["close", "with", "garbage"])
def test_it_ends_early_and_closes_the_iterator(auto_mesh: Mesh, end: str) -> None:
    source = Counter()
    batches = gda.prefetch(source, auto_mesh, P("x"))
    next(batches)
    assert threads() == ["gda-prefetch"]
    if end == "garbage":
        del batches
        until(lambda: not threads())
    else:
        if end == "with":
            with batches as entered:
                assert entered is batches
        batches.close()
        assert threads() == []
        assert list(batches) == []
    assert source.closed == 1


START = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import threading
import jax, numpy as np, gda
from jax.sharding import Mesh, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("x",))
go = threading.Event()
def loader():
    try:
        yield np.zeros(8)
        go.wait()
        while True:
            yield from (np.full(8, i) for i in range(1, 5))
    finally:
        print("closed in", threading.current_thread().name)
batches = gda.prefetch(loader(), mesh, P("x"), size=1)
next(batches)
try:
    print("waiting", flush=True)
    next(batches)
except KeyboardInterrupt:
    print("interrupted")
go.set()
print([int(next(batches)[0]) for _ in range(4)])
"""


def test_ctrl_c_while_waiting_loses_no_batch_and_a_program_may_end_in_the_middle() -> None:
    done = python("-c", START, interrupt_after="\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "waiting\ninterrupted\n[1, 2, 3, 4]\nclosed in gda-prefetch\n"


# The state of the iterator.


def test_the_iterator_may_close_what_prefetches_it(auto_mesh: Mesh) -> None:
    made: list[gda.Prefetched] = []
    may_close, is_closed = threading.Event(), threading.Event()

    def batches() -> Iterator[np.ndarray]:
        try:
            yield np.zeros(8)
            assert may_close.wait(60)
            made[0].close()
            yield np.ones(8)
            yield np.zeros(8)
        finally:
            is_closed.set()

    made.append(gda.prefetch(batches(), auto_mesh, P("x")))
    assert float(next(made[0]).sum()) == 0
    may_close.set()
    assert is_closed.wait(60)
    assert list(made[0]) == []


def test_a_state_is_a_copy_and_ends_with_close(auto_mesh: Mesh) -> None:
    source = Counter(stop=6)
    with gda.prefetch(source, auto_mesh, P("x"), size=4) as batches:
        until(lambda: source.asked == 4)
        states = [batches.get_state()]
        states += [batches.get_state() for _ in zip(range(3), batches, strict=False)]
        assert states == [{"next": 0}, {"next": 1}, {"next": 2}, {"next": 3}]
        batches.set_state(states[1])
        assert list(map(number, batches)) == [1, 2, 3, 4, 5]
        assert source.closed == 0  # set_state could go on
        with pytest.raises(IndexError, match="there is no batch 5000"):
            batches.set_state({"next": 5000})
        assert list(batches) == []
    assert source.closed == 1
    assert states == [{"next": 0}, {"next": 1}, {"next": 2}, {"next": 3}]
    with pytest.raises(ValueError, match="were closed; call gda.prefetch again"):
        batches.set_state(states[0])
    with (
        gda.prefetch((batch(8) for _ in range(3)), auto_mesh, P("x")) as batches,
        pytest.raises(TypeError, match=r"a generator, which has no get_state\(\);"),
    ):
        batches.get_state()


@given(st.data())
@rarely(1)
def test_any_order_of_calls_is_as_without_prefetching(data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, 6), "number of batches")
    plain = Counter(stop)
    size = data.draw(st.integers(1, 4), "size")
    states = [dict(plain.get_state())]
    mesh = ordered_mesh(range(8), {"x": 8})
    with gda.prefetch(Counter(stop), mesh, P("x"), size=size) as batches:
        for _ in range(data.draw(st.integers(0, 12), "number of calls")):
            if data.draw(st.booleans(), "takes a batch"):
                expected, got = next(plain, None), next(batches, None)
                assert (expected is None) == (got is None)
                if got is not None:
                    np.testing.assert_array_equal(got, expected)
                states.append(dict(plain.get_state()))
            else:
                state = data.draw(st.sampled_from(states), "state")
                plain.set_state(dict(state))
                batches.set_state(state)
            assert batches.get_state() == plain.get_state()


def test_grain_continues_where_the_step_was(auto_mesh: Mesh) -> None:
    class Source:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, i: Any) -> dict[str, np.ndarray]:
            return {"row": np.full(2, i, np.float32)}

        def __repr__(self) -> str:
            return "Source"  # the state of a DataLoader has it

    def loader() -> Any:
        sampler = grain.samplers.IndexSampler(40, shuffle=True, seed=3, num_epochs=1)
        return grain.DataLoader(
            data_source=Source(), sampler=sampler, operations=[grain.transforms.Batch(8)]
        )

    whole = [each["row"] for each in loader()]
    assert len(whole) == 5
    with gda.prefetch(loader(), auto_mesh, P("x"), size=3) as batches:
        first = [next(batches)["row"] for _ in range(2)]
        state = batches.get_state()
    with gda.prefetch(loader(), auto_mesh, P("x"), size=3) as batches:
        batches.set_state(state)
        rest = [each["row"] for each in batches]
    for made, expected in zip([*first, *rest], whole, strict=True):
        np.testing.assert_array_equal(made, expected)


# Several processes. Devices 0 to 3 belong to process 0, and 4 to 7 to process 1.


@pytest.mark.processes(2, devices=4)
def test_each_process_gives_its_rows_and_waits_for_no_other() -> None:
    me = jax.process_index()
    mesh = ordered_mesh(ORDERS["shuffled"], {"x": 4, "y": 2}, AxisType.Explicit)
    spec = {"rows": P(("x", "y")), "step": P()}
    host = [{"rows": batch(8, 2) + 100 * me + step, "step": np.array(step)} for step in range(2)]
    made = list(gda.prefetch(iter(host), mesh, spec))
    for given_, got in zip(host, made, strict=True):
        assert (got["rows"].shape, got["step"].shape) == ((16, 2), ())
        expected = gda.compat.host_local_array_to_global_array(given_, mesh, spec)
        for a, b in zip(got["rows"].local_shards, expected["rows"].local_shards, strict=True):
            assert (a.device, a.index) == (b.device, b.index)
            np.testing.assert_array_equal(a.data, b.data)
    # Process 1 takes no batch, and the check of constructors is on in the tests.
    if me == 0:
        assert len(list(gda.prefetch([batch(4)] * 3, mesh, P("x")))) == 3
    gda.check_processes_agree(0, name="still in step", timeout=50)
