"""Comparing two checkpoints or trees.

Read in this order: ``diff``, ``diff_sides`` (the two that it compares), ``differences``.
"""
