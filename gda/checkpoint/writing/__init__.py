"""Writing a checkpoint: ``claim`` (the path), ``saved_leaves``, ``packing``, ``writer``."""
