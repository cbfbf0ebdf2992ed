"""From text about a model (shapes, meshes, device kinds) to the memory and moves that it will need.

No JAX. Read in this order: ``notation`` (texts to values), ``planned_array`` and ``array`` (one
array), ``model`` (all parameters), ``memory`` (does it fit), ``moves`` (between two layouts),
``suggestion`` (a better order of devices), ``device_kinds``.
"""
