"""What moves when an array changes its layout, and from which device.

To read in this order: ``pieces`` (the overlaps of two tilings), ``process_boxes`` (what processes
share with boxes), ``shares`` (equal shares of what several devices could send), ``flow`` (from
which device), ``plan`` (``ReshardPlan``).
"""
