"""Writing a checkpoint: ``claim`` (the path), ``writer`` (the chunks)."""
