"""Building an array: the blocks of this process, from callbacks, sources, or data that it has.

Read in this order: ``from_callbacks``, ``from_sources``, ``from_process_local``; under them
``placing`` (the devices of each block) and ``blocks`` (their memory).
"""
