"""``GlobalArray`` and ``PaddedArray``: constructors, moves, fingerprints and pickles.

Read in this order: ``global_array`` (the container), ``shard`` (its block on one device),
``operators``; ``padded_array`` (the container for any shape); ``constructors`` over
``from_callbacks``, ``from_sources`` and ``from_process_local`` over ``placing`` (the devices of
each block), ``blocks`` (their memory), ``narrowing`` (their dtype) and ``bits`` (which moves on a
device keep); ``reading_once`` over ``exchanging`` (what processes read for each other); ``moving``
(reshard, gather)
over ``carrying`` (between any devices), ``staging`` (its copies) and ``to_host`` (copies to the
host, ahead of use), ``process_local`` (back to the host's part), ``fingerprint`` over
``block_sums`` (of each block, on its device), ``replica_sums`` (of every replica), ``addresses``
(buffers that arrays share), ``liveness`` (errors of arrays without data), ``pickling``,
``libraries`` (flax, treescope, einops).
"""
