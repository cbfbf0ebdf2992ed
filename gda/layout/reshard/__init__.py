"""The blocks that move when an array changes its layout, and the devices that send them.

To read in this order: ``pieces`` (the overlaps of two tilings), ``process_boxes`` (what processes
share with boxes), ``shares`` (equal shares of what several devices could send), ``flow`` (from
which device), ``plan`` (``ReshardPlan``).
"""
