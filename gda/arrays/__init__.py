"""``GlobalArray`` and ``PaddedArray``: constructors, moves, fingerprints and pickles.

Read in this order: ``container`` (the base of both), ``shard`` (its block on one device),
``global_array`` (operators), ``padded_array`` (for any shape); ``construction``, ``transport``
(reshard, gather) and ``fingerprints``, whose functions their methods call. All of them use
``process_local`` (the blocks of this process), ``dtypes`` (the types of elements), ``buffers``
(aligned memory), ``bits`` (moves on a device that keep the bits of NaNs) and ``liveness`` (errors
of arrays without data). ``pickling`` stands beside.
"""
