"""Whole trees of arrays.

Read in this order: ``leaves`` (their paths), ``matching`` (two trees, leaf by leaf), ``specs``
(a spec for every leaf), ``load`` (sources to trees) and ``store`` (trees to targets), ``to_numpy``,
``written_leaves`` (the blocks of this process, into files) and ``save_safetensors``, ``jit``
(``jit`` and ``constrain``), ``resharding`` (to other meshes), ``replicas`` (a check that they hold
the same bits), ``host_local`` (trees of each host's parts to global arrays and back), ``batches``
(a host's batch, over the current mesh), ``prefetch`` (the batches of an iterator, ahead of the
step), ``live_arrays`` (the memory of all arrays, by name).
"""
