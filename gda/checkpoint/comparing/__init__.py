"""Comparing two checkpoints or trees: ``diff`` over ``differences``, the report."""
