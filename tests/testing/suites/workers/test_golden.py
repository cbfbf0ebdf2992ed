import os

import pytest


def test_here():
    assert os.environ["GDA_UPDATE_GOLDEN"] == "1"


@pytest.mark.processes(1)
def test_in_processes():
    assert os.environ["GDA_UPDATE_GOLDEN"] == "1"
