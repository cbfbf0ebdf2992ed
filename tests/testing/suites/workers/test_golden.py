from pathlib import Path

import jax
import numpy as np
import pytest

import gda

HERE = Path(__file__).parent


def check(name):
    x = jax.ShapeDtypeStruct((8,), np.float32)
    gda.rehearse(lambda x: x + 1, x).check(HERE / name)


def test_here():
    check("here.json")


@pytest.mark.processes(1)
def test_in_processes():
    check("processes.json")
