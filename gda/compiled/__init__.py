"""What a compiled function communicates.

To read in this order: ``hlo`` (the text of a compiled program, without JAX), ``rules`` (what it may
communicate), ``collectives`` (``gda.collectives`` and ``gda.assert_collectives``).
"""
