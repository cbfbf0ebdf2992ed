"""Plans of arrays and models: the memory and the moves that they will need, computed from text.

Provisional: see ``docs/stable.md``.

No JAX. Read in this order: ``notation`` (texts to values), ``planned_array`` (one array), ``model``
(all parameters), ``device_kinds``.
"""
