"""Moving blocks: between devices, between processes, and to the host.

Read in this order: ``moving`` (reshard and gather) over ``carrying`` (between any devices; its
copies are in ``staging``) and ``exchanging`` (from host to host); ``source_blocks`` (blocks
that are read when they are needed); ``to_host`` (copies and reads of blocks, ahead of use);
``connection`` (messages and blocks between two programs) and ``listening`` (a server of them).
"""
