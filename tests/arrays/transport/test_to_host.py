"""Copies to the host ahead of use, within a budget."""

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding

from gda.arrays.transport import to_host
from gda.arrays.transport.to_host import host_blocks, one_by_one


class FakeBlock:
    """Stands for a block on an accelerator: tells when its copy to the host is begun."""

    nbytes = 24

    def __init__(self, number: int, begun: list[int]) -> None:
        self.number = number
        self.begun = begun

    def copy_to_host_async(self) -> None:
        self.begun.append(self.number)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.full(3, self.number)


@pytest.fixture(scope="module")
def fakes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(to_host, "apart", lambda data: data)
        yield


def blocks_of(sizes: list[int], begun: list[int]) -> Iterator[tuple[int, Any, int]]:
    for number, nbytes in enumerate(sizes):
        yield number, FakeBlock(number, begun), nbytes


@pytest.mark.usefixtures("fakes")
@given(st.lists(st.integers(1, 10), max_size=12), st.integers(1, 30), st.integers(1, 4), st.data())
def test_copies_are_begun_ahead_and_never_hold_more_than_the_budget(
    sizes: list[int], max_bytes: int, most_at_a_time: int, data: st.DataObject
) -> None:
    begun: list[int] = []
    blocks = host_blocks(blocks_of(sizes, begun), max_bytes)
    done: set[int] = set()
    under_way: list[Any] = []

    def finish_one() -> None:
        block = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
        done.add(block.key)
        block.release()

    seen = []
    for block in blocks:
        seen.append(block.key)
        while under_way and (
            len(under_way) == most_at_a_time
            or sum(each.nbytes for each in under_way) + block.nbytes > max_bytes
        ):
            finish_one()
        under_way.append(block)
        held = [number for number in {*begun, *seen} if number not in done]
        assert len(held) == 1 or sum(sizes[number] for number in held) <= max_bytes
    assert seen == list(range(len(sizes)))
    assert begun == sorted(begun)


@pytest.mark.usefixtures("fakes")
def test_all_copies_are_begun_before_the_first_write_where_there_is_room() -> None:
    begun: list[int] = []
    next(iter(host_blocks(blocks_of([4] * 8, begun), 16)))
    assert begun == [0, 1, 2, 3]


@pytest.mark.usefixtures("fakes")
def test_one_by_one_each_block_is_let_go_before_the_next() -> None:
    begun: list[int] = []
    blocks = ((number, data) for number, data, _ in blocks_of([0] * 4, begun))
    seen = []
    for number, values in one_by_one(blocks, 2 * 24):
        seen.append((number, values.tolist(), list(begun)))
    assert [(number, values) for number, values, _ in seen] == [(n, [n] * 3) for n in range(4)]
    assert [ahead for _, _, ahead in seen] == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.usefixtures("fakes")
def test_blocks_that_are_left_need_no_garbage_collection() -> None:
    blocks = host_blocks(blocks_of([4] * 8, []), 16)
    next(iter(blocks))
    left = weakref.ref(blocks)
    del blocks
    assert left() is None


def test_values_are_the_memory_of_a_cpu_device() -> None:
    data = jax.device_put(np.arange(1024.0), jax.devices()[3])
    ((_, values),) = one_by_one([("a", data)], 1)
    assert np.shares_memory(values, np.asarray(data))


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
@pytest.mark.parametrize("max_bytes", [1, 2**20])
def test_values_of_an_accelerator_are_in_pinned_memory(
    monkeypatch: pytest.MonkeyPatch, max_bytes: int, kind: str
) -> None:
    """CPU devices, which have that kind of memory too, stand for it."""
    monkeypatch.setattr(to_host, "is_host", lambda device: False)
    monkeypatch.setattr(to_host, "_LARGE_BYTES", 64)
    device: Any = jax.devices()[3]
    target = SingleDeviceSharding(device, memory_kind=kind)
    given = {name: np.arange(size) for name, size in [("small", 2), ("large", 512)]}
    blocks = [(name, jax.device_put(data, target)) for name, data in given.items()]
    seen = {}

    def read(traced: jax.Array) -> jax.Array:
        for _, values in one_by_one(blocks, max_bytes):
            traced += values.sum()
        return traced

    assert jax.jit(read)(0) == sum(data.sum() for data in given.values())
    for host in host_blocks([(name, data, data.nbytes) for name, data in blocks], max_bytes):
        values = host.values()
        assert np.shares_memory(host.values(), values)
        assert (host._copy.sharding.memory_kind == kind) == (
            host.key == "small" or kind == "pinned_host"
        )
        host.release()
        seen[host.key] = values
    for _, data in blocks:
        data.delete()
    for name, data in given.items():
        np.testing.assert_array_equal(seen[name], data)


def test_a_block_of_a_source_is_read_once_for_several_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, others = threading.Event(), []

    class Source:
        def begin(self) -> None: ...
        def read(self) -> np.ndarray:
            reading.set()
            others[0].join(0.2)  # until it waits for this one
            return np.arange(3)

    monkeypatch.setattr(to_host, "SourceBlock", Source)
    given: list[tuple[str, Any, int]] = [("a", Source(), 24)]
    (host,) = host_blocks(given, 24)
    seen: list[Any] = []

    def ask() -> None:
        assert reading.wait(60)
        seen.append(host.values())

    others.append(threading.Thread(target=ask))
    others[0].start()
    values = host.values()
    others[0].join()
    assert seen[0] is values
