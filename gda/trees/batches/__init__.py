"""Batches of a training loop: ``prefetch``, and ``compat`` with names of other libraries.

Provisional: see ``docs/stable.md``.
"""
