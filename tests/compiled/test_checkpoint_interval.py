"""The interval between checkpoints, compared with the best of all intervals and a simulation."""

import random
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from meshes import abstract

import gda
from gda.compiled.checkpoint_interval import interval_of


def simulated(interval: float, mean: float, save: float, restart: float) -> float:
    """Return the share of training in 4,000 intervals with random failures."""
    random_numbers = random.Random(7)
    trained = time = 0.0
    while trained < 4000 * interval:
        left = random_numbers.expovariate(1 / mean)
        while left >= interval + save:
            left -= interval + save
            time += interval + save
            trained += interval
        time += left + restart
    return trained / time


@pytest.mark.parametrize(
    ("mean", "save", "restart"), [(14_400, 30, 300), (3600, 300, 0), (86_400, 0.4, 900)]
)
def test_no_other_interval_leaves_more_time(mean: float, save: float, restart: float) -> None:
    best = interval_of(mean, save, restart, None)
    assert best.calls is None
    assert best.training_share == pytest.approx(
        simulated(best.seconds, mean, save, restart), abs=0.02
    )
    for factor in (0.25, 0.5, 0.8, 1.25, 2, 4):
        # Calls of this time allow this interval alone.
        other = interval_of(mean, save, restart, factor * best.seconds)
        multiple = other.seconds / best.seconds
        if not 0.99 < multiple < 1.01:
            assert other.training_share < best.training_share


def test_an_interval_has_whole_calls() -> None:
    interval = interval_of(14_400, 30, 300, 0.7)
    assert interval.calls == 1299
    assert interval.seconds == pytest.approx(1299 * 0.7)
    assert interval_of(100, 1, 0, 1000).calls == 1
    assert interval_of(10, 30, 0, None).seconds == 10  # a save takes longer than the time there is
    assert interval_of(1, 1, 0, 1e6).training_share == 0


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({"seconds_between_failures": 0, "save_seconds": 1}, "seconds_between_failures must be"),
        ({"seconds_between_failures": 9, "save_seconds": float("inf")}, "save_seconds must be a"),
        (
            {"seconds_between_failures": 9, "save_seconds": 1, "restart_seconds": -1},
            "restart_seconds must be a number of seconds, 0 or more, not -1",
        ),
    ],
)
def test_times_that_are_none(times: dict[str, Any], message: str) -> None:
    rehearsal = gda.rehearse(jax.numpy.sin, np.zeros(8, np.float32))
    with pytest.raises(ValueError, match=message):
        rehearsal.checkpoint_interval(**times)


def test_each_host_writes_its_part_of_the_state(mesh: Mesh) -> None:
    params, batch = abstract((64, 32), mesh, "x"), abstract((16, 64), mesh, "x")
    step = jax.jit(lambda w, x: w + x.sum(), donate_argnums=0)
    rehearsal = gda.rehearse(step, params, batch)
    assert rehearsal.num_hosts == 1
    assert rehearsal.state_bytes == 64 * 32 * 4
    assert gda.rehearse(lambda w, x: w + x.sum(), params, batch).state_bytes == 64 * 32 * 4
    assert gda.rehearse(lambda w, x: x @ w, params, batch).state_bytes == 0
    assert rehearsal.to_dict()["state_bytes"] == 64 * 32 * 4


@pytest.mark.topology
def test_a_topology_has_its_hosts() -> None:
    mesh = gda.rehearsal_mesh("v5e:4x4", {"data": 16})
    rehearsal = gda.rehearse(lambda w: w + 1, abstract((64, 32), mesh, "data"))
    assert (rehearsal.num_hosts, rehearsal.state_bytes) == (4, 64 * 32 * 4 // 4)
