import os
import signal
import time

import jax
import pytest


def wait_for_godot():
    time.sleep(600)


@pytest.mark.processes(2)
def test_dies(shared_tmp_path):
    print("last words", flush=True)
    if jax.process_index() == 1:
        while not (shared_tmp_path / "waits").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGSEGV)
    (shared_tmp_path / "waits").touch()
    wait_for_godot()


@pytest.mark.processes(2, timeout=5)
def test_hangs():
    if jax.process_index() == 0:
        wait_for_godot()


@pytest.fixture
def leaves():
    yield
    os._exit(5)


@pytest.mark.processes(2)
def test_ends_late(leaves):
    pass


@pytest.mark.processes(2)
def test_works_again():
    pass
