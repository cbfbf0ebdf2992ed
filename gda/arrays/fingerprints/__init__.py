"""Fingerprints of values, computed on the devices that hold them.

Read in this order: ``formula``, ``on_devices`` and ``on_host`` (the sums of each block),
``fingerprint`` (of an array), ``replica_sums`` (of every replica).
"""
