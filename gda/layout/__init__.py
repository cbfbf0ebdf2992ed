"""Integers only: how a spec shards a shape over a mesh, which device holds which block, what moves.

NumPy, no JAX. To read in this order: ``spec`` (specs and their errors), ``numbering`` (devices and
blocks as mixed-radix numbers), ``tiling`` (the blocks of a shape), ``grid`` (``ShardGrid``),
``processes`` and ``process_view`` (the same by process), ``reshard`` (what moves between grids).
Every room needs ``text`` (amounts and names in messages), ``tables`` (what fits a terminal),
``dtype_names`` and ``boundary`` (what a traceback shows of gda).
"""
