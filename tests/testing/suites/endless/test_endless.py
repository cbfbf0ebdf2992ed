import os
import time

import pytest


@pytest.mark.processes(1)
def test_sleeps(shared_tmp_path):
    file = shared_tmp_path / f"{os.getpid()}.tmp"
    file.touch()
    file.rename(file.with_suffix(".pid"))
    time.sleep(600)
