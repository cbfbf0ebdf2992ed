"""The document of ``gda plan --json`` for one array, compared with the elements of the array."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from trials import rarely

from gda.layout.spec import axes_by_dimension
from gda.planning.planned_array import plan_array
from gda.testing.strategies import ShardedCase, mesh_shapes, sharded_cases

INT16 = np.dtype(np.int16)


@rarely(2)
@given(sharded_cases(mesh_shapes(max_devices=12)), st.data())
def test_a_document_has_the_blocks_and_bytes_of_all_devices(
    case: ShardedCase[dict[str, int]], data: st.DataObject
) -> None:
    shape = data.draw(st.tuples(*[st.integers(0, 13)] * len(case.global_shape)))
    count = math.prod(case.mesh.values())
    per_process = data.draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    array = plan_array(shape, INT16, case.mesh, tuple(case.spec), per_process, pad=True)
    document = array.document()

    axes = axes_by_dimension(case.spec, len(shape), case.mesh)
    ways = [math.prod(case.mesh[name] for name in names) for names in axes]
    blocks = [math.ceil(size / way) for size, way in zip(shape, ways, strict=True)]
    assert document["shard_shape"] == blocks
    assert document["padded_shape"] == [b * w for b, w in zip(blocks, ways, strict=True)]
    held = count * math.prod(blocks) * 2
    whole = math.prod(shape) * 2 * document["num_replicas"]
    assert (document["nbytes_on_devices"], document["nbytes_padding"]) == (held, held - whole)
    assert math.isclose(document["percent_padding"], 100 * (held - whole) / max(whole, 1))

    # The bytes that a process reads are those of the elements of its blocks, each once.
    reads = []
    for process in range(count // per_process):
        read = np.zeros(shape, bool)
        for position in range(process * per_process, (process + 1) * per_process):
            read[(..., *array.grid.index(position))] = True
        reads.append(2 * read.sum())
    assert document["nbytes_distinct_per_process"] == [min(reads), max(reads)]


def test_the_document_of_an_array() -> None:
    array = plan_array((8, 2), np.dtype(np.float32), {"x": 4, "y": 2}, ("x",), 2, pad=False)
    assert array.document() == {
        "shape": [8, 2],
        "dtype": "float32",
        "itemsize": 4,
        "nbytes": 64,
        "mesh": {"x": 4, "y": 2},
        "spec": ["x"],
        "shard_shape": [2, 2],
        "padded_shape": [8, 2],
        "num_devices": 8,
        "num_shards": 4,
        "num_replicas": 2,
        "num_processes": 4,
        "devices_per_process": 2,
        "nbytes_per_device": 16,
        "nbytes_per_process": 32,
        "nbytes_on_devices": 128,
        "nbytes_padding": 0,
        "percent_padding": 0.0,
        "notes": [],
        "nbytes_distinct_per_process": [16, 16],
    }
