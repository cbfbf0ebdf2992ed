"""Whole trees of arrays.

Read in this order: ``leaves`` (their paths), ``matching`` (the spec or the target for every leaf),
``load`` (sources to trees), ``written_blocks`` (those that this process writes), ``files`` (trees
to targets and safetensors), ``plain`` (without containers), ``digests`` (fingerprints), ``jit``
(with ``constrain``), ``resharding`` (to other meshes), ``replicas`` (a check that they hold the
same bits), ``batches`` (each host's part to global arrays, ahead of the step), ``layouts`` (a table
of them), ``live_arrays`` (``memory``: all live arrays by name), ``records`` (of trees that are
saved or offered).
"""
