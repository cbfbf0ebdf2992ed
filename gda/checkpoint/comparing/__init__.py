"""Comparing two checkpoints or trees.

Read in this order: ``diff``, ``sides`` (the two that it compares), ``differences``, ``elements``.
"""
