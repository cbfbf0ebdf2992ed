"""Trees into files and targets: ``store``, ``save_safetensors``, over ``stripes``.

Provisional: see ``docs/stable.md``.
"""
