"""Lazy views: the values of NumPy, and no more read than they need."""

import math
import threading
from pathlib import Path
from typing import Any

import h5py
import jax
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import zarr
from counting import Counting
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from trials import often

import gda
from gda.arrays.construction import reading
from gda.layout.dtype_names import _names_of_ml_dtypes, dtype_named
from gda.storage import LazyArray, concatenate, lazy, stack
from gda.storage.sources import AsyncSource, source_of
from gda.storage.views import reads
from gda.storage.views.mapping import identity


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.arange(math.prod(shape), dtype=dtype).reshape(shape)


def test_load_tree_narrows_pads_and_casts_a_view_as_any_source(auto_mesh: Mesh) -> None:
    view = lazy(numbers(6, 5, dtype=np.int64)).T
    padded = gda.load_tree({"w": view}, auto_mesh, P("x"), pad=True, dtype={"w": "bf16"})["w"]
    assert (padded.shape, padded.dtype) == ((5, 6), ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(padded), np.arange(30).reshape(6, 5).T)
    assert gda.GlobalArray.from_source(view, auto_mesh, P()).dtype == np.int32
    with pytest.raises(gda.DoesNotFitError, match="narrows to int32"):
        gda.GlobalArray.from_source(lazy(np.array([2**40])), auto_mesh, P())


def test_each_device_reads_its_own_part_of_a_transposed_weight(auto_mesh: Mesh) -> None:
    for rows, starts in [(64, [0]), (2**13, [0, 2**11, 2**12, 3 * 2**11])]:
        source = Counting(numbers(rows, 8))
        gda.GlobalArray.from_source(lazy(source).T, auto_mesh, P(None, "x"))
        assert (source.counts == 1).all()
        assert sorted(index[0].start for index in source.asked) == starts


def test_blocks_of_a_view_are_read_at_the_same_time(auto_mesh: Mesh) -> None:
    both = threading.Barrier(2, timeout=60)

    class Waiting(Counting):
        def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray[Any, Any]:
            both.wait()
            return super().__getitem__(index)

    data = numbers(8, 2**15)  # halves of rows are no shorter than what is read with them
    view = lazy(Waiting(data)).T.reshape(2, 2**14, 8)
    g = gda.GlobalArray.from_source(view, auto_mesh, P("y"), max_workers=2)
    np.testing.assert_array_equal(np.asarray(g), data.T.reshape(2, 2**14, 8))


# Operations.


@pytest.mark.parametrize("name", ["bool", "int16", "float64", "complex64", *_names_of_ml_dtypes()])
def test_all_dtypes(name: str) -> None:
    typed = (np.arange(24) % 2).reshape(6, 4).astype(np.float32).astype(dtype_named(name))
    data = typed if typed.dtype.kind == "c" else typed.astype(np.float32)  # values that it has
    source = Counting(typed)
    for view, expected in [
        (lazy(source).T[::-1], typed.T[::-1]),
        (lazy(source).reshape(2, 3, 4).transpose(2, 1, 0), typed.reshape(2, 3, 4).T),
        (stack([lazy(source).T, typed.T], axis=1), np.stack([typed.T, typed.T], axis=1)),
        (lazy(data).T.astype(name), typed.T),
        (lazy(typed.view(f"V{typed.itemsize}")).T.astype(name), typed.T),
        (
            stack([lazy(typed.view(f"V{typed.itemsize}")).T] * 2).astype(name),
            np.stack([typed.T] * 2),
        ),
    ]:
        block = np.asarray(view)
        assert block.dtype == typed.dtype
        assert block.tobytes() == np.ascontiguousarray(expected).tobytes()


def test_one_source_without_a_type_may_be_given_two() -> None:
    raw = numbers(4, 3).astype(ml_dtypes.bfloat16).view("V2")
    views = [lazy(raw).astype(dtype).astype("float32") for dtype in ("bfloat16", "float16")]
    expected = [raw.view(dtype).astype("float32") for dtype in (ml_dtypes.bfloat16, np.float16)]
    np.testing.assert_array_equal(stack(views), np.stack(expected))


def test_a_cast_of_elements_without_a_type_keeps_their_size() -> None:
    data = numbers(3, 2).astype(ml_dtypes.bfloat16)
    with pytest.raises(TypeError, match="elements of 2 bytes without a NumPy type .* float32"):
        lazy(data.view("V2")).astype("float32")


# Other libraries.


def test_sources_of_other_libraries(tmp_path: Path, auto_mesh: Mesh) -> None:
    data = numbers(12, 6)
    np.save(tmp_path / "a.npy", data)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        sources: list[Any] = [
            np.load(tmp_path / "a.npy", mmap_mode="r"),
            zarr.create_array(store=tmp_path / "a.zarr", data=data, chunks=(5, 4)),
            file.create_dataset("a", data=data, chunks=(4, 6)),
            jax.numpy.asarray(data, "bfloat16"),
        ]
        for source in sources:
            view = lazy(source).T.reshape(3, 2, 12)[:, ::-1, 1:].astype("float32")
            expected = data.T.reshape(3, 2, 12)[:, ::-1, 1:]
            np.testing.assert_array_equal(np.asarray(view), expected)
            joined = concatenate([lazy(source), source[2:4]])
            assert np.asarray(joined)[12:].tolist() == data[2:4].tolist()


def open_tensorstore(data: np.ndarray[Any, Any], **options: Any) -> Any:
    spec: Any = {"driver": "zarr3", "kvstore": "memory://", **options}
    made = {"dtype": data.dtype, "shape": data.shape, "create": True}
    store = ts.open(spec, chunk_layout=ts.ChunkLayout(chunk_shape=[4, 3]), **made).result()
    store.write(data).result()
    return store


def test_views_of_tensorstores_read_all_of_them_at_once(auto_mesh: Mesh) -> None:
    layers = [numbers(8, 6) + 100 * i for i in range(3)]
    views = [lazy(open_tensorstore(layer)).T for layer in layers]
    up, expected = stack(views, axis=1), np.stack([layer.T for layer in layers], axis=1)
    assert isinstance(source_of(up), AsyncSource)
    split = expected.reshape(6, 3, 2, 4).transpose(2, 0, 3, 1)
    for view, wanted in [
        (up[1:, ::2, ::-1], expected[1:, ::2, ::-1]),
        (up.reshape(6, 3, 2, 4).transpose(2, 0, 3, 1), split),
        (up.astype("bf16"), expected.astype(ml_dtypes.bfloat16)),
        (up.reshape(-1)[5:100:3], expected.reshape(-1)[5:100:3]),
    ]:
        np.testing.assert_array_equal(np.asarray(view), wanted)
        loaded = gda.load_tree([view], auto_mesh, P("x"), pad=True, max_bytes=64)[0]
        np.testing.assert_array_equal(np.asarray(loaded), wanted)
    assert not isinstance(source_of(concatenate([up, expected])), AsyncSource)


def test_a_tensorstore_has_few_bytes_in_buffers_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, auto_mesh: Mesh
) -> None:
    monkeypatch.setattr(reads, "PIECE_BYTES", 256)
    monkeypatch.setattr(reads, "_BUFFERS_BYTES", 512)
    held: list[int] = []
    begin, deliver = reads._SourceRead.begin, reads._SourceRead.deliver

    def counted(read: Any) -> Any:
        held.append(read.buffer_bytes)
        assert sum(held) <= 512
        return begin(read)

    def released(read: Any) -> None:
        deliver(read)
        held.remove(read.buffer_bytes)

    monkeypatch.setattr(reads._SourceRead, "begin", counted)
    monkeypatch.setattr(reads._SourceRead, "deliver", released)
    data = numbers(64, 12)
    view = lazy(open_tensorstore(data)).T.astype("bf16")
    assert source_of(view).buffer_bytes == 512
    np.testing.assert_array_equal(np.asarray(view), data.T.astype(ml_dtypes.bfloat16))
    assert held == []
    monkeypatch.undo()
    # They count for max_bytes, beside the elements.
    seen: list[Any] = []
    run = reading.run
    monkeypatch.setattr(
        reading, "run", lambda tasks, options: run(seen.extend(tasks) or seen, options)
    )
    gda.GlobalArray.from_source(view[:, 1:33], auto_mesh, P(None, "x"))
    assert [task.nbytes for task in seen] == [2 * 12 * 8 + data.nbytes] * 4


# The elements that are read.


def test_columns_that_are_far_from_each_other_are_read_a_piece_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reads, "PIECE_BYTES", 2**14)
    monkeypatch.setattr(reads, "READ_BYTES", 2**10)
    data = numbers(512, 256)
    for chunks in (None, (8, 256)):
        source = Counting(data, chunks)
        w = lazy(source)
        two = concatenate([w[:, 3], w[::-1, 250]])
        np.testing.assert_array_equal(
            np.asarray(two), np.concatenate([data[:, 3], data[::-1, 250]])
        )
        assert max(source.data[index].nbytes for index in source.asked) <= 2**14
        assert source.counts.max() == 1


def test_rows_that_are_far_from_each_other_are_read_alone() -> None:
    source = Counting(np.zeros((20, 2**14), np.float32))  # rows of 64 KiB
    np.asarray(lazy(source)[::5])
    assert [index[0] for index in source.asked] == [slice(n, n + 1) for n in (0, 5, 10, 15)]
    source.asked.clear()
    np.asarray(lazy(source)[:, ::50])  # what lies between is less than a read costs
    assert source.asked == [(slice(0, 20), slice(0, 16351))]


def test_slices_that_share_a_chunk_are_read_together_whatever_lies_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reads, "PIECE_BYTES", 16)
    source = Counting(numbers(2, 3, 3), chunks=(2, 2, 2))
    # Rows 1 and 2 of the first matrix, and the first element of the second: its chunk has row 1.
    view = lazy(source).reshape(18)[4:10]
    np.testing.assert_array_equal(np.asarray(view), source.data.reshape(18)[4:10])
    assert source.counts.max() == 1
    # A row and a column, which share one chunk, and have all others apart.
    source = Counting(w := numbers(12, 12), chunks=(2, 2))
    both = concatenate([lazy(source)[4], lazy(source)[:, 7]])
    np.testing.assert_array_equal(both, [*w[4], *w[:, 7]])
    assert source.counts.max() == 1


def test_a_stack_that_is_cast_needs_no_memory_for_a_second_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reads, "PIECE_BYTES", 512)
    monkeypatch.setattr(reads, "READ_BYTES", 64)
    layers = [Counting(numbers(64, 16) + i) for i in range(3)]
    up = stack([lazy(layer).T for layer in layers], axis=1).astype("bf16")
    plan = reads.ReadPlan()
    plan.add(up._node, (slice(0, 16), slice(0, 3), slice(0, 64)), np.empty(up.shape, up.dtype))
    assert not plan.copies
    assert all(read.buffer_bytes <= 512 for read in plan.reads())
    expected = np.stack([layer.data.T for layer in layers], axis=1)
    np.testing.assert_array_equal(np.asarray(up), expected.astype(ml_dtypes.bfloat16))


def test_chunks_are_those_of_the_source_in_the_axes_of_the_view() -> None:
    view = lazy(Counting(np.zeros((16, 12)), chunks=(4, 6)))

    def chunks(view: LazyArray) -> Any:
        return source_of(view).chunks  # also of parts that begin within one

    assert chunks(view.T) == (6, 4)
    assert chunks(view[4:, None, 6:]) == (4, 1, 6)
    assert chunks(view[1:]) == (4, 6)
    assert chunks(view[::-1]) == (4, 6)
    assert chunks(view.reshape(8, 2, 12)) == (2, 2, 6)
    assert chunks(view.reshape(2, 8, 12)) == (1, 4, 6)
    assert chunks(view.reshape(-1)) == (48,)  # of which each has two
    assert chunks(view[:, :6].reshape(-1)) == (24,)
    assert chunks(stack([view, view], axis=1)) == (4, 1, 6)
    assert chunks(concatenate([view, view])) == (4, 6)
    assert chunks(concatenate([view, view[:3], view])) == (4, 6)
    # Without chunks, those are the elements that lie together in 32 KiB.
    assert chunks(lazy(np.zeros((100, 1024))).T) == (1024, 4)


# Any composition.


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Any, ...]:
    items: list[Any] = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        ends = st.none() | st.integers(-size - 1, size + 1)
        steps = st.sampled_from([None, 1, 2, 3, -1, -2])
        parts = st.builds(slice, ends, ends, steps)
        items.append(draw(parts | st.integers(-size, size - 1) if size else parts))
        items += draw(st.sampled_from([[]] * 5 + [[None]]))
    if draw(st.booleans()):
        items.append(...)
    return tuple(items)


@st.composite
def shapes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Draw a shape with a dimension split, or neighbours merged."""
    axis = draw(st.integers(0, len(shape) - 1))
    size = shape[axis]
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    first = draw(st.sampled_from(divisors)) if size else 1
    split = (*shape[:axis], first, size // first, *shape[axis + 1 :])
    if axis and draw(st.booleans()):
        return (*shape[: axis - 1], shape[axis - 1] * size, *shape[axis + 1 :])
    return split


def changed(
    data: st.DataObject, view: LazyArray, array: Any, joins: list[int]
) -> tuple[LazyArray, Any]:
    """Return a view and its array, both changed by one random operation; note where they join."""
    names = ["transpose", "index", "index", "reshape", "reshape", "join"]
    name = data.draw(st.sampled_from(names))
    if name == "transpose":
        axes = data.draw(st.permutations(range(array.ndim)))
        return view.transpose(axes), array.transpose(axes)
    if name == "index" or not array.ndim:
        index = data.draw(indices(array.shape))
        return view[index], array[index]
    if name == "reshape":
        shape = data.draw(shapes_of(array.shape))
        try:
            return view.reshape(shape), array.reshape(shape)
        except ValueError as error:
            assert "begin at different elements" in str(error)  # noqa: PT017
            return view, array
    axis = data.draw(st.integers(0, array.ndim - 1))
    if array.size > 1000:
        return view, array
    joins.append(axis)
    other = data.draw(st.sampled_from([view, array]))
    if data.draw(st.booleans()):
        return stack([view, other], axis), np.stack([array, array], axis)
    half = (slice(None),) * axis + (slice(array.shape[axis] // 2, None),)
    return concatenate([other, view[half]], axis), np.concatenate([array, array[half]], axis)


@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "joined"])
@pytest.mark.parametrize("has_chunks", [True, False], ids=["chunks", "elements"])
@often(2_500)  # for each of the four
@given(st.data())
def test_any_composition_has_the_values_of_numpy_and_reads_no_element_twice(
    is_exact: bool, has_chunks: bool, data: st.DataObject
) -> None:
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 0]), max_size=3)))
    chunks = data.draw(st.tuples(*[st.integers(1, 4) for _ in shape])) if has_chunks else None
    source = Counting(numbers(*shape, dtype=np.int32), chunks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reads, "READ_BYTES", 1 if is_exact else 32 * 1024)
        patch.setattr(reads, "PIECE_BYTES", data.draw(st.sampled_from([16, 4 * 2**20])))
        view, array, joins = lazy(source), source.data, []
        for _ in range(data.draw(st.integers(0, 6))):
            view, array = changed(data, view, array, joins)
        cast = data.draw(st.sampled_from([array.dtype, np.dtype("f2"), np.dtype("f8")]))
        view, array = view.astype(cast), array.astype(cast)
        assert (view.shape, view.dtype) == (array.shape, array.dtype)
        ends = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in array.shape]
        index = tuple(slice(*pair) for pair in ends)
        block = source_of(view).read(index, lambda dtype: np.empty(array[index].shape, dtype))
        np.testing.assert_array_equal(block, array[index])
    needed = np.isin(source.data, array[index].astype(np.int32))
    if not is_exact and not has_chunks:
        assert len(source.asked) <= 1
    assert (source.counts <= 1).all()
    if is_exact and not has_chunks and not joins:
        assert not source.counts[~needed].any()


@pytest.mark.parametrize(
    "part",
    [
        lambda view: view[None][1:],
        lambda view: view.reshape(1)[:0],
        lambda view: view[None][:0].reshape(0, 3)[:, 1:2],
        lambda view: view[None, None][1:, ::-1],
    ],
)
def test_a_part_of_a_scalar_without_elements(part: Any) -> None:
    scalar = np.array(7, np.int32)
    found, expected = part(lazy(scalar)), part(scalar)
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(concatenate([found, found]), np.concatenate([expected] * 2))


# Mistakes.


VIEW = lazy(numbers(6, 4))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: VIEW[0, 0, 0], IndexError, "too many indices .* 2-dimensional, but 3"),
        *[
            (lambda index=index: VIEW[index], IndexError, "integers, slices, ... and None.*stack")
            for index in [[0, 2], True, np.True_, (0, [1]), "name", 1.5]
        ],
        (lambda: VIEW.reshape(4, 6), ValueError, r"\(4, 6\): its rows .* different .*asarray"),
        (lambda: VIEW.reshape(5, -1), ValueError, r"of 24 elements, cannot be reshaped to \(5, -1"),
        (lambda: VIEW.reshape(2.0, 12), TypeError, "integer"),
        (lambda: VIEW.transpose(1), ValueError, r"axes \(1,\) .* give each one once"),
        (lambda: VIEW.astype("flaot32"), TypeError, "'flaot32' is not a dtype; a dtype is"),
        (lambda: len(lazy(np.float32(1))), TypeError, r"has no len\(\); use view.size"),
        (lambda: stack([]), ValueError, "stack needs at least one"),
        (lambda: stack([VIEW, VIEW.T]), ValueError, r"view 1 of stack has shape \(4, 6\), the fir"),
        (lambda: concatenate([VIEW, VIEW[:, 1:]]), ValueError, "differ along axis 0 only"),
        (lambda: stack([VIEW, VIEW.astype("i1")]), TypeError, r"int8.*astype\('float32'\)"),
        (lambda: lazy([1, 2]), TypeError, "a list is not a source"),
        (lambda: np.array(VIEW, copy=False), ValueError, "copy=False forbids"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_mistakes_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_source_that_fails_or_gives_other_blocks_is_named(auto_mesh: Mesh) -> None:
    class Wrong(Counting):
        def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray[Any, Any]:
            return super().__getitem__(index)[:1]

    with pytest.raises(ValueError, match=r"has shape \(1, 4\); a source of shape") as caught:
        gda.load_tree({"w": stack([lazy(Wrong(numbers(6, 4)))])}, auto_mesh, P())
    notes = "\n".join(caught.value.__notes__)
    assert "from [0:6, 0:4] of a Wrong of shape (6, 4)" in notes
    assert "while reading index" in notes
    scaled = Counting(numbers(6, 4))
    scaled.dtype = np.dtype("int8")
    with pytest.raises(TypeError, match="its block has dtype float32.*astype"):
        np.asarray(lazy(scaled))
    assert np.asarray(lazy(scaled).astype("float64"))[5, 3] == 23


# Views of many views.


def test_a_chain_of_joined_views_of_any_length(auto_mesh: Mesh) -> None:
    view, data = lazy(numbers(2, 4)), numbers(2, 4)
    for n in range(600):
        part = numbers(1, 4) + n
        if n % 3:
            view, data = concatenate([view, part])[1:], np.concatenate([data, part])[1:]
        else:  # not in the memory of the result
            view = concatenate([view.astype("f8"), part.astype("f8")]).astype("f4")
            data = np.concatenate([data, part])
    np.testing.assert_array_equal(np.asarray(view[-300::2]), data[-300::2])
    loaded = gda.GlobalArray.from_source(view[-8:], auto_mesh, P("x"))
    np.testing.assert_array_equal(np.asarray(loaded), data[-8:])


def test_parts_that_are_shared_are_looked_at_once() -> None:
    view = lazy(numbers(1))
    for _ in range(50):
        view = concatenate([view, view])
    assert view.shape == (2**50,)
    assert source_of(view).chunks == (1,)
    assert np.asarray(view[2**49 - 1 : 2**49 + 2]).tolist() == [0.0] * 3


def test_a_piece_of_a_source_is_a_few_boxes_of_the_view() -> None:
    pairs = identity((2_000_000,)).reshaped((1_000_000, 2))
    assert pairs is not None
    reverse = pairs.indexed((range(1_000_000), range(1, -1, -1)))
    assert reverse is not None
    [box] = reverse.boxes((slice(0, 1_000_000), slice(0, 2)))
    assert len([*box.parts_at((slice(3, 1_999_998),))]) <= 3
