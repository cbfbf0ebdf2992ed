"""Former names of attributes."""

import dataclasses
import warnings
from typing import Any

import pytest

import gda
from gda.layout.former_names import FormerName

HALVES = gda.ShardGrid((4,), {"x": 2}, ("x",))
PLAN = gda.ReshardPlan(HALVES, gda.ShardGrid((4,), {"x": 1}, ()), itemsize=4)
COLLECTIVE = gda.Collective("all-reduce", ("x",), ((4,),), ("int32",), ((4,),), ("int32",), 16, 8)
COLLECTIVES = gda.Collectives((COLLECTIVE,), {"x": 2})


@pytest.mark.parametrize(
    ("value", "former", "name"),
    [
        (PLAN, "bytes_total", "nbytes_total"),
        (PLAN, "bytes_kept", "nbytes_kept"),
        (PLAN, "bytes_moved", "nbytes_moved"),
        (PLAN, "bytes_within_processes", "nbytes_within_processes"),
        (PLAN, "bytes_between_processes", "nbytes_between_processes"),
        (PLAN, "peak_extra_bytes", "nbytes_peak_extra"),
        (COLLECTIVE, "total_bytes", "nbytes_total"),
        (COLLECTIVE, "output_nbytes", "nbytes_output"),
        (COLLECTIVES, "total_bytes", "nbytes_total"),
    ],
)
def test_a_former_name_gives_the_value_and_warns(value: Any, former: str, name: str) -> None:
    kind = type(value).__name__
    message = f"^{kind}.{former} is deprecated, and gda 0.2 removes it; use {kind}.{name}$"
    with pytest.warns(DeprecationWarning, match=message) as caught:
        assert getattr(value, former) == getattr(value, name)
    assert caught[0].filename == __file__


def test_every_former_name_of_a_public_class_is_tested_here() -> None:
    tested = {type(PLAN), type(COLLECTIVE), type(COLLECTIVES)}
    public = {value for name in gda.__all__ if isinstance(value := getattr(gda, name), type)}
    former = {kind for kind in public if any(_former_names(kind))}
    assert former == tested
    assert sum(len(_former_names(kind)) for kind in former) == 9


def _former_names(kind: type) -> list[str]:
    return [name for name, value in vars(kind).items() if isinstance(value, FormerName)]


def test_a_former_name_is_no_field_and_nothing_else_asks_for_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in (PLAN, COLLECTIVE, COLLECTIVES):
            str(value)
        COLLECTIVES.to_dict()
        assert dataclasses.replace(COLLECTIVE, nbytes_output=8) == COLLECTIVE
        assert hash(COLLECTIVE) == hash(dataclasses.replace(COLLECTIVE))
