"""The communication of a compiled function.

Read in this order: ``hlo`` (the text of a compiled program, without JAX), ``rules`` (the allowed
communication), ``collectives`` (``gda.collectives`` and ``gda.assert_collectives``).
"""
