"""Trees into files and targets: ``store``, ``save_safetensors``, over ``written_leaves``."""
