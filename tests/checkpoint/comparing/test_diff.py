"""The differences between two checkpoints, or a checkpoint and a tree."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import ORDERS, batch, cut, mesh_of, ordered_mesh

import gda
from gda.checkpoint import Differences, LeafDifference, diff, save

KINDS = ["only_in_a", "only_in_b", "of_other_type", "of_other_content"]


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Saves a tree into a new folder; returns its path."""

    def write(tree: Any, **options: Any) -> Path:
        path = tmp_path / f"step-{len(list(tmp_path.iterdir()))}"
        save(path, tree, **options)
        return path

    return write


def paths(differences: Differences) -> dict[str, list[Any]]:
    """Return the paths of each kind of difference that there is."""
    found = {kind: [leaf.path for leaf in getattr(differences, kind)] for kind in KINDS}
    return {kind: each for kind, each in found.items() if each}


A = {"w": batch(4, 3), "b": batch(3), "old": np.ones(2), "step": 1, "name": "a", "n": np.zeros(2)}
B = A | {"w": batch(4, 3) + 1, "b": batch(4), "step": 2, "n": 0, "new": [np.ones(5)]}
del B["old"]


def test_each_kind_of_difference(saved: Callable[..., Path]) -> None:
    a, b = saved(A), saved(B)
    differences = diff(a, b)
    assert differences == Differences(
        str(a),
        str(b),
        only_in_a=(LeafDifference(("old",), "float64[2]", None),),
        only_in_b=(LeafDifference(("new", 0), None, "float64[5]"),),
        of_other_type=(
            LeafDifference(("b",), "float32[3]", "float32[4]"),
            LeafDifference(("n",), "float64[2]", "0"),
        ),
        of_other_content=(
            LeafDifference(("step",), "1", "2"),
            LeafDifference(("w",), "float32[4,3]", "float32[4,3]"),
        ),
        num_equal=1,
    )
    assert differences
    assert not differences.are_equal
    assert str(differences).splitlines() == [
        f"a:  {a}",
        f"b:  {b}",
        "only in a: 1 leaf",
        "  old  float64[2]",
        "only in b: 1 leaf",
        "  new/0  float64[5]",
        "of other type: 2 leaves",
        "  b  float32[3] -> float32[4]",
        "  n  float64[2] -> 0",
        "of other content: 2 leaves",
        "  step  1 -> 2",
        "  w     float32[4,3]",
        "the same: 1 leaf, 0 B",
    ]


def test_a_checkpoint_is_the_same_as_itself_and_its_tree(saved: Callable[..., Path]) -> None:
    path = saved(A)
    for differences in (diff(path, path), diff(path, A)):
        assert differences.are_equal
        assert not differences
        assert (differences.num_equal, differences.equal_nbytes) == (6, 48 + 12 + 16 + 16)
    assert str(diff(path, A)).splitlines()[1:] == [
        "b:  the tree",
        "the same: all of 6 leaves, 92 B",
    ]


def test_no_data_is_read(saved: Callable[..., Path]) -> None:
    a, b = saved(A), saved(B)
    expected = diff(a, b)
    for path in (a, b):
        (data,) = path.glob("data-*")
        shutil.rmtree(data)
    assert diff(a, b) == expected


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_layouts_and_containers_do_not_count(saved: Callable[..., Path], kind: AxisType) -> None:
    data, keys = batch(8, 4), jax.random.split(jax.random.key(1), 8)
    path = saved({"pair": Pair(data, [keys]), "half": data.astype(ml_dtypes.bfloat16)})
    mesh = ordered_mesh(ORDERS["shuffled"], {"x": 4, "y": 2}, kind)
    odd = gda.PaddedArray.from_callback((8, 4), mesh_of({"x": 3}), P("x"), lambda i: data[i])
    for first in (cut(data, mesh, P("x", "y")), jnp.asarray(data), odd):
        tree = {"pair": {"first": first, "second": (keys,)}, "half": jnp.asarray(data, "bfloat16")}
        assert diff(path, tree).are_equal
        assert diff(path, tree | {"half": data}).of_other_type
        other = tree | {"pair": Pair(first + 1 if first is not odd else data + 1, [keys])}
        assert paths(diff(path, other)) == {"of_other_content": [("pair", "first")]}
    a = saved({"k": jax.random.key(0)})
    (found,) = diff(a, {"k": jax.random.key(5)}).of_other_content
    assert found.a == "uint32[2] of keys of threefry2x32"
    assert diff(a, {"k": jax.random.key_data(jax.random.key(0))}).of_other_type
    assert diff(a, {"k": jax.random.key(0, impl="rbg")}).of_other_type


def test_values_are_the_same_by_type_and_digits(saved: Callable[..., Path]) -> None:
    values = {"nan": float("nan"), "zero": 0.0, "one": 1, "true": True, "text": "x" * 90, "b": b"a"}
    path = saved(values)
    assert diff(path, values).are_equal
    others = values | {"zero": -0.0, "one": 1.0, "true": 1, "text": "x" * 90 + "y", "b": b"b"}
    found = diff(path, others)
    assert paths(found) == {
        "of_other_type": [("one",), ("true",)],
        "of_other_content": [("b",), ("text",), ("zero",)],
    }
    assert f"text  '{'x' * 59}… -> '{'x' * 59}…\n" in str(found)
    assert found.of_other_content[1].b == repr("x" * 90 + "y")


def test_a_report_names_the_first_of_many(saved: Callable[..., Path]) -> None:
    tree = {f"w{i:03}": i for i in range(50)}
    lines = str(diff(saved(tree), saved({name: i + 1 for name, i in tree.items()}))).splitlines()
    assert lines[2] == "of other content: 50 leaves"
    assert lines[-2:] == ["  … 30 more leaves", "the same: 0 leaves, 0 B"]
    assert len(lines) == 2 + 1 + 20 + 2


# Many processes.


@pytest.mark.processes(2, devices=4)
def test_a_tree_over_processes(shared_tmp_path: Path) -> None:
    mesh = ordered_mesh(ORDERS["interleaved"], {"x": 4, "y": 2})
    data = batch(32, 8)
    tree = {"w": cut(data, mesh, P("x", "y")), "own": jnp.ones(3), "host": np.arange(3), "step": 1}
    save(shared_tmp_path, tree)
    assert diff(shared_tmp_path, tree).are_equal
    other = data.copy()
    other[0, 0] += 1  # in a block of process 0
    other[31, 7] += 2  # and of process 1
    now = tree | {"w": cut(other, mesh, P(("y", "x"))), "step": 2}
    differences = diff(shared_tmp_path, now)
    assert paths(differences) == {"of_other_content": [("step",), ("w",)]}
    assert differences.num_equal == 2
    with pytest.raises(gda.DisagreementError, match=r"at step, process 0: value 0, process"):
        diff(shared_tmp_path, tree | {"step": jax.process_index()})


# Bad inputs.


def test_the_first_is_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="the first argument must be the path of a"):
        diff(A, np.ones(3))
    with pytest.raises(gda.checkpoint.CheckpointNotFoundError, match="no checkpoint at .*/none"):
        diff(tmp_path / "none", A)
