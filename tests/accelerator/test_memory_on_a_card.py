"""``gda.memory`` against what an accelerator says of its memory."""

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gda
from gda.trees.live_arrays import device_name


def test_the_report_agrees_with_the_device(one_mesh: Mesh, card: Any, on_card: bool) -> None:
    gc.collect()  # or arrays of other tests would go meanwhile
    jax.device_put(np.float32(0), card).block_until_ready()
    side = 8192 if on_card else 256
    before = (card.memory_stats() or {}).get("bytes_in_use")
    array = jax.device_put(np.ones((side, side), np.float32), NamedSharding(one_mesh, P("x")))
    jax.block_until_ready(array)
    report = gda.memory(params={"w": array})
    (row,) = [row for row in report.arrays if row.names]
    assert (row.names, row.nbytes) == (("params/w",), array.nbytes)
    (device,) = [each for each in report.devices if each.by_tree.get("params")]
    assert device.by_tree["params"] == array.nbytes
    stats = card.memory_stats() or {}
    assert (device.bytes_in_use, device.bytes_limit) == (
        stats.get("bytes_in_use"),
        stats.get("bytes_limit"),
    )
    if on_card:
        assert before is not None
        assert abs(stats["bytes_in_use"] - before - array.nbytes) <= 2**20
        assert device.nbytes <= stats["bytes_in_use"] < stats["bytes_limit"]


def test_the_table_after_an_error_of_full_memory(one_mesh: Mesh, card: Any) -> None:
    # Larger than what other tests may have left: the table has the largest arrays.
    params = jax.device_put({"w": np.ones(2**22, np.float32)}, NamedSharding(one_mesh, P("x")))
    limit = (card.memory_stats() or {}).get("bytes_limit", 2**50)
    with (
        jax.default_device(card),
        pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"),
    ):
        jnp.zeros((limit // 2**20 + 1024, 2**20), np.uint8).block_until_ready()
    table = str(gda.memory(params=params))
    assert "params/w" in table
    assert device_name(card) in table
    # The device works on.
    assert float(params["w"].sum()) == 2**22
