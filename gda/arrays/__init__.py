"""``GlobalArray``, and all that makes one, moves it, compares it or pickles it.

To read in this order: ``global_array`` (the container), ``shard`` (its part on one device),
``operators``; ``constructors`` over ``from_callbacks``, ``from_sources`` and ``from_process_local``
over ``placing`` (which blocks go onto which devices), ``blocks`` (whose memory) and ``narrowing``
(which dtype); ``moving`` (reshard, gather) over ``to_host`` (device blocks to the host, ahead of
use), ``process_local`` (back to the host's part), ``fingerprint`` over ``block_sums`` (of each
block, on its device), ``pickling``, ``libraries`` (flax, treescope, einops).
"""
