"""Runs of Orbax, read without Orbax.

Read in this order: ``metadata`` (the tree, from the text of the files), ``run_folder`` (the folder
or store of a run and of its items), ``open_orbax`` (sources for the arrays).
"""
