"""Building an array: the blocks of this process, from callbacks, sources, or data that it has.

Read in this order: ``from_callbacks``, ``from_process_local``; ``from_sources``, and
``reading_once`` (each byte read by one process); under them ``reading_by_boxes`` (blocks that share
rows or chunks), ``placing`` (the devices of each block) and ``blocks`` (their memory).
"""
