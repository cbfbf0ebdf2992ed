"""The places that hold the files of a checkpoint: directories and object stores.

Read in this order: ``protocol`` (the methods of a store), ``directory``, ``object_store``,
``waiting`` (requests that are repeated), ``opening`` (the store of a path).
"""
