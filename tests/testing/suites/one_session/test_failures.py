import logging
import sys

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.processes(2)


def test_assertion():
    print("some output")
    logging.getLogger().warning("some log")
    where = jax.process_index()
    assert where == 0, "not here"


def test_both():
    assert jax.process_count() == 3


@pytest.fixture
def broken():
    yield
    raise OSError("cannot tear down")


def test_teardown(broken):
    pass


@pytest.fixture
def missing():
    raise OSError("cannot set up")


def test_setup(missing):
    pass


def test_skip_in_one():
    if jax.process_index() == 1:
        pytest.skip("only here")


def test_exit():
    sys.exit(4)


@pytest.mark.parametrize("word", ["on", "off"])
def test_still_works(word):
    pass


@pytest.mark.processes(2, device=2)
def test_unknown_keyword():
    pass


@pytest.mark.processes(0)
def test_no_processes():
    pass


@given(st.integers())
def test_hypothesis(value):
    pass


def test_wrong_fixture(process_pool):
    pass
