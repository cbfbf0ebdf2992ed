"""Reading a checkpoint back.

Read in this order: ``manifest_at``, ``restored_leaves``, ``files``, ``blocks``, ``read_once``,
``reader``, ``fingerprints`` (the check of what was read), ``saved_arrays`` (as sources).
"""
