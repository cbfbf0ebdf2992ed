"""The speed of gda, side by side with JAX's public way of doing the same work.

``python -m benchmarks`` measures everything and writes ``benchmarks/RESULTS.md``;
``python -m pytest benchmarks`` shows one device count (8, or ``--virtual-devices=64``).
Each folder measures the package of gda of that name, in tables ``WORKS`` that ``works`` collects.
"""
