"""The texts that people write: numbers, dtypes, meshes and specs. No JAX.

Read in this order: ``mistakes`` (the errors), ``numbers`` and ``mesh_and_spec`` (texts to values).
"""
