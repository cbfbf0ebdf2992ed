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


def test_the_document_of_an_array() -> None:
    array = plan_array((8, 2), np.dtype(np.float32), {"x": 4, "y": 2}, ("x",), 2, pad=False)
    document = document_of(array, [1, 3], [(5, 1)])
    processes, elements = document.pop("processes"), document.pop("elements")
    assert document == {
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
    assert [process["process"] for process in processes] == [1, 3]
    assert processes[0] == {
        "process": 1,
        "nbytes_on_devices": 32,
        "nbytes_read": 16,
        "nbytes_written": 16,
        "num_blocks": 1,
        "num_blocks_written": 1,
        "num_devices": 2,
        "blocks": [{"block": 1, "index": [[2, 4], [0, 2]], "is_written": True}],
        "devices": [
            {"device": 2, "coordinates": [1, 0], "block": 1, "replica_id": 0},
            {"device": 3, "coordinates": [1, 1], "block": 1, "replica_id": 1},
        ],
    }
    assert elements == [
        {
            "element": [5, 1],
            "block": 2,
            "index": [[4, 6], [0, 2]],
            "offset": [1, 1],
            "num_devices": 2,
            "devices": [
                {"device": 4, "coordinates": [2, 0], "process": 2, "replica_id": 0},
                {"device": 5, "coordinates": [2, 1], "process": 2, "replica_id": 1},
            ],
        }
    ]


def test_a_document_lists_some_of_many_devices() -> None:
    mesh = {"x": 2**16, "y": 4}
    array = plan_array((2**16, 4), INT16, mesh, ("x",), None, pad=False)
    (process,) = document_of(array, [0], [])["processes"]
    assert process["num_devices"] == 2**18
    assert process["num_blocks"] == process["num_blocks_written"] == 2**16
    assert len(process["devices"]) == len(process["blocks"]) == 16_384
