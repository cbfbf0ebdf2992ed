"""The part of a global array in this process."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gda
from gda.arrays.process_local import distinct_shards
from gda.mesh import grid_of, view_of


def test_shards_come_once_by_the_number_of_their_block() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    value = np.arange(8.0).reshape(4, 2)
    g = gda.GlobalArray.from_callback((4, 2), mesh, P("y"), lambda index: value[index])
    shards = distinct_shards(g.array, grid_of((4, 2), mesh, P("y")))
    assert list(shards) == [0, 1]
    np.testing.assert_array_equal(np.concatenate([*shards.values()]), value)
    first_devices = [shard.data.devices() for shard in g.local_shards if shard.replica_id == 0]
    assert [data.devices() for data in shards.values()] == first_devices


@pytest.mark.processes(2, devices=4)
def test_each_process_has_its_own_blocks_in_device_order() -> None:
    mesh = Mesh(np.array(jax.devices())[[0, 5, 1, 4, 6, 2, 7, 3]], ("x",))
    value = np.arange(16.0)
    g = gda.GlobalArray.from_callback((16,), mesh, P("x"), lambda index: value[index])
    shards = distinct_shards(g.array, grid_of((16,), mesh, P("x")))
    assert tuple(shards) == view_of((16,), mesh, P("x")).block_ids
    assert list(shards) == ([0, 2, 5, 7] if jax.process_index() == 0 else [1, 3, 4, 6])
    for block, data in shards.items():
        np.testing.assert_array_equal(data, value[2 * block : 2 * block + 2])
