import os
import time
from pathlib import Path

import pytest


@pytest.mark.processes(1)
def test_sleeps():
    Path("pid.tmp").write_text(str(os.getpid()))
    os.rename("pid.tmp", "pid")
    time.sleep(600)
