"""The elements in which two arrays differ, against NumPy and Python's own numbers."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from trials import rarely

from gda.checkpoint import ElementDifferences
from gda.checkpoint.comparing import elements as module
from gda.checkpoint.comparing.elements import element_differences, merged

NAN, INF = math.nan, math.inf


def of(a: Any, b: Any, dtype: Any = np.float32) -> ElementDifferences:
    a, b = np.asarray(a, dtype), np.asarray(b, dtype)
    return element_differences(a, b, (0,) * a.ndim)


def test_the_number_the_most_and_its_place() -> None:
    found = of([[1, 2], [4, 8]], [[1, 3], [2, 8]])
    assert found == ElementDifferences(2, 4, 2.0, (1, 0), 0.5, (1, 0))
    assert str(found) == "2 of 4 elements; largest 2.0 at [1,0], relative 0.5 at [1,0]"
    assert str(of([1], [1])) == "0 of 1 element"


@pytest.mark.parametrize(
    ("a", "b", "count", "largest", "relative"),
    [
        (NAN, NAN, 0, 0, 0.0),
        (NAN, 1, 1, NAN, NAN),
        (1, NAN, 1, NAN, NAN),
        (NAN, INF, 1, NAN, NAN),
        (NAN, -NAN, 1, NAN, NAN),
        (INF, INF, 0, 0, 0.0),
        (INF, 1, 1, INF, INF),
        (INF, -INF, 1, INF, INF),
        (0.0, -0.0, 1, 0.0, 0.0),
        (0.0, 4.0, 1, 4.0, 1.0),
        (-1.0, 1.0, 1, 2.0, 2.0),
    ],
)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16])
def test_nan_infinities_and_zeros(
    a: float, b: float, count: int, largest: float, relative: float, dtype: Any
) -> None:
    found = of([a], [b], dtype)
    assert found.count == count
    assert repr((float(found.largest), found.largest_relative)) == repr((float(largest), relative))


def test_nan_is_larger_than_all_others() -> None:
    found = of([0, 0, 0, 0], [INF, NAN, 5, NAN])
    assert math.isnan(found.largest)
    assert (found.count, found.largest_at) == (4, (1,))
    assert found.to_dict()["largest"] == "nan"


@pytest.mark.parametrize(
    ("dtype", "a", "b", "largest"),
    [
        (np.int64, -(2**63), 2**63 - 1, 2**64 - 1),
        (np.uint64, 2**64 - 1, 0, 2**64 - 1),
        (np.int64, 2**53, 2**53 + 1, 1),
        (np.int8, -128, 127, 255),
        (np.bool_, True, False, 1),
        (ml_dtypes.int4, -8, 7, 15),
        (ml_dtypes.uint4, 15, 0, 15),
        (ml_dtypes.float8_e4m3fn, 448.0, -448.0, 896.0),
        (np.complex64, 3 + 4j, 0, 5.0),
        (np.complex128, 3 + 4j, 0, 5.0),
    ],
)
def test_differences_are_exact(dtype: Any, a: Any, b: Any, largest: Any) -> None:
    for one, other in [(a, b), (b, a)]:
        found = of([one, one], [one, other], dtype)
        assert (found.count, found.largest, found.largest_at) == (1, largest, (1,))


def test_bits_beside_a_narrow_element_do_not_count() -> None:
    plain = np.array([3, 3], np.uint8)
    a, b = plain.view(ml_dtypes.int4), (plain | 0xF0).view(ml_dtypes.int4)
    assert element_differences(a, b, (0,)).count == 0


FLOATS = [np.float32, np.float64, np.float16]
INTEGERS = [np.int8, np.uint8, np.int32, np.int64, np.uint64]


@given(st.data())
def test_any_two_arrays(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([*FLOATS, *INTEGERS, np.bool_]))
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    few = st.sampled_from(data.draw(hnp.arrays(dtype, 3)).tolist())
    a, b = (data.draw(hnp.arrays(dtype, shape, elements=few)) for _ in range(2))
    start = tuple(range(5, 5 + len(shape)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_AT_A_TIME", data.draw(st.integers(1, 9)))
        found = element_differences(a, b, start)
    different = [i for i in np.ndindex(shape) if a[i].tobytes() != b[i].tobytes()]
    assert (found.count, found.size) == (len(different), a.size)
    if not different:
        assert found == ElementDifferences(0, a.size)
        return
    sizes = {i: _difference(a[i].item(), b[i].item()) for i in different}
    assert any(map(math.isnan, sizes.values())) == math.isnan(found.largest)
    if not math.isnan(found.largest):
        largest = max(sizes.values())
        first = next(i for i in different if sizes[i] == largest)
        assert found.largest == largest
        assert found.largest_at == tuple(np.add(first, start))


def _difference(x: Any, y: Any) -> Any:
    return abs(int(x) - int(y)) if isinstance(x, int) else abs(x - y)


@rarely(2)
@given(hnp.arrays(np.int16, (5, 3)), hnp.arrays(np.int16, (5, 3)), st.integers(0, 5))
def test_parts_in_any_order_make_the_whole(a: Any, b: Any, at: int) -> None:
    parts = [
        element_differences(a[:at], b[:at], (0, 0)),
        element_differences(a[at:], b[at:], (at, 0)),
    ]
    assert merged(parts) == merged(parts[::-1]) == element_differences(a, b, (0, 0))
