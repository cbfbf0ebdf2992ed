"""A machine on which JAX finds libtpu, and nothing that it can use."""

import gda.launch.accelerators

gda.launch.accelerators.has_only_compilers = lambda: "pretended"
