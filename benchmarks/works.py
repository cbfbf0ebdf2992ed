"""All that is measured, in the order of the report."""

from benchmarks.arrays import building, using
from benchmarks.checkpoint import checkpoints
from benchmarks.layout import index_math, resharding
from benchmarks.show import pictures
from benchmarks.trees import hosts, loading

WORKS = [
    *index_math.WORKS,
    *building.WORKS,
    *loading.WORKS,
    *using.WORKS,
    *hosts.WORKS,
    *checkpoints.WORKS,
    *pictures.WORKS,
    *resharding.WORKS,
]
DEVICE_COUNTS = sorted({work.devices for work in WORKS})  # more than 1,024 abort in XLA
