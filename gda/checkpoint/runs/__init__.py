"""A training that survives: numbered checkpoints in the folder of a run.

Read in this order: ``run`` (the object), over ``metrics`` (numbers that the device still computes),
``removing`` (steps that are no longer kept) and ``resuming`` (the newest step that all processes
can read); ``follow`` (the steps of another program), ``overview`` (a run in lines).
"""
