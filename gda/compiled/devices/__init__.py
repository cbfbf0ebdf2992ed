"""The kinds of devices: ``device_speeds``, then ``device_kinds`` (the table). No JAX."""
