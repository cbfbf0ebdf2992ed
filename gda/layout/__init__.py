"""The layout in integers: the blocks of a shape under a spec, their devices, and their moves.

NumPy, no JAX. Read in this order: ``spec`` (specs and their errors), ``numbering`` (devices and
blocks as mixed-radix numbers), ``indices`` (slices of blocks, and the blocks of a shape), ``grid``
(``ShardGrid``), ``processes`` and ``process_view`` (the same by process), ``reshard`` (the moves
between grids), ``cover`` (the reads that fill blocks, and who makes them). All packages use
``text`` (amounts and names in messages), ``tables`` (text for a terminal), ``strict_json``,
``dtype_names``, ``boundary`` (tracebacks without gda's inner frames) and ``distribution`` (the
commands that install extras).
"""
