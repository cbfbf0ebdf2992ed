import os

import gda.testing.plugin

assert gda.testing.plugin.has_only_compilers() == "pretended"
# As soon as a conftest imports JAX, it would look for a TPU.
assert os.environ["JAX_PLATFORMS"] == "cpu"
