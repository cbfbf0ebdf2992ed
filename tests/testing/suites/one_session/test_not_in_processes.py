import os

import pytest

if "JAX_PROCESS_ID" in os.environ:
    raise OSError("no such volume")


@pytest.mark.processes(2)
def test_it():
    pass
