"""The communication of a compiled function, and the devices that it is for.

Read in this order: ``hlo`` (the text of a compiled program, without JAX), ``rules`` (the allowed
communication), ``collectives`` (``gda.collectives`` and ``gda.assert_collectives``),
``device_kinds`` (the memory of each kind of device).
"""
