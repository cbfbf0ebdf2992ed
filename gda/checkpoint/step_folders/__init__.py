"""The numbered steps in the folder of a run, which one process lists.

Read in this order: ``rules`` (the steps to save, to keep and to call best, on integers), ``folder``
(names, listing and small files), ``references`` (the step that ``runs/a@latest`` names).
"""
