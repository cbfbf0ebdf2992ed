"""Texts about meshes and specs, and kinds of devices: for plans and rehearsals.

Provisional: see ``docs/stable.md``.

No JAX. Read in this order: ``notation`` (texts to values), ``better_spec``, ``device_kinds`` with
``device_speeds``.
"""
