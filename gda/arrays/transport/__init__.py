"""Moving blocks: between devices, between processes, and to the host.

Read in this order: ``moving`` (reshard and gather) over ``carrying`` (between any devices; its
copies are in ``staging``) and ``exchanging`` (from host to host); ``to_host`` (copies to the host,
ahead of use).
"""
