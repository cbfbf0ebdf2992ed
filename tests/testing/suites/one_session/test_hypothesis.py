import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pids = []


def check(values):
    assert sum(values) < 3
    return os.getpid()


@settings(max_examples=100, deadline=None, database=None)  # 10 may all be small
@given(st.lists(st.integers(0, 1)))
def test_many_examples(process_pool, values):
    process_pool(2).run(check, values)


@settings(max_examples=10, deadline=None, database=None)
@given(st.just([0]))
def test_one_example(process_pool, values):
    pids[:] = process_pool(2).run(check, values)


@pytest.mark.processes(2)
def test_marked():
    raise AssertionError


def test_same_processes(process_pool):
    assert process_pool(2).run(os.getpid) == pids
