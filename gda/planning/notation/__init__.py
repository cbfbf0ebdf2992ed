"""The texts that people write: numbers, dtypes, meshes and specs.

Read in this order: ``mistakes`` (the errors), ``numbers`` and ``mesh_and_spec`` (texts to values),
``name_ranges``.
"""
