"""Numbered checkpoints of a training: ``run`` (the object), over ``keeper`` and ``resuming``."""
