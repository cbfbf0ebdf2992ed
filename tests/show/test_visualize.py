import io
import re
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from meshes import ORDERS, cut, mesh_of, ordered_mesh

import gda

P = PartitionSpec
DATA = np.arange(64, dtype=np.float32).reshape(8, 8)


def printed(x: Any, *arguments: Any, **options: Any) -> str:
    file = io.StringIO()
    gda.show(x, *arguments, file=file, **options)
    return file.getvalue()


def on(mesh: Mesh, spec: P) -> jax.Array:
    return jax.device_put(DATA, NamedSharding(mesh, spec))


def while_tracing(
    x: Any,
    transform: Callable[[Callable[[Any], Any]], Callable[[Any], Any]] = jax.jit,
    then: Callable[[Any], Any] = jnp.sin,
) -> str:
    """Return what is printed by a function that looks at its argument under a transformation."""
    file = io.StringIO()

    def look(x: Any) -> Any:
        gda.show(x, file=file)
        return then(x)

    transform(look)(x)
    return file.getvalue()


# Outside of jit.


def test_an_array_is_printed_as_text_shows_it(
    mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    x = on(mesh, P("x", "y"))
    gda.show(x)
    assert capsys.readouterr().out == gda.show.text(x) + "\n"


def test_grids_plans_and_arrays_can_be_shown() -> None:
    grid = gda.ShardGrid((8, 2), {"x": 4}, ("x",))
    assert printed(grid) == gda.show.text(grid) + "\n"
    assert printed((8, 2), {"x": 4}, P("x"), dtype="int8").startswith("plan (8, 2) int8\n")
    sharding = NamedSharding(mesh_of({"x": 8}), P("x"))
    abstract = jax.ShapeDtypeStruct((8,), "int32", sharding=sharding)
    assert printed(abstract).startswith("ShapeDtypeStruct (8,) int32\nmesh    x=8: 8 devices")
    assert "CPU 7" in printed(abstract)
    assert "│ :   CPU 0 │" in printed(jnp.zeros(3))
    assert while_tracing(jnp.zeros(3)).startswith("traced jax.Array (3,) float32")


def test_no_data_is_read(auto_mesh: Mesh) -> None:
    g = cut(DATA, auto_mesh, P("x", "y"))
    with jax.transfer_guard("disallow"):
        before = printed(g)
    g.delete()
    assert before.startswith("GlobalArray (8, 8) float32\n")
    assert printed(g) == before.replace("GlobalArray", "GlobalArray (deleted)", 1)


@pytest.mark.processes(2, devices=4)
def test_any_process_alone_shows_the_blocks_of_all() -> None:
    mesh = ordered_mesh(ORDERS["interleaved"], {"x": 4, "y": 2})
    g = cut(DATA, mesh, P("x"))
    if jax.process_index() == 1:  # would hang if it waited for the other
        picture = printed(g)
        assert "8 devices, 2 processes" in picture
        assert picture.count("processes 0, 1 │") == 4
        lines = [line for line in picture.splitlines() if "CPU" in line]
        devices = [f"CPU {a.id}, {b.id}" for a, b in mesh.devices]
        assert [d in line for d, line in zip(devices, lines, strict=True)] == [True] * 4


# While it is traced.


def test_over_explicit_axes_a_layout_is_known_while_tracing(explicit_mesh: Mesh) -> None:
    x = on(explicit_mesh, P("x", "y"))
    assert while_tracing(x).startswith("traced jax.Array (8, 8) float32\nmesh    x=4,y=2: 8 dev")
    # Nothing is compiled here.
    assert while_tracing(x, lambda f: lambda x: jax.eval_shape(f, x)) == while_tracing(x)
    assert "2:4, 4:8" in while_tracing(x)
    # There are no devices yet, so a number is not an id of one.
    assert "position 3" in while_tracing(x)
    assert "device 3" not in while_tracing(x)


def test_over_auto_axes_it_is_known_when_jax_compiles(auto_mesh: Mesh) -> None:
    x = on(auto_mesh, P("x", "y"))
    assert while_tracing(x, lambda f: lambda x: jax.eval_shape(f, x)) == ""
    picture = while_tracing(x)
    assert picture == "traced " + gda.show.text(x) + "\n"
    mapped = while_tracing(x, lambda f: jax.vmap(jax.jit(f)))
    assert mapped.startswith("traced jax.Array with 1 mapped dimension (8, 8) float32\n")


def test_once_for_each_compilation(auto_mesh: Mesh) -> None:
    file = io.StringIO()

    @jax.jit
    def look(x: jax.Array) -> jax.Array:
        gda.show(x, file=file)
        return x

    for spec, times in ((P("x"), 1), (P("x"), 1), (P("y"), 2)):
        look(on(auto_mesh, spec))
        assert file.getvalue().count("traced jax.Array") == times


def test_a_global_array_inside_jit(mesh: Mesh) -> None:
    picture = while_tracing(cut(DATA, mesh, P("y")))
    assert picture.startswith("traced GlobalArray (8, 8) float32\n")
    assert "P('y')" in picture
    assert "0:4, :" in picture

    class Mine(gda.GlobalArray): ...

    file = io.StringIO()
    look = jax.jit(lambda x: gda.show(Mine.from_array(x), file=file))
    look(on(mesh, P("y")))
    assert file.getvalue().startswith("traced Mine (8, 8) float32\n")


@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(lambda f: jax.jit(jax.grad(lambda x: f(x).sum())), id="grad"),
        pytest.param(
            lambda f: jax.jit(jax.grad(jax.checkpoint(lambda x: f(x).sum()))), id="checkpoint"
        ),
        pytest.param(
            lambda f: jax.jit(
                lambda x: jax.lax.scan(lambda x, _: (f(x), None), x, None, length=2)[0]
            ),
            id="scan",
        ),
    ],
)
def test_under_other_transformations(
    mesh: Mesh, transform: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]
) -> None:
    picture = while_tracing(on(mesh, P("x", "y")), transform)
    assert picture.startswith("traced jax.Array (8, 8) float32\n")
    assert "P('x', 'y')" in picture


@pytest.mark.parametrize("in_jit", [False, True])
def test_inside_vmap_the_whole_array_is_shown(mesh: Mesh, in_jit: bool) -> None:
    x = on(mesh, P("x", "y"))
    jit = jax.jit if in_jit else lambda f: f
    picture = while_tracing(x, lambda f: jit(jax.vmap(f)))
    assert picture.count("traced") == 1
    assert picture.startswith("traced jax.Array with 1 mapped dimension (8, 8) float32\n")
    assert "P('x', 'y')" in picture
    # The mapped dimension is the first.
    assert "P('y', 'x')" in while_tracing(x, lambda f: jit(jax.vmap(f, in_axes=1)))
    twice = while_tracing(x, lambda f: jit(jax.vmap(jax.vmap(f))))
    assert twice.startswith("traced jax.Array with 2 mapped dimensions (8, 8) float32\n")


def test_inside_shard_map_an_array_is_a_block(mesh: Mesh) -> None:
    def both(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y")))

    def one(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return jax.jit(
            jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
        )

    x = on(mesh, P("x", "y"))
    assert while_tracing(x, both) == (
        "block (2, 4) float32 inside jax.shard_map: each place along the mesh axes 'x', 'y' has "
        "its own; to see the layout of the array, call this outside\n"
    )
    assert while_tracing(x, one).startswith(
        "block (2, 8) float32 inside jax.shard_map: each place along the mesh axis 'x' has its own"
    )


def test_keys_of_random_numbers(mesh: Mesh) -> None:
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, P("x")))
    assert printed(keys).startswith("jax.Array (8,) key<fry>\n")
    traced = while_tracing(keys, then=lambda keys: keys)
    assert traced.startswith("traced jax.Array (8,) key<fry>\nmesh    x=4,y=2: 8 dev")


# A picture stops no program.


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sizes_that_are_not_known(kind: AxisType) -> None:
    sharding = NamedSharding(mesh_of({"x": 4}, kind), P(None, "x"))
    shape = jax.export.symbolic_shape("n, 8")
    file = io.StringIO()

    @jax.jit
    def look(x: jax.Array) -> jax.Array:
        gda.show(x, file=file)
        return x * 2

    exported = jax.export.export(look)(jax.ShapeDtypeStruct(shape, "float32", sharding=sharding))
    assert str(exported.out_avals[0].shape) == "(n, 8)"
    assert file.getvalue() == (
        "traced jax.Array (n, 8) float32: no picture, as its sizes are unknown\n"
    )


def test_error_while_drawing_is_printed(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*arguments: Any) -> None:
        raise RuntimeError("lost")

    monkeypatch.setattr("gda.show.visualize.subject_on", lost)
    assert while_tracing(on(mesh, P("x"))) == (
        "traced jax.Array (8, 8) float32: no picture, because of RuntimeError: lost\n"
    )


@pytest.mark.parametrize("is_closed", [False, True])
def test_program_computes_the_same_with_a_picture(mesh: Mesh, is_closed: bool) -> None:
    file = io.StringIO()
    if is_closed:
        file.close()

    def look(x: jax.Array) -> jax.Array:
        gda.show(x, file=file)
        return jnp.sin(x)

    x = on(mesh, P("x", "y"))
    np.testing.assert_array_equal(jax.jit(look)(x), jax.jit(jnp.sin)(x))
    gradient = jax.jit(jax.grad(lambda x: look(x).sum()))(x)
    np.testing.assert_allclose(gradient, np.cos(DATA), rtol=1e-5)
    if is_closed:
        with pytest.raises(ValueError, match="closed file"):
            gda.show(x, file=file)


def test_sharding_without_a_spec_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(
        jax.debug, "inspect_array_sharding", lambda x, callback: [callback(s) for s in found]
    )
    x = on(mesh_of({"x": 4}), P("x"))[:6]
    two = SimpleNamespace(device_set=set(jax.devices()[:2]))
    found[:] = [two]
    assert while_tracing(x) == (
        f"traced jax.Array (6, 8) float32: laid out as {two}, which names no mesh and spec\n"
    )
    uneven = NamedSharding(mesh_of({"x": 4}), P("x"))
    found[:] = [uneven]
    assert while_tracing(x) == f"traced jax.Array (6, 8) float32: sharded unevenly, by {uneven}\n"


# The file to which it is printed.


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def in_terminal(monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TERM", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    file = Terminal()
    grid = gda.ShardGrid((64,), {"x": 8}, ("x",), process_of=[0, 0, 0, 0, 1, 1, 1, 1])
    gda.show(grid, file=file)
    return file.getvalue()


def test_colours_are_for_terminals_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[38;5;32m" in in_terminal(monkeypatch, TERM="xterm-256color", COLUMNS="80")
    assert "\x1b" not in in_terminal(monkeypatch, TERM="dumb")
    assert "\x1b" not in in_terminal(monkeypatch, TERM="xterm-256color", NO_COLOR="1")
    grid = gda.ShardGrid((8,), {"x": 4}, ("x",), process_of=[0, 0, 1, 1])
    monkeypatch.setenv("FORCE_COLOR", "1")  # set by notebooks, where a file is still a file
    assert "\x1b" not in printed(grid)
    assert "\x1b[38;5;32m" in printed(grid, color=True)


def test_the_picture_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    strips = {
        columns: in_terminal(monkeypatch, TERM="dumb", COLUMNS=columns).count("├") + 1
        for columns in ("40", "200")
    }
    assert strips == {"40": 4, "200": 1}


def test_a_file_without_line_drawing_characters_or_those_of_names() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="latin-1", errors="strict")
    gda.show((4096, 4096), {"数": 64, "y": 64}, P("数", "y"), file=file)
    file.flush()
    text = raw.getvalue().decode("latin-1")
    assert "mesh    \\u6570=64,y=64: 4,096 devices\n" in text
    assert ". 53 more" in text
    box = [line for line in text.splitlines() if line.rstrip().endswith(("|", "+"))]
    assert len({len(line) for line in box}) == 1


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A notebook's IPython in place of the real one; the HTML that it displays."""
    shown: list[str] = []
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setattr(ipython, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setattr(display, "HTML", lambda html: html, raising=False)
    monkeypatch.setattr(display, "display", shown.append, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(gda.show, "html", lambda subject: f"<b>{subject.spec}</b>")
    return shown


def test_a_notebook_shows_the_drawing_unless_text_is_asked_for(
    notebook: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    grid = gda.ShardGrid((8,), {"x": 4}, ("x",))
    gda.show(grid)
    assert (notebook, capsys.readouterr().out) == (["<b>P('x')</b>"], "")
    # Text goes to a file, where a width is given, and to the terminal of IPython.
    assert printed(grid).startswith("ShardGrid")
    gda.show(grid, width=60)
    sys.modules["IPython"].get_ipython = lambda: SimpleNamespace(kernel=None)
    gda.show(grid)
    assert re.findall("^ShardGrid", capsys.readouterr().out, re.M) == ["ShardGrid"] * 2
    assert len(notebook) == 1


# Errors.


def test_a_traced_array_has_its_own_mesh(explicit_mesh: Mesh) -> None:
    look = jax.jit(lambda x: printed(x, mesh={"x": 4}) and x)
    with pytest.raises(TypeError, match="mesh= goes with a shape; this traced array has its own"):
        look(on(explicit_mesh, P("x")))


def test_text_of_a_traced_array_names_gda_show(explicit_mesh: Mesh) -> None:
    look = jax.jit(lambda x: gda.show.text(x) and x)
    with pytest.raises(TypeError, match="is being traced, .*; gda.show shows it"):
        look(on(explicit_mesh, P("x")))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_with_one_kind_of_axis_more(kind: AxisType) -> None:
    kinds = (kind, AxisType.Auto if kind == AxisType.Explicit else AxisType.Explicit)
    devices = np.array(jax.devices()).reshape(4, 2)
    mesh = Mesh(devices, ("x", "y"), axis_types=kinds)
    assert "P('x', 'y')" in while_tracing(on(mesh, P("x", "y")))
