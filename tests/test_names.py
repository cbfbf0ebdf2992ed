"""The public names."""

import ast
import importlib
import inspect
import sys
import typing
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from public_api import STABLE, is_stable, public_api, public_names
from running import python

import gda
import gda.checkpoint
import gda.launch
import gda.show
import gda.storage
import gda.testing

RECORDED = Path(__file__).with_name("public_api.txt")
PUBLIC = [
    (module.__name__, name)
    for module in (gda, gda.checkpoint, gda.launch, gda.show, gda.storage, gda.testing)
    for name in public_names(module)
    if not isinstance(getattr(module, name), ModuleType) and name != "Index"  # an alias of tuple
]


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_public_names_belong_to_public_modules(module: str, name: str) -> None:
    public: Any = getattr(sys.modules[module], name)
    assert public.__module__ == module
    assert attrgetter(public.__qualname__)(sys.modules[module]) is public
    assert typing.get_type_hints(public) is not None
    if inspect.isfunction(public):
        assert f"def {public.__name__}(" in inspect.getsource(public)


def test_types_in_public_signatures_are_public() -> None:
    public = {getattr(sys.modules[module], name) for module, name in PUBLIC}
    hidden = {
        kind
        for value in public
        for function in _functions_of(value)
        for name, hint in typing.get_type_hints(function).items()
        if not name.startswith("_")
        for kind in _classes_in(hint)
        if kind.__module__.startswith("gda") and kind not in public
    }
    # `Answer` is for the plugin, `Overlap` for the checkpoints; `Device` stands for jax.Device, and
    # `Jitted` and `_At` for JAX's own.
    known = {"Answer", "Device", "Jitted", "Overlap", "_At"}
    assert {kind.__name__ for kind in hidden} == known


def _functions_of(value: Any) -> Iterator[Any]:
    yield value
    for kind in value.__mro__ if isinstance(value, type) else ():
        if kind.__module__.startswith("gda"):
            members = [each for name, each in vars(kind).items() if not name.startswith("_")]
            for each in members:
                inner = [getattr(each, name, None) for name in ("fget", "func", "__func__")]
                yield from (f for f in (each, *inner) if inspect.isfunction(f))


def _classes_in(hint: Any) -> Iterator[type]:
    if inspect.isclass(hint):
        yield hint
    for argument in typing.get_args(hint):
        yield from _classes_in(argument)


def test_the_public_api_is_the_one_recorded() -> None:
    recorded = RECORDED.read_text().splitlines()
    assert list(public_api()) == recorded, f"python tests/public_api.py > tests/{RECORDED.name}"


def test_the_stub_has_the_same_names_in_the_same_order() -> None:
    stub = ast.parse(Path(gda.__file__).with_suffix(".pyi").read_text())
    imported = [node.names[0].asname for node in stub.body if isinstance(node, ast.ImportFrom)]
    assert imported == [*gda._MODULE_OF]


def test_the_list_of_names_is_short() -> None:
    assert len(gda.__all__) <= 48
    assert set(gda._MODULE_OF) - set(gda.__all__) == gda._UNLISTED


def test_the_page_of_stable_names_has_public_names_only() -> None:
    public = {f"{module}.{name}" for module, name in PUBLIC}
    modules = {"gda.Index", "gda.launch"}
    assert public | modules >= STABLE


@pytest.mark.parametrize("name", gda.checkpoint.__all__)
def test_results_of_checkpoints_are_provisional(name: str) -> None:
    value = getattr(gda.checkpoint, name)
    is_error = isinstance(value, type) and issubclass(value, Exception)
    is_function = not isinstance(value, type)
    is_made_by_users = name in ("Run", "PerProcess", "Pending")
    assert is_stable("gda.checkpoint", name) == (is_error or is_function or is_made_by_users)


@pytest.mark.parametrize("module", ["cli", "show", "testing"])
def test_a_module_of_provisional_names_says_so(module: str) -> None:
    doc = importlib.import_module(f"gda.{module}").__doc__
    assert doc is not None
    assert "Provisional: see ``docs/stable.md``" in doc


@pytest.mark.parametrize("name", [each for each in gda._MODULE_OF if each not in gda._MODULES])
def test_a_module_says_that_its_names_are_provisional(name: str) -> None:
    parts = gda._MODULE_OF[name].split(".")
    own_and_above = [".".join(parts[:length]) for length in range(2, len(parts) + 1)]
    docs = [importlib.import_module(module).__doc__ or "" for module in own_and_above]
    is_marked = any("Provisional: see ``docs/stable.md``" in doc for doc in docs)
    assert is_marked != is_stable("gda", name)


MODULES_OF_GDA = ["checkpoint", "compat", "launch", "show", "storage", "testing"]


@pytest.mark.parametrize("name", [*MODULES_OF_GDA, "testing.strategies"])
def test_a_public_module_lists_its_public_names_only(name: str) -> None:
    module = attrgetter(name)(gda)
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_public_modules_are_there_without_an_import_of_their_own() -> None:
    program = f"""
import gda
before = dir(gda)
for name in {MODULES_OF_GDA}:
    getattr(gda, name)
gda.launch.initialize, gda.testing.Pool, gda.testing.strategies.meshes
assert dir(gda) == before
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "successor"), [("GlobalDeviceArray", "GlobalArray"), ("pjit", "jit")]
)
def test_names_of_2022_lead_to_their_successors(name: str, successor: str) -> None:
    message = f"module 'gda' has no attribute '{name}'; its successor is gda.{successor}$"
    with pytest.raises(AttributeError, match=message):
        getattr(gda, name)
    assert not hasattr(gda, name)
