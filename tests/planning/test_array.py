"""The document of ``gda plan --json`` for one array, compared with the elements of the array."""

import math
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from trials import rarely

from gda.layout.spec import axes_by_dimension
from gda.planning.array import document_of
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
    sides = [st.integers(0, size - 1) for size in shape]
    elements = [] if 0 in shape else [data.draw(st.tuples(*sides))]
    document = document_of(array, range(count // per_process), elements)

    axes = axes_by_dimension(case.spec, len(shape), case.mesh)
    ways = [math.prod(case.mesh[name] for name in names) for names in axes]
    blocks = [math.ceil(size / way) for size, way in zip(shape, ways, strict=True)]
    assert document["shard_shape"] == blocks
    assert document["padded_shape"] == [b * w for b, w in zip(blocks, ways, strict=True)]
    held = count * math.prod(blocks) * 2
    whole = math.prod(shape) * 2 * document["num_replicas"]
    assert (document["nbytes_on_devices"], document["nbytes_padding"]) == (held, held - whole)
    assert math.isclose(document["percent_padding"], 100 * (held - whole) / max(whole, 1))

    # Every element is written once, and the bytes are those of the elements.
    written, reads, holders = np.zeros(shape, int), [], []
    replicas: Counter[int] = Counter()
    places = [*np.ndindex(*case.mesh.values())]
    for process in document["processes"]:
        read, nbytes = np.zeros(shape, bool), 0
        indices = {}
        for block in process["blocks"]:
            index = tuple(slice(*bounds) for bounds in block["index"])
            indices[block["block"]] = index
            read[index] = True
            written[index] += block["is_written"]
            nbytes += 2 * read[index].size * block["is_written"]
        for device in process["devices"]:
            position, block = len(holders), device["block"]
            assert (device["device"], tuple(device["coordinates"])) == (position, places[position])
            assert device["replica_id"] == replicas[block]
            replicas[block] += 1
            expected, found = np.zeros(shape, bool), np.zeros(shape, bool)
            expected[(..., *array.grid.index(position))] = found[(..., *indices[block])] = True
            assert (expected == found).all()
            holders.append(found)
        assert (process["nbytes_read"], process["nbytes_written"]) == (2 * read.sum(), nbytes)
        reads.append(2 * read.sum())
    assert document["nbytes_distinct_per_process"] == [min(reads), max(reads)]
    assert (written == 1).all()
    for element, about in zip(elements, document["elements"], strict=True):
        found = [device["device"] for device in about["devices"]]
        assert found == [i for i, holder in enumerate(holders) if holder[element]]
        starts = [start for start, _ in about["index"]]
        assert tuple(map(sum, zip(starts, about["offset"], strict=True))) == element
