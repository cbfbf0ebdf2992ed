"""The places that hold the files of a checkpoint: directories and object stores.

Read in this order: ``errors``, ``checksums``, ``directory``, ``object_store``, ``opening`` (the
store of a path).
"""
