"""Devices that are not here, and the meshes over them.

Read in this order: ``rehearsal_mesh`` (``gda.rehearsal_mesh``), ``tpus`` and ``gpus`` (the devices
of a topology, which their compilers describe), ``without_hardware`` (the environment of these
compilers), ``cudnn_attention`` (traced without a card).
"""
