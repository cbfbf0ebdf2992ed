"""Reading a checkpoint: ``checked_files``, ``chunk_parts``, ``saved_arrays`` (as sources)."""
