"""Fingerprints and sums of replicas on an accelerator: those of CPU devices and of NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import DTYPES, normal, random_bits

import gda
from gda.arrays.fingerprints.on_host import SMALL

# With a rest after the last whole row, and too large for the sums to be those of NumPy.
SHAPE = (3, SMALL // 6 + 77, 3)


def test_digests_are_those_of_numpy_and_of_cpu_devices(
    one_mesh: Mesh, cpu_mesh: Mesh, on_card: bool
) -> None:
    # On CPU devices other tests have the other dtypes, and each compiles for seconds.
    few = [np.dtype(each) for each in (ml_dtypes.int4, ml_dtypes.bfloat16)]
    for dtype in DTYPES if on_card else few:
        data = random_bits(SHAPE, dtype)
        expected = gda.fingerprint(data)
        for mesh in (one_mesh, cpu_mesh) if dtype in few else (one_mesh,):
            array = jax.device_put(data, NamedSharding(mesh, P()))
            assert gda.fingerprint(array) == expected, (dtype, mesh)


def test_the_digest_of_keys_is_that_of_cpu_devices(one_mesh: Mesh, cpu_mesh: Mesh) -> None:
    keys = jax.random.split(jax.random.key(0), SMALL)
    digests = {
        gda.fingerprint(jax.device_put(keys, NamedSharding(mesh, P("x"))))
        for mesh in (one_mesh, cpu_mesh)
    }
    assert len(digests) == 1


def test_one_changed_bit_changes_the_digest(one_mesh: Mesh) -> None:
    data = random_bits(SHAPE, jnp.bfloat16)
    sharding = NamedSharding(one_mesh, P())
    before = gda.fingerprint(jax.device_put(data, sharding))
    data.view(np.uint16)[-1, -1, -1] ^= 1
    assert gda.fingerprint(jax.device_put(data, sharding)) != before


def test_replicas_are_compared_beside_arrays_on_the_card(one_mesh: Mesh, cpu_mesh: Mesh) -> None:
    data = normal((64, 512))
    tree = {
        "card": jax.device_put(data, NamedSharding(one_mesh, P())),
        "cpu": jax.device_put(data, NamedSharding(cpu_mesh, P("x"))),
    }
    gda.check_replicas_agree(tree)
    parts = [np.array(shard.data) for shard in tree["cpu"].addressable_shards]
    parts[-1][0, 0] += 1
    buffers = [jax.device_put(*each) for each in zip(parts, cpu_mesh.devices.flat, strict=True)]
    tree["cpu"] = jax.make_array_from_single_device_arrays(
        data.shape, tree["cpu"].sharding, buffers
    )
    with pytest.raises(gda.ReplicaMismatchError, match="cpu"):
        gda.check_replicas_agree(tree)
