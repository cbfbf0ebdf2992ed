"""Old pickles, which name the module of each class, still load.

New pickles name public modules only, so that they load after a class has moved.
"""

import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gda
import gda.checkpoint

BEFORE = Path(__file__).parent / "pickles_before"
PROCESS_OF = [0, 0, 0, 0, 1, 1, 1, 1]
GRID = gda.ShardGrid((8, 2), {"x": 4, "y": 2}, P("x"))
TARGET = gda.ShardGrid((8, 2), {"x": 4, "y": 2}, P(None, "y"))
PLAN = gda.ReshardPlan(GRID, TARGET, itemsize=4)
GRID_WITH_PROCESSES = gda.ShardGrid((8, 2), {"x": 4, "y": 2}, P("x"), process_of=PROCESS_OF)


def load(name: str) -> Any:
    return pickle.loads((BEFORE / f"{name}.pickle").read_bytes())


def test_an_array(auto_mesh: Mesh) -> None:
    restored = load("global_array")
    assert isinstance(restored, gda.GlobalArray)
    assert restored.spec == P("x")
    assert dict(restored.mesh.shape) == dict(auto_mesh.shape)
    np.testing.assert_array_equal(restored, np.arange(16.0).reshape(8, 2))


def test_the_class_of_an_array_as_in_the_structure_of_a_tree() -> None:
    assert pickle.loads(b"cgda.array\nGlobalArray\n.") is gda.GlobalArray
    assert pickle.loads(b"cgda.views\nProcessView\n.") is gda.ProcessView


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("grid", GRID),
        ("grid_with_processes", GRID_WITH_PROCESSES),
        ("process_view", GRID_WITH_PROCESSES.view(1)),
        ("plan", PLAN),
        ("move", next(iter(PLAN.moves()))),
        ("load", gda.Load(0, 24)),
        ("link", gda.Link(0, 1, 64)),
        ("traffic", gda.Traffic(1, 128)),
        ("retry", gda.Retry(OSError)),
        ("partition", gda.DataPartitionType.FULL),
    ],
)
def test_values(name: str, value: Any) -> None:
    assert load(name) == value
    assert type(load(name)) is type(value)


def test_collectives() -> None:
    listed = load("collectives")
    assert isinstance(listed, gda.Collectives)
    assert [type(each) for each in listed] == [gda.Collective]
    assert listed[0].kind == "all-reduce"
    assert listed[0].nbytes_output == 4


def test_contents_of_a_checkpoint() -> None:
    contents = load("contents")
    assert isinstance(contents, gda.checkpoint.Contents)
    assert contents.rows[0] == ("['step']", "int", "1", "")
    assert contents.leaves[1].path == ("w",)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("layout_unknown", gda.LayoutUnknownError),
        ("does_not_fit", gda.DoesNotFitError),
        ("disagreement", gda.DisagreementError),
        ("late", gda.LateProcessError),
        ("corruption", gda.checkpoint.CorruptionError),
        ("not_found", gda.checkpoint.CheckpointNotFoundError),
        ("save_error", gda.checkpoint.SaveError),
    ],
)
def test_errors(name: str, kind: type[Exception]) -> None:
    assert type(load(name)) is kind


@pytest.mark.parametrize("name", sorted(path.stem for path in BEFORE.iterdir()))
@pytest.mark.parametrize("protocol", [2, pickle.DEFAULT_PROTOCOL])
def test_pickles_name_public_modules_only(name: str, protocol: int) -> None:
    value = load(name)
    str(value)  # what is kept for the next time is pickled too, or left out
    written = pickle.dumps(value, protocol)
    strings = [argument for _, argument, _ in pickletools.genops(written)]
    modules = {text.split()[0] for text in strings if str(text).startswith("gda.")}
    assert modules <= {"gda.checkpoint"}
    assert type(pickle.loads(written)) is type(value)


def test_the_former_modules_have_nothing_else() -> None:
    import gda.grid as former  # pyright: ignore[reportMissingImports]

    assert former.ShardGrid is gda.ShardGrid
    with pytest.raises(AttributeError, match="module 'gda.grid' has no attribute 'layout_of'"):
        _ = former.layout_of
