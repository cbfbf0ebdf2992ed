"""The contents of the files of a checkpoint.

Read in this order: ``manifest`` (arrays in chunks as zarr v3, and every file by size and checksum),
``manifest_json`` (its file, written last). The tree in it is described by ``gda.trees.records``.
"""
