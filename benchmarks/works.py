"""All that is measured, in the order of the report."""

from benchmarks import (
    building,
    checkpoints,
    hosts,
    index_math,
    loading,
    pictures,
    resharding,
    using,
)

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
