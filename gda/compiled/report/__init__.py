"""A rehearsal as text, as advice and as a picture. No JAX.

Read in this order: ``advice``, ``rehearsal_text``, ``trace``.
"""
