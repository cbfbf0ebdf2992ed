"""The blocks that move when an array changes its layout, and the devices that send them.

Provisional: see ``docs/stable.md``.

Read in this order: ``overlaps`` (of the blocks of two tilings), ``lanes`` (the numbers by which a
process finds its pieces), ``flow`` (which device sends how much to which), ``plan``
(``ReshardPlan``), ``rounds`` (the order in which pieces travel).
"""
