import contextlib
import io
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from meshes import ORDERS, cut, ordered_mesh

import gda

P = PartitionSpec
DATA = np.arange(64, dtype=np.float32).reshape(8, 8)


def printed(x: Any, *arguments: Any, **options: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        gda.show(x, *arguments, **options)
    return out.getvalue()


def on(mesh: Mesh, spec: P) -> jax.Array:
    return jax.device_put(DATA, NamedSharding(mesh, spec))


# Outside of jit.


def test_an_array_is_printed_as_wide_as_the_terminal(
    mesh: Mesh, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = on(mesh, P("x", "y"))
    gda.show(x)
    assert capsys.readouterr().out == gda.show.text(x) + "\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "22")
    gda.show(x)
    assert capsys.readouterr().out == gda.show.text(x, width=22) + "\n"


def test_no_data_is_read(auto_mesh: Mesh) -> None:
    g = cut(DATA, auto_mesh, P("x", "y"))
    with jax.transfer_guard("disallow"):
        before = printed(g)
    g.delete()
    assert before.startswith("GlobalArray (8, 8) float32\n")
    assert printed(g) == before


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


def test_the_layout_that_jax_chooses_when_it_compiles(mesh: Mesh) -> None:
    looked: list[str] = []

    @jax.jit
    def look(x: jax.Array) -> jax.Array:
        y = x + 1
        jax.debug.inspect_array_sharding(
            y, callback=lambda s: looked.append(gda.show.text(y.shape, s, dtype=y.dtype) + "\n")
        )
        return y

    x = on(mesh, P("x", "y"))
    look(x)
    assert looked[0].partition("\n")[2] == printed(x).partition("\n")[2]


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
    # It is text where a width is given, and in the terminal of IPython.
    gda.show(grid, width=60)
    sys.modules["IPython"].get_ipython = lambda: SimpleNamespace(kernel=None)
    gda.show(grid)
    assert re.findall("^ShardGrid", capsys.readouterr().out, re.M) == ["ShardGrid"] * 2
    assert len(notebook) == 1


# Errors.


def test_a_traced_array_has_no_layout_yet(mesh: Mesh) -> None:
    for show in (gda.show, gda.show.text):
        with pytest.raises(
            TypeError, match=r"is being traced, .*jax\.debug\.inspect_array_sharding"
        ):
            jax.jit(lambda x, show=show: show(x) and x)(on(mesh, P("x")))
