"""Reading a checkpoint back.

Read in this order: ``checked_files``, ``chunk_parts``, ``read_once``, ``chunk_sums``
(fingerprints), ``saved_arrays`` (as sources). ``restoring`` beside this folder has the steps of a
restore.
"""
