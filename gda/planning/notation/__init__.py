"""The texts that people write: numbers, dtypes, meshes and specs, and files that describe a model.

Read in this order: ``mistakes`` (the errors), ``numbers`` and ``mesh_and_spec`` (texts to
values), ``planned_grid`` (a grid from these values, within limits), ``name_ranges`` and
``model_file`` (the format of ``gda plan --tree``).
"""
