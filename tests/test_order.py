"""The tests that a run keeps."""

from pathlib import Path
from types import SimpleNamespace

import order
import pytest
from jax.sharding import AxisType

pytestmark = pytest.mark.no_jax


class Item:
    """A test of the fixture ``mesh``, as pytest collects it."""

    def __init__(self, path: str, kind: AxisType) -> None:
        self.name = f"test_one[{kind.name.lower()}]"
        self.path = Path(__file__).parent / path
        self.nodeid = f"tests/{path}::{self.name}"
        self.callspec = SimpleNamespace(params={"mesh": kind})


@pytest.mark.parametrize(
    ("path", "kept"),
    [("arrays/transport/test_a.py", 2), ("layout/test_a.py", 2), ("trees/test_a.py", 1)],
)
def test_both_kinds_of_axes_are_kept_for_arrays_and_layouts(path: str, kept: int) -> None:
    items = [Item(path, kind) for kind in (AxisType.Auto, AxisType.Explicit)]
    assert len(order.choose_axes(items)) == kept
    assert order.choose_axes(items[:1]) == items[:1]
