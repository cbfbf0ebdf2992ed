"""The least time of collectives, counted by hand."""

from typing import Any

import pytest

import gda
from gda.compiled.least_times import least_seconds
from gda.planning.device_speeds import DeviceSpeeds, Fit, Measured

SPEEDS = DeviceSpeeds(
    {"bf16": 1e15}, 100.0, 10.0, measured=Measured(1, 1, {"any": (Fit(2, 0, 1),)})
)


def collective(kind: str, nbytes: int, nbytes_output: int, **facts: Any) -> gda.Collective:
    groups = facts.pop("groups", ((0, 1, 2, 3),))
    shapes = ((nbytes,),), ("int8",), ((nbytes_output,),), ("int8",)
    return gda.Collective(
        kind, ("x",), *shapes, nbytes=nbytes, nbytes_output=nbytes_output, groups=groups, **facts
    )


# Of four devices, each has a part of 100 bytes, or 400 bytes; two and two are on a host.
@pytest.mark.parametrize(
    ("found", "within", "between"),
    [
        (collective("all-gather", 100, 400), 300, 200 / 2),
        (collective("reduce-scatter", 400, 100), 300, 200 / 2),
        (collective("all-reduce", 400, 400), 400, 400 / 2),
        (collective("all-to-all", 400, 400), 300, 200),
        (collective("ragged-all-to-all", 400, 400), 0, 0),
        (collective("collective-permute", 400, 400, groups=(), pairs=((0, 1), (1, 2))), 400, 400),
        (collective("collective-permute", 400, 400, groups=(), pairs=((0, 1), (2, 3))), 400, 0),
        (collective("all-reduce", 400, 400, groups=((0, 1), (2, 3))), 400, 0),
        (collective("all-reduce", 400, 400, groups=((0,), (1,))), 0, 0),
    ],
)
def test_bytes_over_links_within_and_between_hosts(
    found: gda.Collective, within: int, between: float
) -> None:
    assert least_seconds(found, [], SPEEDS) == within / 100
    assert least_seconds(found, [0, 0, 0, 0], SPEEDS) == within / 100
    assert least_seconds(found, [0, 0, 1, 1], SPEEDS) == max(within / 100, between / 10)


def test_executions_count() -> None:
    assert least_seconds(collective("all-reduce", 400, 400, count=3), [], SPEEDS) == 12
    assert least_seconds(collective("all-reduce", 400, 400, count=None), [], SPEEDS) is None


def test_parts_between_slices_go_over_slow_links() -> None:
    found = collective("all-reduce", 400, 400, groups=(), is_between_slices=True)
    assert least_seconds(found, [], SPEEDS) == 40
