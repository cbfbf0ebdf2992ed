"""Data of one host to global arrays: ``partitions``, ``host_local``, ``prefetch``."""
