"""The works through pytest-benchmark: a group for each, and in it a row for each side.

pytest-benchmark would time one side to its end before it begins the other, so that a noisy minute
hits only one. The sides are therefore timed in turns, by ``benchmarks.pairs``, and pytest-benchmark
gets the samples: by a clock that stands still but for each sample.
"""

from functools import lru_cache

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.pairs import measure
from benchmarks.work import Work

_now = 0.0


def replayed_time() -> float:
    return _now


@lru_cache(maxsize=1)
def measured(work: Work, quick: bool) -> list[list[float]]:
    sides = work.prepare()
    assert len(sides) == len(work.ways)
    return measure(sides, 0, least=2) if quick else measure(sides, work.seconds)


@pytest.mark.filterwarnings("ignore")  # of rivals
@pytest.mark.benchmark(timer=replayed_time)
def test_speed(
    benchmark: BenchmarkFixture, work: Work, side: int, pytestconfig: pytest.Config
) -> None:
    seconds = measured(work, pytestconfig.getoption("--quick"))[side]
    benchmark.group = work.name
    benchmark.extra_info.update(work=work.name, way=work.ways[side])
    samples = iter(seconds)

    def replay() -> None:
        global _now
        _now += next(samples)

    benchmark.pedantic(replay, rounds=len(seconds))
