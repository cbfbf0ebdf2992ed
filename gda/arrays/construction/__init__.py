"""Building an array: the blocks of this process, from callbacks, sources, or data that it has.

Read in this order: ``from_callbacks``, ``from_process_local``; ``reading`` (the reads of many
arrays in one run), ``reading_once`` (each byte read by one process), ``reading_by_rows`` (tensors
of files); under them ``filling`` (boxes of a source into blocks), ``pending`` (an array while it is
read), ``blocks`` (their memory) and ``placing`` (the devices of each block).
"""
