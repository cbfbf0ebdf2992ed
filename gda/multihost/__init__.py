"""Processes that meet, agree and gather.

To read in this order: ``coordination`` (the one door to JAX's coordination service, which JAX does
not export), ``allgather`` (bytes to every process), ``descriptions`` (arrays as text that can be
compared), ``meeting`` (all bring something, one judges), ``steps`` (all do it, or all hear why
not), ``agreement`` (do all processes mean the same array).
"""
