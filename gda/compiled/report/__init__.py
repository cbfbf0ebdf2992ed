"""A rehearsal as text, as a picture and as advice, and read from a document. No JAX.

Read in this order: ``documents`` (records from JSON), ``advice``, ``rehearsal_text``,
``rehearsal_page``.
"""
