"""Fingerprints of values, computed on the devices that hold them.

Read in this order: ``formula``, ``on_devices`` (the sums of each block), ``sums`` (a value for
them), ``fingerprint`` (of an array), ``replicas`` (the sums of every replica).
"""
