"""Whole trees of arrays.

To read in this order: ``leaves`` (their paths), ``matching`` (of two trees, what one has for each
leaf of the other), ``specs`` (a spec for every leaf), ``load`` (sources to trees) and ``store``
(trees to targets), ``to_numpy``, ``jit`` (``jit`` and ``constrain``), ``host_local`` (the parts of
each host as one tree, and back), ``batches`` (a host's batch under the mesh that is set).
"""
