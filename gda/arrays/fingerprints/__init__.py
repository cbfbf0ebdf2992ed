"""Fingerprints of values, computed on the devices that hold them.

Read in this order: ``formula``, ``on_devices`` (the sums of each block), ``fingerprint`` (of an
array), ``replica_sums`` (of every replica).
"""
