import pytest


def num_devices():
    import jax  # in processes only

    return jax.device_count()


@pytest.mark.parametrize("number", range(4))
@pytest.mark.processes(1)
def test_one_size(number, worker_id):
    assert num_devices() == 1
    assert worker_id.startswith("gw")


@pytest.mark.processes(1)
def test_fails():
    assert num_devices() == 2


@pytest.mark.parametrize("number", range(4))
def test_unmarked(number):
    pass
