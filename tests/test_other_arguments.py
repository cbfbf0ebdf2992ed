"""Functions that communicate, called with another argument in one process: all name it."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, is_right, mesh_of, one_folder, ordered_mesh

import gda
from gda import checkpoint

ME = 1  # the process with the other argument
NUMBERS = np.arange(3, dtype=np.int32)


class World:
    """Arrays, files and folders, the same in all processes."""

    def __init__(self) -> None:
        self.mesh = mesh_of({"x": 8})
        self.reverse = ordered_mesh(range(7, -1, -1), {"x": 8})
        self.half = mesh_of({"x": 4})  # of processes 0 and 1
        self.sources = {"a": batch(16, 8), "b": batch(16, 8) + 1}
        self.tree = {name: cut(data, self.mesh, P("x")) for name, data in self.sources.items()}
        self.columns = {n: cut(data, self.mesh, P(None, "x")) for n, data in self.sources.items()}
        self.g = self.tree["a"]
        self.booleans = cut(self.sources["a"] > 0, self.mesh, P("x"))

    @cached_property
    def folder(self) -> str:
        return one_folder()

    @cached_property
    def path(self) -> str:
        """A checkpoint, and another one beside it."""
        checkpoint.save(f"{self.folder}/d", self.tree)
        checkpoint.save(f"{self.folder}/c", {**self.tree, "deep": {"a": self.g}, "n": NUMBERS})
        return f"{self.folder}/c"

    @cached_property
    def model(self) -> str:
        gda.storage.save_safetensors(f"{self.folder}/model", self.tree)
        return f"{self.folder}/model"

    def check_nothing_is_lost(self) -> None:
        if "path" in self.__dict__:
            checkpoint.verify(self.path)
            saved = checkpoint.restore(self.path, mesh=self.mesh, specs=P())
            assert is_right(saved["deep"]["a"], self.sources["a"])
        if "model" in self.__dict__:
            model = gda.storage.open_safetensors(self.model)
            np.testing.assert_array_equal(model["b"][:], self.sources["b"])
        assert not self.g.is_deleted()
        assert is_right(self.g, self.sources["a"])


@pytest.fixture(scope="module")
def world() -> World:
    return World()


# The calls, each with the usual arguments and some others.


def save(w: World, **others: Any) -> None:
    checkpoint.save(**{"path": w.path, "tree": w.tree, "overwrite": True, **others})


def save_async(w: World, **others: Any) -> None:
    given = {"path": w.path, "tree": w.tree, "overwrite": True, **others}
    checkpoint.save_async(**given).result()


def restore_together(w: World, **others: Any) -> None:
    given = {"path": w.path, "mesh": w.mesh, "specs": P(), "at": ["deep"], "read_once": True}
    checkpoint.restore(**given | others)


def diff(w: World, **others: Any) -> None:
    checkpoint.diff(**{"a": w.path, "b": w.tree, **others})


def save_safetensors(w: World, **others: Any) -> None:
    gda.storage.save_safetensors(**{"path": w.model, "tree": w.tree, **others})


def load_tree(w: World, **others: Any) -> None:
    given = {"sources": w.sources, "mesh": w.mesh, "specs": P(), "read_once": True}
    gda.load_tree(**given | others)


def from_source(w: World, **others: Any) -> None:
    given = {"source": batch(13, 2), "mesh": w.mesh, "spec": P("x"), "read_once": True}
    gda.PaddedArray.from_source(**given | others)


def gather(w: World, g: Any = None, call: str = "gather", **others: Any) -> None:
    getattr(w.g if g is None else g, call)(**others)


def fingerprint(w: World, g: Any = None) -> None:
    (w.g if g is None else g).fingerprint()


def reshard(w: World, mesh: Any = None, spec: Any = P(None, "x"), **others: Any) -> None:
    w.g.reshard(w.mesh if mesh is None else mesh, spec, **others)


def reshard_tree(w: World, **others: Any) -> None:
    gda.reshard_tree(**{"tree": w.tree, "mesh": w.reverse, "specs": P("x"), **others})


def check_replicas_agree(w: World, **others: Any) -> None:
    gda.check_replicas_agree(**{"tree": w.tree, **others})


def chunked(data: np.ndarray, *chunks: int) -> Any:
    """Return a source with chunks."""
    source = np.array(data).view(type("Chunked", (np.ndarray,), {}))
    source.chunks = chunks
    return source


class Case(NamedTuple):
    """An argument that differs in one process.

    Attributes:
      argument: its name.
      others: the arguments of that process, in place of the usual ones.
      said: the answer, a part of the message in the other processes.
      own: the class of the error in that process, where it is alone with it.
    """

    argument: str
    others: Callable[[World], dict[str, Any]]
    said: str
    own: type[Exception] = gda.DisagreementError


ANOTHER_MESH = "the processes are at different places"
CASES: dict[Callable[..., None], list[Case]] = {
    save: [
        Case("path", lambda w: {"path": w.path + "x"}, "process 1: path"),
        Case("tree: keys", lambda w: {"tree": w.tree | {"c": w.g}}, "only in process 1: c"),
        Case("tree: layout", lambda w: {"tree": w.columns}, "process 1: spec P(None, 'x')"),
        Case("tree: a value", lambda w: {"tree": w.tree | {"s": 2}}, "only in process 1: s"),
        Case("overwrite", lambda w: {"overwrite": False}, "process 1: overwrite False"),
    ],
    save_async: [
        Case("tree: layout", lambda w: {"tree": w.columns}, "process 1: spec P(None, 'x')"),
        Case("overwrite", lambda w: {"overwrite": False}, "process 1: overwrite False"),
    ],
    restore_together: [
        Case("path", lambda w: {"path": f"{w.folder}/d", "at": ()}, "process 1: checkpoint 'data-"),
        Case("at", lambda w: {"at": ()}, "only in process 1: a"),
        Case("mesh: order", lambda w: {"mesh": w.reverse}, "process 1: device order"),
        Case("mesh: processes", lambda w: {"mesh": w.half}, ANOTHER_MESH),
        Case("specs", lambda w: {"specs": P("x")}, "process 1: spec P('x')"),
        Case("max_bytes", lambda w: {"max_bytes": 64}, "process 1: max_bytes 64"),
    ],
    diff: [
        Case("a: path", lambda w: {"a": f"{w.folder}/d"}, "process 1: checkpoint 'data-"),
        Case("b: keys", lambda w: {"b": w.tree | {"c": w.g}}, "only in process 1: c"),
        Case("b: layout", lambda w: {"b": w.columns}, "process 1: spec P(None, 'x')"),
    ],
    save_safetensors: [
        Case("path", lambda w: {"path": w.model + "x"}, "process 1: path"),
        Case("tree: keys", lambda w: {"tree": {"c": w.g}}, "only in process 1: c"),
        Case("tree: layout", lambda w: {"tree": w.columns}, "process 1: spec P(None, 'x')"),
        Case("max_file_bytes", lambda w: {"max_file_bytes": 600}, "process 1: files of at most"),
        Case("metadata", lambda w: {"metadata": {"a": "b"}}, "process 1: metadata {'a': 'b'}"),
    ],
    load_tree: [
        Case(
            "sources: keys",
            lambda w: {"sources": {"A": w.sources["a"], "a": w.sources["b"]}},
            "only in process 1: A; only in processes 0, 2, 3: b",
        ),
        Case(
            "sources: shape",
            lambda w: {"sources": w.sources | {"b": batch(8, 8)}},
            "at b, process 1: shape (8, 8)",
        ),
        Case(
            "sources: chunks",
            lambda w: {"sources": w.sources | {"b": chunked(w.sources["b"], 4, 8)}},
            "process 1: source 1",
        ),
        Case("mesh: order", lambda w: {"mesh": w.reverse}, "process 1: device order"),
        Case("mesh: processes", lambda w: {"mesh": w.half}, ANOTHER_MESH),
        Case("specs", lambda w: {"specs": P("x")}, "process 1: spec P('x')"),
        Case("specs", lambda w: {"specs": P("y")}, "process 1 failed: ValueError", ValueError),
        Case("dtype", lambda w: {"dtype": "bfloat16"}, "process 1: dtype bfloat16"),
        Case("max_bytes", lambda w: {"max_bytes": 64}, "process 1: max_bytes 64"),
    ],
    from_source: [
        Case("fill", lambda w: {"fill": 1}, "process 1: shape (13, 2), padded with 1"),
        Case("spec", lambda w: {"spec": P(None, "x")}, "process 1: spec P(None, 'x')"),
        Case("dtype", lambda w: {"dtype": "float16"}, "process 1: dtype float16"),
    ],
    gather: [
        Case("g: layout", lambda w: {"g": w.columns["a"]}, "process 1: spec P(None, 'x')"),
        Case("g: dtype", lambda w: {"g": w.booleans}, "process 1: dtype bool"),
        Case("process", lambda w: {"process": 0}, "process 1: process 0"),
        Case(
            "max_device_bytes", lambda w: {"max_device_bytes": 64}, "process 1: max_device_bytes 64"
        ),
        Case(
            "max_device_bytes",
            lambda w: {"max_device_bytes": 0},
            "process 1 failed: ValueError",
            ValueError,
        ),
        Case("the function", lambda w: {"call": "fingerprint"}, "process 1: call Global"),
    ],
    fingerprint: [
        Case("g: layout", lambda w: {"g": w.columns["a"]}, "process 1: spec P(None, 'x')"),
    ],
    reshard: [
        Case("mesh: order", lambda w: {"mesh": w.reverse}, "process 1: device order"),
        Case("mesh: processes", lambda w: {"mesh": w.half}, "process 1: mesh {'x': 4}"),
        Case("spec", lambda w: {"spec": P()}, "process 1: spec P()"),
        Case("spec", lambda w: {"spec": P("y")}, "process 1 failed: ValueError", ValueError),
        Case(
            "max_device_bytes", lambda w: {"max_device_bytes": 64}, "process 1: max_device_bytes 64"
        ),
        Case("donate", lambda w: {"donate": True}, "process 1: donate True"),
    ],
    reshard_tree: [
        Case("tree: keys", lambda w: {"tree": {"a": w.g}}, "only in processes 0, 2, 3: b"),
        Case("tree: layout", lambda w: {"tree": w.columns}, "process 1: spec P(None, 'x')"),
        Case("mesh: order", lambda w: {"mesh": w.mesh}, "process 1: device order"),
        Case("specs", lambda w: {"specs": P(None, "x")}, "process 1: spec P(None, 'x')"),
        Case(
            "max_device_bytes", lambda w: {"max_device_bytes": 64}, "process 1: max_device_bytes 64"
        ),
        Case("donate", lambda w: {"donate": True}, "process 1: donate True"),
    ],
    check_replicas_agree: [
        Case("tree: keys", lambda w: {"tree": {"c": w.g}}, "only in process 1: c"),
        Case("tree: layout", lambda w: {"tree": w.columns}, "process 1: spec P(None, 'x')"),
    ],
}


@pytest.mark.processes(4, devices=2)
@pytest.mark.parametrize(
    "checks",
    [
        pytest.param(False, id="checks off"),
        pytest.param(True, id="checks on", marks=pytest.mark.torture),
    ],
)
@pytest.mark.parametrize("call", CASES, ids=lambda call: call.__name__)
def test_another_argument_in_one_process_is_named_in_all(
    world: World, call: Any, checks: bool
) -> None:
    for case in CASES[call]:
        with gda.checking_agreement(checks, timeout=60):
            others = case.others(world)
            is_other = jax.process_index() == ME
            with pytest.raises(case.own if is_other else gda.DisagreementError) as caught:
                call(world, **others if is_other else {})
        if not is_other or case.own is gda.DisagreementError:
            assert case.said in str(caught.value), case.argument
    with gda.checking_agreement(False):
        world.check_nothing_is_lost()


@pytest.mark.processes(4, devices=2)
def test_a_process_that_does_not_take_part_is_named_when_it_communicates_next(
    world: World,
) -> None:
    given = {"path": world.path, "mesh": world.mesh, "specs": P()}

    def restore_and_gather() -> None:
        checkpoint.restore(**given, read_once=jax.process_index() != ME)
        world.g.gather()

    with gda.checking_agreement(False), pytest.raises(gda.DisagreementError) as caught:
        restore_and_gather()
    said = "process 1: call GlobalArray.gather, processes 0, 2, 3: gda.checkpoint.restore"
    assert said in str(caught.value)
