"""Trees into files and targets.

Provisional: see ``docs/stable.md``.

Read in this order: ``store``; ``save_safetensors``, over ``rows`` (arrays moved so that their
blocks are long runs of bytes), ``stripes`` (blocks into files, in long writes) and ``step_names``
(paths where no files go).
"""
