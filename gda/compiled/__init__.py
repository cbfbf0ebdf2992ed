"""The communication of a compiled function.

To read in this order: ``hlo`` (the text of a compiled program, without JAX), ``rules`` (what it may
communicate), ``collectives`` (``gda.collectives`` and ``gda.assert_collectives``).
"""
