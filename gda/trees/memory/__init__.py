"""The memory of all live arrays: ``live_arrays`` over ``addresses`` (shared buffers)."""
