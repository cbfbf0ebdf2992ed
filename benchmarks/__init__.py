"""The speed of gda, side by side with JAX's public way of doing the same work.

``python -m benchmarks`` measures everything and writes ``benchmarks/RESULTS.md``.
Each folder measures the package of gda of that name, in tables ``WORKS`` that ``works`` collects.
"""
