import os

import jax
import pytest


@pytest.fixture(scope="module")
def module_fixture():
    return os.getpid()


@pytest.mark.parametrize("number", range(4))
@pytest.mark.processes(1)
def test_one_size(number, module_fixture, worker_id):
    assert jax.device_count() == 1
    assert worker_id.startswith("gw")


@pytest.mark.processes(1, devices=3)
def test_another_size():
    assert jax.device_count() == 3


@pytest.mark.processes(1, devices=3)
def test_fails():
    assert jax.device_count() == 2


@pytest.mark.parametrize("number", range(4))
def test_unmarked(number):
    pass
