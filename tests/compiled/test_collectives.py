"""Programs whose collectives are known, over Auto and over Explicit axes.

XLA is free to choose. If another version or device may choose otherwise, a test asserts only the
axes, the bytes, and that nothing else is communicated.
"""

import dataclasses
import functools
import os
import re
import site
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import ORDERS, abstract, cut, mesh_of, ordered_mesh
from trials import rarely

import gda
from gda.compiled.hlo import Collective, Collectives, Traffic
from gda.compiled.hlo.listing import format_line
from gda.compiled.programs import unwrapped
from gda.testing.strategies import mesh_shapes

pytestmark = pytest.mark.usefixtures("optimizing_compiler")

HERE = __file__


def only(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Collective:
    (collective,) = gda.collectives(fun, *args, **kwargs)
    return collective


def mapped(body: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    """A layer whose weights are a jitted method's."""

    weights: jax.Array

    @jax.jit
    def apply(self, x: jax.Array) -> jax.Array:
        return x @ self.weights

    apply_partially = functools.partialmethod(apply)


# Layouts that the compiler has to arrange. The mesh is (4, 2).


def test_a_matmul_sharded_on_the_contracting_dimension_is_one_all_reduce(auto_mesh: Mesh) -> None:
    def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
        return a @ b

    found = only(
        matmul, abstract((16, 32), auto_mesh, None, "x"), abstract((32, 8), auto_mesh, "x")
    )
    assert (found.kind, found.axes) == ("all-reduce", ("x",))
    assert (found.operand_shapes, found.operand_dtypes) == (((16, 8),), ("float32",))
    assert (found.nbytes, found.nbytes_output, found.count) == (16 * 8 * 4, 16 * 8 * 4, 1)
    assert found.source_file == HERE
    assert found.source_line == matmul.__code__.co_firstlineno + 1
    assert "dot_general" in found.op_name
    assert not found.is_conditional


def test_sharded_weights_are_gathered_where_they_are_used(mesh: Mesh) -> None:
    both = ("x", "y")

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        w = gda.constrain(w, P())
        return jnp.tanh(x @ w)

    found = gda.collectives(layer, abstract((64, 32), mesh, both), abstract((32, 8), mesh, both))
    assert [each.kind for each in found] == ["all-gather"]
    assert found.by_axis() == {both: Traffic(1, 32 * 8 * 4 // 8)}
    assert found[0].nbytes_output == 32 * 8 * 4


def test_elementwise_is_nothing(mesh: Mesh) -> None:
    found = gda.collectives(lambda x: 2 * jnp.sin(x) + 1, abstract((16, 32), mesh, "x", "y"))
    assert len(found) == 0
    assert (found.nbytes_total, found.by_axis()) == (0, {})
    assert str(found) == "no collectives on the mesh {'x': 4, 'y': 2}"


# shard_map, where one says what is communicated; random programs are below.


def test_axes_are_those_of_a_mesh_with_its_devices_in_another_order() -> None:
    mesh, spec = ordered_mesh(ORDERS["shuffled"], {"x": 2, "y": 4}), P("x", "y")
    g = cut(np.arange(64, dtype=np.float32).reshape(8, 8), mesh, spec)
    summed = mapped(lambda a: jax.lax.psum(a, "x"), mesh, spec, spec)
    program = jax.jit(summed).lower(g.array).compile()
    found = only(program)
    assert found.axes == ("x",)
    # The positions of the groups are those of the mesh: the computed values show it.
    shards = {each.device: np.asarray(each.data) for each in program(g.array).addressable_shards}
    own = {each.device: np.asarray(each.data) for each in g.array.addressable_shards}
    for group in found.groups:
        devices = [mesh.devices.flat[position] for position in group]
        for device in devices:
            np.testing.assert_array_equal(shards[device], sum(own[each] for each in devices))


# Loops and branches.


def test_a_branch_is_marked(mesh: Mesh) -> None:
    def maybe(a: jax.Array, flag: jax.Array) -> jax.Array:
        return jax.lax.cond(flag, lambda a: jax.lax.psum(a, "y"), lambda a: a * 2, a)

    f = mapped(maybe, mesh, (P("x", "y"), P()), P("x", "y"))
    found = gda.collectives(
        f, abstract((16, 32), mesh, "x", "y"), abstract((), mesh, dtype=np.bool_)
    )
    assert [(each.axes, each.count, each.is_conditional) for each in found] == [(("y",), 1, True)]
    assert "<=1" in str(found)


# Arguments.


def test_a_gda_jit_function_and_a_global_array(mesh: Mesh) -> None:
    f = gda.jit(lambda x: x.sum(axis=0), out_specs=P("y"))
    found = only(f, cut(np.ones((16, 32), np.float32), mesh, P("x", "y")))
    assert (found.kind, found.axes, found.nbytes) == ("all-reduce", ("x",), 16 * 4)
    assert found.source_file in (HERE, None)  # and not of a line inside gda


def test_nothing_is_run_or_donated(mesh: Mesh) -> None:
    ran = []

    def body(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: ran.append(1))
        return x - x.mean()

    g = cut(np.ones((16, 32), np.float32), mesh, P("x"))
    assert only(jax.jit(body, donate_argnums=0), g.array).axes == ("x",)
    jax.effects_barrier()
    assert not ran
    assert not g.is_deleted()


def test_the_mesh_may_come_from_a_result_from_jax_or_by_hand(auto_mesh: Mesh) -> None:
    x = jax.ShapeDtypeStruct((16, 32), np.float32)
    f = mapped(lambda a: jax.lax.psum(a, "x"), auto_mesh, P("x", "y"), P(None, "y"))
    program = jax.jit(f).lower(x).compile()
    assert only(program).axes == ("x",)
    assert only(program, mesh=mesh_of({"rows": 4, "columns": 2})).axes == ("rows",)
    other = gda.collectives(program, mesh=mesh_of({"a": 8}))
    assert (other[0].axes, len(other[0].groups)) == (None, 2)
    assert "other groups" in str(other)
    with jax.set_mesh(auto_mesh):
        total = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, P("x")).sum())
        assert only(total, x).axes == ("x",)


def test_partials_and_methods_are_the_jitted_function_inside(auto_mesh: Mesh) -> None:
    p = cut(np.ones((32, 8), np.float32), auto_mesh, P("x")).array
    x = jax.ShapeDtypeStruct((16, 32), np.float32)
    step = jax.jit(lambda p, x, *, mesh=1.0: (x @ p) * mesh)
    fun, args, kwargs = unwrapped(
        functools.partial(functools.partial(step, p, mesh=3.0), x), (), {}
    )
    assert (fun, args, kwargs) == (step, (p, x), {"mesh": 3.0})
    model = Model(p)
    for f, args in (
        (model.apply, (x,)),
        (functools.partial(model.apply, x), ()),
        (functools.partial(Model.apply, model), (x,)),
        (model.apply_partially, (x,)),
    ):
        assert unwrapped(f, args, {}) == (Model.apply, (model, x), {})
    with pytest.raises(AssertionError, match="^apply may communicate: nothing\nnot allowed"):
        gda.assert_collectives(model.apply, x, allow=[])


# Looked at.


def test_it_is_a_sequence_and_a_table(mesh: Mesh) -> None:
    def two(a: jax.Array) -> jax.Array:
        return jax.lax.all_gather(jax.lax.psum(a, "x"), "y", tiled=True)

    f = mapped(two, mesh, P("x", "y"), P("x", "y"))
    found = gda.collectives(f, abstract((16, 32), mesh, "x", "y"))
    assert isinstance(found, Collectives)
    assert len(found) == len(list(found)) == len(found[:]) == 2
    assert found[0] is found[-2]
    line = two.__code__.co_firstlineno + 1
    place = f"{HERE.removeprefix(os.getcwd() + os.sep)}:{line}"
    again = dataclasses.replace(found)
    assert (repr(found), found, hash(found)) == (str(found), again, hash(again))
    assert len({found, again, Collectives((), {})}) == 2
    assert str(found).splitlines() == [
        "2 collectives on the mesh {'x': 4, 'y': 2}; bytes are of the operands on one device",
        "  collective  over  operands       times  bytes  from",
        f"  all-reduce  x     float32[4,16]  1      256 B  {place}",
        f"  all-gather  y     float32[4,16]  1      256 B  {place}",
        "  total       x                    1      256 B",
        "  total       y                    1      256 B",
    ]


def test_files_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "a" / "b" / "c" / "d"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    for file, shown in (
        (f"{here}/steps.py", "steps.py"),
        (f"{here.parent}/steps.py", "../steps.py"),
        ("/home/me/steps.py", "/home/me/steps.py"),
        ("/tmp/ipykernel_4711/1234567890.py", "cell"),
        ("<stdin>", "<stdin>"),
    ):
        assert format_line(file, 7) == f"{shown}:7"


def test_a_line_of_the_user_rather_than_of_an_installed_library(mesh: Mesh) -> None:
    installed = str(Path(sysconfig.get_path("purelib"), "layers", "dense.py"))
    assert installed.startswith(tuple(site.getsitepackages()))
    names: dict[str, Any] = {}
    exec(compile("\n\ndef total(x):\n    return x.sum(axis=0)\n", installed, "exec"), names)

    def model(x: jax.Array) -> jax.Array:
        return names["total"](x)

    found = only(model, abstract((16, 32), mesh, "x"))
    places = [(HERE, model.__code__.co_firstlineno + 1), (installed, 4)]
    # JAX 0.8 keeps but one line.
    one_line = jax.__version_info__ < (0, 10)
    assert (found.source_file, found.source_line) == places[one_line]


# JAX's cache of programs.


@pytest.fixture
def program_cache(tmp_path: Path) -> Iterator[None]:
    options = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


def test_lines_are_those_of_today_where_jax_caches_programs(
    auto_mesh: Mesh, program_cache: None, tmp_path: Path
) -> None:
    def source(first: int) -> Callable[..., Any]:
        names: dict[str, Any] = {}
        text = "\n" * (first - 1) + "def f(x): return x.sum(axis=0)"
        exec(compile(text, "/home/me/steps.py", "exec"), names)
        return names["f"]

    key = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, key)
    x = abstract((16, 32), auto_mesh, "x")
    for line in (3, 300):
        assert only(source(line), x).source_line == line
    assert getattr(jax.config, key) == before
    assert any(tmp_path.iterdir())


# Random programs.

DTYPES = (np.float32, np.int32, np.complex64, np.uint8)


@st.composite
def _programs(draw: st.DrawFn) -> Any:
    shape = draw(mesh_shapes(max_devices=8, axis_names=("x", "y", "z")))
    mesh = mesh_of(shape, draw(st.sampled_from([AxisType.Auto, AxisType.Explicit])))
    kind = draw(st.sampled_from(["all-reduce", "all-gather", "collective-permute"]))
    names = list(shape)
    some = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    axes = tuple(some[:1] if kind == "collective-permute" else some)
    block = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    length = draw(st.integers(1, 4)) if kind != "all-gather" else 1
    return mesh, kind, axes, block, draw(st.sampled_from(DTYPES)), length


@rarely(5)
@given(_programs())
def test_random_programs_communicate_as_written(case: Any) -> None:
    mesh, kind, axes, block, dtype, length = case
    names, sizes = mesh.axis_names, dict(mesh.shape)
    size = sizes[axes[0]]
    calls = {
        "all-reduce": lambda a: jax.lax.psum(a, axes),
        "all-gather": lambda a: jax.lax.all_gather(a, axes, tiled=True),
        "collective-permute": lambda a: jax.lax.ppermute(
            a, axes[0], [(i, (i + 1) % size) for i in range(size)]
        ),
    }

    def body(a: jax.Array) -> jax.Array:
        if length == 1:
            return calls[kind](a)
        return jax.lax.scan(lambda c, _: (calls[kind](c) + 1, None), a, None, length=length)[0]

    spec = P(names)
    rows = block[0] * mesh.size
    found = gda.collectives(
        mapped(body, mesh, spec, spec), abstract((rows, block[1]), mesh, names, dtype=dtype)
    )
    expected = tuple(name for name in names if name in axes and sizes[name] > 1)
    if not expected:
        assert {each.axes for each in found} <= {()}
        return
    nbytes = block[0] * block[1] * np.dtype(dtype).itemsize
    assert {(each.kind, each.axes, each.nbytes) for each in found} == {(kind, expected, nbytes)}
    assert found.by_axis() == {expected: Traffic(length, length * nbytes)}


# assert_collectives.


@pytest.fixture(scope="module")
def step() -> tuple[Any]:
    """Return a compiled program that reduces over data and gathers over model."""
    mesh = mesh_of({"data": 4, "model": 2})

    def body(a: jax.Array) -> jax.Array:
        return jax.lax.all_gather(jax.lax.psum(a, "data"), "model", tiled=True)

    spec = P("data", "model")
    x = abstract((16, 32), mesh, "data", "model")
    return (jax.jit(mapped(body, mesh, spec, spec)).lower(x).compile(),)


GOOD: list[Any] = [
    {"all-reduce": "data", "all-gather": "model"},
    {("all-reduce", "data"): 1, ("all-gather", "model"): 1},
    {"all-reduce": ("data",), "all-gather": 1},
    ["all-reduce", ("all-gather", "data"), ("all-gather", "model"), ("all-to-all", "data")],
    {"all-reduce": "data", "all-gather": "model", ("all-to-all", "data"): 0},
]


def test_allowed_collectives_pass(step: Any) -> None:
    assert [each.kind for each in gda.collectives(*step)] == ["all-reduce", "all-gather"]
    for allow in GOOD:
        gda.assert_collectives(*step, allow=allow)


BAD: list[tuple[Any, str]] = [
    ([], "not allowed: all-reduce over data, from "),
    ({"all-reduce": "data"}, "not allowed: all-gather over model, from "),
    (
        {"all-reduce": ("data", "model"), "all-gather": "model"},
        "may communicate: all-reduce over data, model; all-gather over model; nothing else",
    ),
    (
        {("all-reduce", "data"): 2, "all-gather": "model"},
        "expected all-reduce over data, exactly 2 times; found: 1 time",
    ),
    ({"all-reduce": 1, "all-gather": 0}, "expected all-gather over any axes, exactly 0 times"),
]


def test_other_collectives_fail_with_the_table(step: Any) -> None:
    for allow, message in BAD:
        with pytest.raises(AssertionError, match=re.escape(message)) as caught:
            gda.assert_collectives(*step, allow=allow)
        text = str(caught.value)
        assert "found: 2 collectives on the mesh {'data': 4, 'model': 2}; bytes" in text
        assert "test_collectives.py:" in text


def test_a_loop_of_unknown_length_is_no_number_of_times(auto_mesh: Mesh) -> None:
    f = mapped(
        lambda a: jax.lax.while_loop(
            lambda c: jnp.sum(c) > 1.0, lambda c: jax.lax.psum(c, "x") * 0.01, a
        ),
        auto_mesh,
        P("x"),
        P("x"),
    )
    program = jax.jit(f).lower(abstract((16, 32), auto_mesh, "x")).compile()
    found = gda.collectives(program)
    assert [(each.axes, each.count, each.nbytes_total) for each in found] == [(("x",), None, None)]
    assert (found.nbytes_total, found.by_axis()) == (None, {("x",): Traffic(None, None)})
    assert re.search(r"all-reduce .* \? ", str(found))
    gda.assert_collectives(program, allow={"all-reduce": "x"})
    with pytest.raises(AssertionError, match="exactly 1 time; found: an unknown number of times"):
        gda.assert_collectives(program, allow={("all-reduce", "x"): 1})


def test_axes_of_size_one_make_no_difference() -> None:
    x = abstract((16, 32), mesh_of({"data": 8, "model": 1}), "data")
    gda.assert_collectives(lambda x: x.sum(), x, allow={("all-reduce", ("data", "model")): 1})


@pytest.mark.parametrize(
    ("allow", "error", "message"),
    [
        ("all-reduce", TypeError, "or a list of kinds such as ['all-reduce'], not 'all-reduce'"),
        (["all_reduce"], ValueError, "allow names 'all_reduce', but the kinds of collectives are"),
        (["reduce_scatter"], ValueError, "did you mean 'reduce-scatter'?"),
        ({"all-reduce": "dta"}, ValueError, "{'data': 4, 'model': 2}; did you mean 'data'?"),
        ({"all-reduce": 1.5}, TypeError, "allow has 'all-reduce': 1.5; the value must be a number"),
        ({"all-reduce": (3,)}, TypeError, "a tuple of names for several axes at once, not (3,)"),
    ],
)
def test_a_bad_allow_is_an_error_before_anything_is_compiled(
    allow: Any, error: type[Exception], message: str
) -> None:
    def never(x: jax.Array) -> jax.Array:
        raise AssertionError("traced")

    mesh = mesh_of({"data": 4, "model": 2})
    with pytest.raises(error, match=re.escape(message)):
        gda.assert_collectives(never, abstract((16, 32), mesh, "data"), allow=allow, mesh=mesh)


def test_axes_are_those_that_collectives_names_whatever_meshes_there_are(auto_mesh: Mesh) -> None:
    static = NamedSharding(mesh_of({"j": 2}), P())
    x = abstract((16, 32), auto_mesh, "x")
    total = jax.jit(lambda over, x: x.sum(axis=0), static_argnums=0)
    with pytest.raises(
        ValueError, match="allow names the axis 'j', but the mesh has the axes {'x'"
    ):
        gda.assert_collectives(total, static, x, allow={"all-reduce": "j"})


# Bad input.


def test_bad_programs_arguments_and_meshes(auto_mesh: Mesh) -> None:
    x = abstract((8,), auto_mesh, "x")
    lowered = jax.jit(lambda x: x).lower(x)
    with pytest.raises(TypeError, match=r"a jax.stages.Lowered has its arguments already; pass it"):
        gda.collectives(lowered, x)
    with pytest.raises(TypeError, match="fun must be a function, plain or jitted, not int"):
        gda.collectives(3, x)
    for options in ({}, {"allow": {"all-reduce": "x"}}):
        look = gda.assert_collectives if options else gda.collectives
        with pytest.raises(TypeError, match="mesh must be a jax.sharding.Mesh, not {'x': 8}"):
            look(lambda x: x, x, mesh={"x": 8}, **options)
    message = "the mesh {'a': 2} has 2 devices, but the program is compiled for 8"
    with pytest.raises(ValueError, match=re.escape(message)):
        gda.collectives(lambda x: x, x, mesh=mesh_of({"a": 2}))


def test_arguments_that_are_on_one_device_are_an_error() -> None:
    program = jax.jit(jnp.sin).lower(np.ones(8)).compile()
    with pytest.raises(ValueError, match="no argument is placed on a mesh, .* sharding=Named"):
        gda.collectives(program)
    with pytest.raises(ValueError, match="no argument is placed on the mesh {'x': 8}, so the"):
        gda.collectives(program, mesh=mesh_of({"x": 8}))
