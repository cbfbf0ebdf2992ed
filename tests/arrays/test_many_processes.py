"""Arrays in several real processes, over every order of 8 devices."""

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec
from meshes import ORDERS, batch, cut, is_right, ordered_mesh

import gda
from gda.layout.grid import ShardGrid
from gda.layout.spec import Index

P = PartitionSpec
DATA = batch(16, 8)

SPECS = [P("x"), P("x", "y"), P(("y", "x")), P(None, "y"), P()]

# Every constructor.


def from_batched(mesh: Mesh, spec: Any) -> gda.GlobalArray:
    return gda.GlobalArray.from_batched_callback(
        DATA.shape, mesh, spec, lambda indices: [DATA[index] for index in indices]
    )


def from_batched_with_devices(mesh: Mesh, spec: Any) -> gda.GlobalArray:
    return gda.GlobalArray.from_batched_callback_with_devices(
        DATA.shape,
        mesh,
        spec,
        lambda request: [jax.device_put(DATA[i], d) for i, devices in request for d in devices],
    )


def from_buffers(mesh: Mesh, spec: Any) -> gda.GlobalArray:
    index_of = gda.get_shard_indices(DATA.shape, mesh, spec)
    # In the order of the mesh, which `mesh.local_devices` has too.
    buffers = [jax.device_put(DATA[index_of[d]], d) for d in mesh.local_devices]
    return gda.GlobalArray(DATA.shape, mesh, spec, buffers)


def from_process_local(mesh: Mesh, spec: Any) -> gda.GlobalArray:
    # Of the whole, whose blocks need not form a regular grid.
    return gda.GlobalArray.from_process_local(DATA, mesh, spec, DATA.shape)


CONSTRUCTORS = {
    "from_callback": partial(cut, DATA),
    "from_batched_callback": from_batched,
    "from_batched_callback_with_devices": from_batched_with_devices,
    "from_process_local": from_process_local,
    "GlobalArray": from_buffers,
}


@pytest.mark.processes(2, devices=4)
@pytest.mark.parametrize("construct", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_each_process_holds_its_part(construct: Callable[..., gda.GlobalArray]) -> None:
    kinds, orders = cycle([AxisType.Auto, AxisType.Explicit]), cycle(ORDERS.values())
    # All constructors have their blocks from one layout, so that one of them shows every order.
    times = len(ORDERS) if construct is CONSTRUCTORS["from_callback"] else 1
    for spec in SPECS * times:
        mesh = ordered_mesh(next(orders), {"x": 4, "y": 2}, next(kinds))
        g = construct(mesh, spec)
        assert not g.is_fully_addressable
        assert {shard.device for shard in g.local_shards} == set(mesh.local_devices)
        assert is_right(g, DATA)
        replicas = [{s.device: s.replica_id for s in x.addressable_shards} for x in (g, g.array)]
        assert replicas[0] == replicas[1]
        for shard in g.global_shards:
            is_mine = shard.device.process_index == jax.process_index()
            assert (shard.data is not None) == is_mine


@pytest.mark.processes(4, devices=2)
def test_each_distinct_block_is_read_once_in_each_process() -> None:
    for order, spec in zip(cycle(ORDERS.values()), SPECS, strict=False):
        mesh = ordered_mesh(order, {"x": 4, "y": 2})
        reads: list[Index] = []

        def read(index: Index, reads: list[Index] = reads) -> np.ndarray:
            reads.append(index)
            return DATA[index]

        gda.GlobalArray.from_callback(DATA.shape, mesh, spec, read)
        process_of = [device.process_index for device in mesh.devices.flat]
        grid = ShardGrid(DATA.shape, mesh.shape, spec, process_of=process_of)
        assert reads == grid.view(jax.process_index()).indices
