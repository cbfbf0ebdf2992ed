"""The works through pytest-benchmark: a group for each, and in it a row for each side.

pytest-benchmark would time one side to its end before it begins the other, so that a noisy minute
hits only one. The sides are therefore timed in turns, by ``benchmarks.pairs``, and pytest-benchmark
gets the samples: by a clock that stands still but for each sample.
"""

from collections.abc import Callable, Sequence
from functools import cache
from statistics import median

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.pairs import Side, measure
from benchmarks.work import Work

_now = 0.0


def replayed_time() -> float:
    return _now


@cache
def measured(prepare: Callable[[], Sequence[Side]], rounds: int) -> list[list[float]]:
    return measure(prepare(), rounds)


@pytest.mark.benchmark(timer=replayed_time)
def test_speed(
    benchmark: BenchmarkFixture, work: Work, side: int, pytestconfig: pytest.Config
) -> None:
    rounds = min(work.rounds, 3) if pytestconfig.getoption("--smoke") else work.rounds
    everyone = measured(work.prepare, rounds)
    seconds = [everyone[0], everyone[work.against]] if work.rival else everyone[:1]
    medians = [median(samples) for samples in seconds]
    benchmark.group = work.key
    benchmark.extra_info.update(
        work=work.key,
        side=side,
        medians=medians,
        ratio=medians[1] / medians[0] if work.rival else None,
        target=str(work.target or ""),
        reached=work.target.is_reached(medians[0], medians[-1]) if work.target else None,
    )
    samples = iter(seconds[side])

    def replay() -> None:
        global _now
        _now += next(samples)

    benchmark.pedantic(replay, rounds=rounds)
