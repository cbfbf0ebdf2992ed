"""A rehearsal as text, as a picture and as advice. No JAX.

Read in this order: ``advice``, ``rehearsal_text``.
"""
