"""A tree as records, and records matched to a layout.

Read in this order: ``recorded_leaves``, ``structure``, ``saved_leaves``, ``restored_leaves``.
"""
