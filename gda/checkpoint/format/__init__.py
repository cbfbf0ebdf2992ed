"""The contents of the files of a checkpoint.

Read in this order: ``zarr_format`` (one array as zarr v3), ``manifest`` (arrays in chunks, every
file by size and checksum), ``manifest_json`` (its file, written last). The tree in it is described
by ``gda.trees.records``.
"""
