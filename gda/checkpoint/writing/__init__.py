"""Writing a checkpoint: ``writer`` (the chunks of a process), ``linking`` (to those of another)."""
