"""Batches of a training loop: ``prefetch``, and ``host_arrays`` of the placement guide.

Provisional: see ``docs/stable.md``.
"""
