"""What helps to test code that works on sharded arrays.

- ``gda.testing.strategies``: hypothesis strategies for meshes, specs, shapes and ``GlobalArray``s.

Nothing is imported here: each module says what it needs, and which extra installs that.
"""
