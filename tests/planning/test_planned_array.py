"""The plan of one array, compared with the elements of the array."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from trials import rarely

from gda.layout.spec import axes_by_dimension
from gda.planning.planned_array import PlannedArray, distinct_of, planned_grid
from gda.testing.strategies import ShardedCase, mesh_shapes, sharded_cases

INT16 = np.dtype(np.int16)


@rarely(2)
@given(sharded_cases(mesh_shapes(max_devices=12)), st.data())
def test_a_plan_has_the_blocks_and_bytes_of_all_devices(
    case: ShardedCase[dict[str, int]], data: st.DataObject
) -> None:
    shape = data.draw(st.tuples(*[st.integers(0, 13)] * len(case.global_shape)))
    count = math.prod(case.mesh.values())
    per_process = data.draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    grid = planned_grid(shape, INT16, case.mesh, tuple(case.spec), pad=True)
    array = PlannedArray(grid, INT16)
    axes = axes_by_dimension(case.spec, len(shape), case.mesh)
    ways = [math.prod(case.mesh[name] for name in names) for names in axes]
    blocks = [math.ceil(size / way) for size, way in zip(shape, ways, strict=True)]
    assert grid.shard_shape == tuple(blocks)
    assert grid.padded_shape == tuple(b * w for b, w in zip(blocks, ways, strict=True))
    held = count * math.prod(blocks) * 2
    whole = math.prod(shape) * 2 * grid.num_replicas
    assert (array.block_bytes * count, array.padding.nbytes) == (held, held - whole)
    assert math.isclose(array.padding.percent, 100 * (held - whole) / max(whole, 1))

    # The elements that a process reads are those of its blocks, each once.
    reads = []
    for process in range(count // per_process):
        read = np.zeros(shape, bool)
        for position in range(process * per_process, (process + 1) * per_process):
            read[(..., *grid.index(position))] = True
        reads.append(read.sum())
    assert distinct_of(grid, per_process).elements.tolist() == reads
