import os
import sys


def test_light():
    assert "gda.testing.plugin" in sys.modules
    loaded = {"jax", "numpy", "hypothesis.strategies", "gda.testing.pool", "gda.launch.children"}
    assert not loaded & set(sys.modules)
    assert "JAX_PLATFORMS" not in os.environ
