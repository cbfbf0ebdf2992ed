"""Tracebacks, which end in the caller's line and one line of gda."""

from __future__ import annotations

import gc
import inspect
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

import gda
from gda.layout.boundary import public
from gda.multihost.agreement import communicates

DATA = np.arange(16, dtype=np.float32).reshape(8, 2)


@pytest.fixture
def mesh() -> Mesh:
    return mesh_of({"x": 4, "y": 2})


def names_of_frames(error: BaseException) -> list[str]:
    """Return the functions of a traceback after the test's own, such as ``gda:load_tree``."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][1:]
    packages = [frame.f_globals["__name__"].partition(".")[0] for frame in frames]
    packages = ["gda" if package == "gda" else "user" for package in packages]
    return [f"{p}:{frame.f_code.co_name}" for p, frame in zip(packages, frames, strict=True)]


@contextmanager
def filtering(mode: str) -> Iterator[None]:
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", mode)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


def mistakes(mesh: Mesh, path: Path) -> dict[str, Callable[[], object]]:
    """Return a wrong call by the name of the frame that it leaves."""
    bad = P("nope")
    return {
        "__init__": lambda: gda.GlobalArray((8, 2), mesh, P("x"), [1]),  # pyright: ignore
        "from_array": lambda: gda.GlobalArray.from_array(DATA),  # pyright: ignore
        "from_callback": lambda: gda.GlobalArray.from_callback((8, 2), mesh, bad, DATA.__getitem__),
        "load_tree": lambda: gda.load_tree({"w": DATA}, mesh, bad),
        "jit": lambda: gda.jit(lambda x: x, in_specs=["x"]),
        "open_safetensors": lambda: gda.storage.open_safetensors(path / "none"),
    }


def test_the_last_line_but_one_is_the_callers(mesh: Mesh, tmp_path: Path) -> None:
    for name, call in mistakes(mesh, tmp_path).items():
        with pytest.raises(Exception) as caught:  # noqa: PT011
            call()
        assert names_of_frames(caught.value) == ["user:<lambda>", f"gda:{name}"]


def test_a_mistaken_keyword_gets_the_name_that_it_is_nearest_to(mesh: Mesh) -> None:
    for name, near in [("dtpye", "dtype"), ("max_byts", "max_bytes"), ("dtype_of_it_all", None)]:
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'") as caught:
            gda.load_tree({"w": DATA}, mesh, P("x"), **{name: None})
        assert (f"Did you mean '{near}'?" in str(caught.value)) == (near is not None)

    def wrong(index: gda.Index) -> object:
        return DATA.astype(np.int32, dtpye=1)  # pyright: ignore

    with pytest.raises(TypeError) as caught:  # of other code
        gda.GlobalArray.from_callback((8, 2), mesh, P("x"), wrong)
    assert "Did you mean" not in str(caught.value)


def test_the_switch_of_jax_shows_every_frame(mesh: Mesh) -> None:
    def call() -> None:
        gda.GlobalArray.from_source(DATA, mesh, P("nope"))

    shown = {}
    for mode in ("off", "remove_frames", "quiet_remove_frames", "tracebackhide", "auto"):
        with filtering(mode), pytest.raises(ValueError, match="nope") as caught:
            call()
        shown[mode] = names_of_frames(caught.value)
    assert len(shown.pop("off")) > 5
    assert set(map(tuple, shown.values())) == {("user:call", "gda:from_source")}


def test_frames_of_a_callback_are_shown(mesh: Mesh) -> None:
    def read(index: gda.Index) -> np.ndarray:
        return helper(index)

    def helper(index: gda.Index) -> np.ndarray:
        raise KeyError("w")

    own = ["user:read", "user:helper"]
    for options in ({}, {"max_workers": 2}):
        with pytest.raises(KeyError) as caught:
            gda.GlobalArray.from_callback((8, 2), mesh, P("x"), read, **options)
        assert names_of_frames(caught.value) == ["gda:from_callback", *own]
        assert caught.value.__notes__[0].startswith("gda: while reading index")


def test_an_exception_that_is_over_keeps_nothing_alive(mesh: Mesh) -> None:
    class Block(np.ndarray):
        pass

    def call() -> weakref.ref[np.ndarray]:
        block = np.zeros((3, 3)).view(Block)
        with suppress(ValueError):
            gda.GlobalArray.from_callback((8, 2), mesh, P("x"), lambda _: block)
        return weakref.ref(block)

    gc.collect()
    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("module", [gda, gda.checkpoint])
def test_every_public_function_hides_its_own_frames(module: Any) -> None:
    functions = {name: getattr(module, name) for name in module.__all__}
    functions = {name: value for name, value in functions.items() if inspect.isfunction(value)}
    assert len(functions) > 5
    wrappers: list[Any] = [public(len), communicates("")(len)]
    codes = [wrapper.__code__ for wrapper in wrappers]
    lacking = [name for name, function in functions.items() if function.__code__ not in codes]
    assert not lacking, f"these lack @public or @communicates: {', '.join(lacking)}"


def test_a_mistaken_name_gets_the_one_that_it_is_nearest_to(mesh: Mesh, tmp_path: Path) -> None:
    file = str(tmp_path / "m.safetensors")
    gda.storage.save_safetensors(file, {"weights": DATA})
    gda.checkpoint.save(tmp_path / "c", {"layers": [{"weights": DATA}]})
    shape: Any = jax.ShapeDtypeStruct(DATA.shape, DATA.dtype)
    restore = gda.checkpoint.restore
    mistaken: dict[str, Callable[[], object]] = {
        "'max_workers'": lambda: gda.load_tree({"w": DATA}, mesh, P(), max_worker=1),  # pyright: ignore
        "'overwrite'": lambda: gda.checkpoint.save(tmp_path, {}, overwrit=True),  # pyright: ignore
        "'x2'": lambda: gda.ShardGrid((8,), {"x1": 2, "x2": 4}, ["x_2"]),
        "'bfloat16'": lambda: gda.load_tree({"w": DATA}, mesh, P(), dtype="bfloa16"),
        "'weights'": lambda: gda.storage.open_safetensors(file)["wieghts"],
        "'layers'": lambda: restore(tmp_path / "c", at=["layer"]),
        "'layers/0/weights'": lambda: restore(
            tmp_path / "c", {"layers": [{"weight": shape}]}, partial=True
        ),
        "'load_tree'": lambda: gda.load_tre,
        "'open_orbax'": lambda: gda.storage.open_orbx,
        "'all-gather'": lambda: gda.assert_collectives(len, allow={"all_gather"}),
    }
    for name, call in mistaken.items():
        with pytest.raises((TypeError, ValueError, KeyError, AttributeError)) as raised:
            call()
        assert f"id you mean {name}?" in str(raised.value), name
