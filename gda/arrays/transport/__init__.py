"""Moving blocks: between devices, between processes, and to the host.

Read in this order: ``moving`` (reshard and gather) over ``carrying`` (between any devices) and
``staging`` (its copies); ``reading_once`` (each byte read by one process) over ``exchanging``;
``to_host`` (copies to the host, ahead of use).
"""
