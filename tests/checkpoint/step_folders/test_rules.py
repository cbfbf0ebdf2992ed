"""The steps that are due, kept and best, against the definitions, one step at a time."""

import itertools
import math

from hypothesis import example, given
from hypothesis import strategies as st

from gda.checkpoint.step_folders.rules import Rules, best_first, is_due, milestones

STEPS = st.sets(st.integers(0, 400), max_size=12)
EVERY = st.integers(1, 60)


@given(st.integers(0, 400), st.integers(0, 50), EVERY)
def test_a_step_is_due_if_a_multiple_was_reached_since_the_previous(
    previous: int, stride: int, every: int
) -> None:
    step = previous + stride
    reached = any(number % every == 0 for number in range(previous + 1, step + 1))
    assert is_due(step, previous, every) == reached


@example({1}, 1)
@given(STEPS, EVERY)
def test_milestones_are_the_first_steps_at_or_after_each_multiple(
    steps: set[int], every: int
) -> None:
    multiples = range(every, max(steps, default=0) + 1, every)
    assert milestones(steps, every) == {min(s for s in steps if s >= m) for m in multiples}


@given(st.dictionaries(st.integers(0, 99), st.floats(width=16)), st.booleans())
def test_no_other_step_is_better_than_the_best(values: dict[int, float], is_highest: bool) -> None:
    ranked = best_first(values, is_highest=is_highest)
    assert {*ranked} == {step for step, value in values.items() if not math.isnan(value)}
    for better, worse in itertools.pairwise(ranked):
        first, second = values[better], values[worse]
        assert first >= second if is_highest else first <= second
        assert first != second or better > worse


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
    st.integers(1, 4),
    st.none() | EVERY,
    st.lists(st.integers(0, 9) | st.just(math.nan), min_size=20, max_size=20),
    st.integers(0, 2),
)
def test_removal_after_each_step_keeps_what_one_look_at_all_would(
    strides: list[int], keep: int, every: int | None, losses: list[float], num_best: int
) -> None:
    """Nothing that a rule would want later is removed before, and the newest never is."""
    rules = Rules(keep, every, num_best)
    all_steps: list[int] = []
    there: set[int] = set()
    for stride in strides:
        all_steps.append(stride + (all_steps[-1] if all_steps else 0))
        values = dict(zip(all_steps, losses, strict=False))
        there.add(all_steps[-1])
        ranked = best_first({s: values[s] for s in there}, is_highest=False)
        there = rules.kept(there, ranked)
        assert there == rules.kept(all_steps, best_first(values, is_highest=False))
        assert all_steps[-1] in there


def test_no_rule_keeps_all_without_a_number_to_keep() -> None:
    assert Rules(every=2, num_best=1).kept([1, 2, 3], [1]) == {1, 2, 3}
