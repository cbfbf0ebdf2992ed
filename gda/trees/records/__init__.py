"""A tree as records, and records matched to a layout.

Read in this order: ``recorded_tree``, ``saved_leaves``, of what is saved or offered; ``arrivals``,
``requests`` and ``compared_fingerprints``, of what is restored or pulled.
"""
