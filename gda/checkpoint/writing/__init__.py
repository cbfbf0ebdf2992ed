"""Writing a checkpoint: ``writer`` (the chunks of a process)."""
