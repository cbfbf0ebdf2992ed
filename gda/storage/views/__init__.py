"""Lazy views of sources: transposed, sliced, reshaped, cast, stacked and joined without a read.

Provisional: see ``docs/stable.md``.

Read in this order: ``mapping`` (integers: from the index of a view to boxes of its source),
``reads`` (from the index of a view to slices of its sources, each read once), ``lazy`` (the public
class and functions).
"""
