"""A rehearsal as text and as advice. No JAX.

Read in this order: ``advice``, ``rehearsal_text``.
"""
