"""Whole trees of arrays.

In this order: ``leaves`` (their paths), ``matching`` (the spec or the target for every leaf),
``load`` (from sources), ``written_blocks``, ``files`` (to targets and safetensors), ``plain``
(without containers), ``digests`` (fingerprints), ``jit``, ``resharding`` (to other meshes),
``replicas`` (a check of their bits), ``batches``, ``layouts`` (a table, with ``name_ranges``),
``live_arrays`` (``memory``), ``records`` (of trees that are saved or offered).
"""
