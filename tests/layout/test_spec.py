import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from gda.layout.spec import (
    axes_by_dimension,
    check_mesh_shape,
    check_shape,
    check_spec,
    entries_of,
    fitting_specs,
    format_spec,
    indivisible_error,
)
from gda.testing.strategies import ShardedCase, mesh_shapes, sharded_cases

P = PartitionSpec
MESH = {"x": 4, "y": 2}


# Usual cases.


@pytest.mark.parametrize(
    "shape", [(8, 2), [8, 2], np.array([8, 2]), (np.int64(8), np.uint8(2)), iter((8, 2))]
)
def test_a_shape_is_any_sequence_of_integers(shape: Any) -> None:
    checked = check_shape(shape)
    assert checked == (8, 2)
    assert list(map(type, checked)) == [int, int]


def test_a_mesh_shape_keeps_the_order_of_its_axes() -> None:
    sizes = check_mesh_shape({"y": np.int32(2), "x": 4})
    assert list(sizes.items()) == [("y", 2), ("x", 4)]
    assert list(map(type, sizes.values())) == [int, int]


def test_surplus_axes_of_size_1_are_dropped() -> None:
    for spec, shape, entries in [
        ((("a", "b"),), (), ()),
        (("a",), (), ()),
        (("x", None, "b"), (8,), ("x",)),
        (P("x", ("b", "a")), (8,), ("x",)),
    ]:
        assert check_spec(spec, shape, {"a": 1, "x": 4, "b": 1}) == entries
        with pytest.raises(ValueError, match="give at most one entry per dimension"):
            check_spec(spec, shape, {"a": 2, "x": 4, "b": 2})
        with pytest.raises(ValueError, match="give at most one entry per dimension"):
            check_spec(spec, shape)


@pytest.mark.parametrize(
    "spec",
    [P("x", ("y",)), ("x", ("y",)), ["x", ["y"]], iter(["x", ("y",)]), P("x", ("y",), None)],
    ids=["PartitionSpec", "tuple", "list", "iterator", "trailing None"],
)
def test_a_spec_is_any_sequence_of_entries(spec: Any) -> None:
    entries = check_spec(spec, (8, 2))
    assert axes_by_dimension(entries, 2, MESH) == (("x",), ("y",))


@pytest.mark.parametrize("spec", [P(None), [None, None], P(None, ()), P(())])
def test_surplus_entries_that_cut_nothing_are_dropped(spec: Any) -> None:
    assert check_spec(spec, ()) == ()


def test_reduced_axes_of_a_spec_do_not_change_its_layout() -> None:
    assert check_spec(P("x", reduced={"y"}), (8,)) == ("x",)


def test_a_spec_is_written_in_its_shortest_form() -> None:
    for axes, entries, text in [
        ((), (), "P()"),
        (((), ()), (), "P()"),
        ((("x",), (), ()), ("x",), "P('x')"),
        (((), ("y", "x")), (None, ("y", "x")), "P(None, ('y', 'x'))"),
    ]:
        assert entries_of(axes) == entries
        assert format_spec(entries) == text


def test_a_spec_that_fits_keeps_the_order_of_the_users_names() -> None:
    found = fitting_specs((("z", "y", "x"),), (12,), {"x": 4, "y": 5, "z": 3})
    assert format_spec(entries_of(found[0])) == "P(('z', 'x'))"


def test_specs_that_fit_are_few_and_found_soon_on_a_mesh_of_many_axes() -> None:
    mesh_shape = {f"a{i}": 2 for i in range(20)}
    found = fitting_specs((tuple(mesh_shape), (), ()), (2, 3, 5), mesh_shape)
    assert 1 <= len(found) <= 4


# Properties.


@given(sharded_cases(mesh_shapes(max_devices=1000)))
def test_the_shortest_form_means_the_same(case: ShardedCase[dict[str, int]]) -> None:
    rank = len(case.global_shape)
    axes = axes_by_dimension(check_spec(case.spec, case.global_shape), rank, case.mesh)
    short = entries_of(axes)
    assert axes_by_dimension(short, rank, case.mesh) == axes
    assert not short or short[-1] is not None


@given(sharded_cases(mesh_shapes(max_devices=100)), st.data())
def test_every_spec_that_is_suggested_fits_and_is_suggested_once(
    case: ShardedCase[dict[str, int]], data: st.DataObject
) -> None:
    rank = len(case.global_shape)
    shape = data.draw(st.tuples(*[st.integers(0, 12)] * rank), label="shape")
    axes = axes_by_dimension(check_spec(case.spec, shape), rank, case.mesh)
    found = fitting_specs(axes, shape, case.mesh)
    assert 1 <= len(found) <= 4
    assert len(set(map(entries_of, found))) == len(found)
    for candidate in found:
        for size, names in zip(shape, candidate, strict=True):
            assert size % math.prod(case.mesh[name] for name in names) == 0


@given(st.integers(1, 200), st.integers(2, 64))
def test_the_sizes_that_are_suggested_are_the_nearest_that_divide(size: int, ways: int) -> None:
    if size % ways == 0:
        return
    message = str(indivisible_error((("x",),), (size,), {"x": ways}))
    above = next(other for other in itertools.count(size) if other % ways == 0)
    below = next(other for other in range(size, -1, -1) if other % ways == 0)
    expected = f"{below} and {above} are the nearest sizes" if below else f"{above} is the nearest"
    assert f"; {expected}" in message


# Errors.

NOT_A_SPEC = (
    "spec must be a PartitionSpec or a sequence of None, axis names and tuples of them, one entry "
    "per dimension, not "
)

NOT_A_SHAPE = "global_shape must be a sequence of integers such as (8, 2), not "
NOT_AN_ENTRY = "; an entry is None, the name of a mesh axis or a tuple of names"
NO_AXIS = "spec {} shards dimension {} by mesh axis {}, but the mesh has the axes {}"

BAD: list[tuple[Callable[..., object], tuple[Any, ...], type[Exception], str]] = [
    (check_shape, ((8.0, 2),), TypeError, f"{NOT_A_SHAPE}(8.0, 2)"),
    (check_shape, ((True,),), TypeError, f"{NOT_A_SHAPE}(True,)"),
    # A set and a dict have no order of dimensions; each of some bytes is a number.
    *((check_shape, (no,), TypeError, f"{NOT_A_SHAPE}{no!r}") for no in ({8}, {8: 2}, b"\x08")),
    (check_shape, ((8, -2),), ValueError, "global_shape (8, -2) has a negative size; sizes are 0"),
    (check_mesh_shape, ((4, 2),), TypeError, "mesh_shape must map axis names to sizes, in mesh"),
    (check_mesh_shape, ({"x": 4.0},), TypeError, "sizes of mesh axes must be integers: {'x': 4.0}"),
    (check_mesh_shape, ({"y": 0},), ValueError, "mesh {'y': 0} has an axis without devices; s"),
    (check_spec, ("x", (8,)), TypeError, "spec 'x' is a string; write P('x') or ['x']"),
    # A set has no order of its own: two processes would cut the same array differently.
    (check_spec, ({"x"}, (8,)), TypeError, NOT_A_SPEC + "{'x'}"),
    (
        *(check_spec, (P("x", "y"), (8,)), ValueError),
        "spec P('x', 'y') has 2 entries, but global shape (8,) has 1 dimension; give at most "
        "one entry per dimension",
    ),
    (
        *(axes_by_dimension, ((None, "modle"), 2, {"data": 4, "model": 2}), ValueError),
        NO_AXIS.format("P(None, 'modle')", 1, "'modle'", {"data": 4, "model": 2})
        + "; did you mean 'model'?",
    ),
    (axes_by_dimension, (("x", ("y", "x")), 2, MESH), ValueError, "spec P('x', ('y', 'x')) uses"),
    (
        axes_by_dimension,
        (("x", P.UNCONSTRAINED), 2, MESH),
        ValueError,
        "spec P('x', UNCONSTRAINED)",
    ),
    (axes_by_dimension, ((0,), 1, MESH), TypeError, f"entry 0 of the spec is 0{NOT_AN_ENTRY}"),
    (axes_by_dimension, ((("x", None),), 1, MESH), TypeError, "entry 0 of the spec is ('x', None)"),
]


def test_a_wrong_argument_is_refused() -> None:
    for check, arguments, error, message in BAD:
        with pytest.raises(error) as info:
            check(*arguments)
        assert str(info.value).startswith(message)


def test_a_spec_with_unreduced_axes_has_no_layout() -> None:
    with pytest.raises(ValueError, match="has unreduced axes") as info:
        check_spec(P("x", unreduced={"y"}), (8,))
    assert str(info.value).endswith(
        "so the devices hold partial sums and the array has no fixed layout; reduce it first, for "
        "instance with jax.sharding.reshard"
    )


def test_every_dimension_that_cannot_be_cut_is_named() -> None:
    assert str(indivisible_error((("x", "y"), (), ("z",)), (6, 5, 7), {**MESH, "z": 3})) == (
        "global shape (6, 5, 7) cannot be sharded by P(('x', 'y'), None, 'z') on the mesh {'x': "
        "4, 'y': 2, 'z': 3}: dimension 0 of size 6 is sharded 8 ways by mesh axes 'x' and 'y', "
        "and 6 is not divisible by 8; 8 is the nearest size that divides. Also, dimension 2 of "
        "size 7 is sharded 3 ways by mesh axis 'z', and 7 is not divisible by 3; 6 and 9 are the "
        "nearest sizes that divide. Specs of this mesh that fit (6, 5, 7) as it stands, for "
        "instance: P(('y', 'z')), P('y'), P('z'), P(). "
        "With padding any size fits: gda.PaddedArray, or ShardGrid(..., pad=True)"
    )
