"""A tree as records (``recorded_tree``, ``saved_leaves``), matched to a layout (``requests``)."""
