"""Batches of a training loop: ``prefetch``; and ``compat``, names of other libraries.

Provisional: see ``docs/stable.md``.
"""
