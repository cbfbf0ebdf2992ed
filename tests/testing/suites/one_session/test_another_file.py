import os

import jax
import pytest


def test_here(shared_tmp_path, tmp_path, process_pool):
    assert shared_tmp_path == tmp_path
    assert len(set(process_pool(2, devices=2).run(os.getpid))) == 2


@pytest.mark.processes(2, devices=2)
def test_there():
    assert jax.process_count() == 2


# The last of its size before test_too_many, which starts the processes anew anyway.
@pytest.mark.xfail(reason="one is enough")
@pytest.mark.processes(2, devices=2)
def test_xfail_in_one_process():
    assert jax.process_index() == 0
