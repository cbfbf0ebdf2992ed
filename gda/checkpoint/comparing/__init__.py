"""Comparing two checkpoints or trees.

Read in this order: ``diff``, ``trees`` (the two that it compares), ``differences``, ``elements``.
"""
