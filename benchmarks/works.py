"""All that is measured, in the order of the report."""

from benchmarks import building, hosts, index_math, using

WORKS = [*index_math.WORKS, *building.WORKS, *using.WORKS, *hosts.WORKS]
DEVICE_COUNTS = sorted({work.devices for work in WORKS})  # more than 1,024 abort in XLA
