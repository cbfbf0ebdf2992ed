"""The places that hold the files of a checkpoint: directories and object stores.

To read in this order: ``protocol`` (what a store can do), ``directory``, ``object_store``,
``waiting`` (requests that are repeated), ``opening`` (which of them a path names).
"""
