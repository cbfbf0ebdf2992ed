"""Trees of host-local arrays to global arrays and back.

As in ``jax.experimental.multihost_utils``, but for any order of devices in the mesh, as long as the
blocks of each process form a regular grid.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gda.arrays.construction.from_process_local import BatchBuffers, array_from_process_local
from gda.arrays.dtypes import is_extended
from gda.arrays.global_array import GlobalArray
from gda.arrays.padded_array import PaddedArray
from gda.arrays.process_local import distinct_shards, local_array_of
from gda.arrays.transport.moving import reshard
from gda.layout.boundary import public, set_module
from gda.layout.spec import Index, Shape
from gda.layout.text import format_index, format_processes, join_some
from gda.mesh import check_mesh, is_tracer, processes_of
from gda.multihost.agreement import timeout_of_checks, together, user_location
from gda.multihost.descriptions import describe
from gda.multihost.meeting import DisagreementError, meet
from gda.trees.leaves import array_of, is_container, path_of
from gda.trees.specs import SPECS, Kind, map_with_specs

# The digest of each block's bytes, by path in the tree and index of the block.
Digests = dict[str, dict[str, str]]


@set_module("gda")
@public
def host_local_array_to_global_array(
    local_inputs: Any, global_mesh: Mesh, pspecs: Any, *, check_replicas: bool = False
) -> Any:
    """Return a tree of ``GlobalArray``s, built from the part that each process has.

    Each leaf is built by ``GlobalArray.from_process_local``: the data of a process is its distinct
    blocks side by side. NumPy data is copied once; shards of a ``jax.Array`` on the right devices
    are not copied. An array that is global already, with parts in other processes, is returned
    unchanged, whatever its mesh and spec.

    Communicates between processes only to check that they agree, with ``check_replicas`` or where
    ``gda.checking_agreement`` is on: then all processes of the mesh must call it. Call it outside
    ``jit``.

    Args:
      local_inputs: a pytree of arrays, PRNG keys and scalars.
      global_mesh: ``jax.sharding.Mesh`` over any devices in any order.
      pspecs: a ``PartitionSpec``, or a tree of them that is a prefix of ``local_inputs``.
      check_replicas: compare the blocks that several processes hold. Costs a digest of those
        blocks and a few small messages.

    Raises:
      ValueError: ``pspecs`` is no prefix, or has ``None`` for an array; a spec does not fit; the
        blocks of this process do not form a regular grid, or it has no device of the mesh. With a
        note of the leaf's path.
      TypeError: a dtype that JAX does not have, or something that is not a spec.
      DoesNotFitError: as in ``GlobalArray.from_callback``.
      DisagreementError: with ``check_replicas``, in every process: a block has different bytes in
        some. It names the leaf, the block and the processes, those in the minority first.
      LateProcessError: with ``check_replicas``: a process did not arrive in time.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> batch = {'tokens': np.zeros((16, 5), np.int32), 'step': np.int32(3)}
    >>> specs = {'tokens': P('x'), 'step': P()}
    >>> gda.host_local_array_to_global_array(batch, mesh, specs)['tokens']
    GlobalArray(shape=(16, 5), dtype=int32, mesh={'x': 4, 'y': 2}, spec=P('x'))
    """

    def work() -> tuple[Any, Digests]:
        result = place(local_inputs, global_mesh, pspecs, "pspecs", SPECS, _layout_of)
        return result, _digests(result, local_inputs, global_mesh) if check_replicas else {}

    name = "host_local_array_to_global_array"
    result, digests = together(
        name, global_mesh, work, lambda done: describe(done[0]), always=check_replicas
    )
    if check_replicas:
        _compare(digests, name, global_mesh)
    return result


@set_module("gda")
@public
def global_array_to_host_local_array(global_inputs: Any, global_mesh: Mesh, pspecs: Any) -> Any:
    """Return a tree of ``jax.Array``s, each the part of a global array in this process.

    Each is the distinct blocks of this process side by side, on their devices, over
    ``global_mesh.local_mesh``; nothing is copied. If the devices of this process do not form a
    subcube of the mesh, it is over a mesh of them with an axis ``'dim0'`` for dimension 0 if it is
    sharded, and so on, and an axis ``'replica'``. An array that only this process holds is returned
    unchanged.

    An array with another layout than ``pspecs`` is first moved by ``GlobalArray.reshard``, which
    communicates: then all processes of the mesh must call this.

    Args:
      global_inputs: a pytree of ``GlobalArray``s and ``jax.Array``s, PRNG keys too.
      global_mesh: ``jax.sharding.Mesh`` over any devices in any order.
      pspecs: a ``PartitionSpec``, or a tree of them that is a prefix of ``global_inputs``.

    Raises:
      ValueError: ``pspecs`` is no prefix, or has ``None`` for an array; a spec does not fit; the
        blocks of this process do not form a regular grid, or it has no device of the mesh. With a
        note of the leaf's path.
      TypeError: a leaf is a ``PaddedArray`` or no array, or something is not a spec.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('x',))
    >>> batch = gda.host_local_array_to_global_array({'tokens': np.arange(8)}, mesh, P('x'))
    >>> gda.global_array_to_host_local_array(batch, mesh, P('x'))['tokens'].tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    check_mesh(global_mesh)
    return map_with_specs(
        lambda leaf, spec: _to_local(leaf, global_mesh, spec), global_inputs, pspecs, "pspecs"
    )


def place(
    local_inputs: Any,
    mesh: Mesh,
    specs: Any,
    name: str,
    kind: Kind,
    layout_of: Callable[[Any, Any], tuple[PartitionSpec, Shape | None] | None],
) -> Any:
    """Return a tree of ``GlobalArray``s over ``mesh``, built from the part of this process.

    Args:
      specs: a prefix of ``local_inputs`` with leaves of ``kind``; ``name`` in the messages.
      layout_of: the spec and the global shape of a leaf with its entry of ``specs``; ``None`` for
        a shape to be inferred, and in place of both for a leaf that stays as it is.
    """

    def placed(leaf: Any, entry: Any) -> GlobalArray | PaddedArray:
        layout = layout_of(leaf, entry)
        if layout is None:
            return leaf if isinstance(leaf, PaddedArray) else GlobalArray.from_array(leaf)
        if getattr(leaf, "dtype", None) == jax.dtypes.float0:  # JAX's dtype for no gradient
            leaf = np.zeros(leaf.shape, np.bool_)
        return GlobalArray(array=array_from_process_local(leaf, mesh, *layout, batch=batch))

    check_mesh(mesh)
    with BatchBuffers(len(jax.tree.leaves(local_inputs))) as batch:
        return map_with_specs(placed, local_inputs, specs, name, kind)


def _layout_of(leaf: Any, spec: PartitionSpec) -> tuple[PartitionSpec, None] | None:
    return None if _is_global(leaf) else (spec, None)


def _is_global(leaf: Any) -> bool:
    """Return True if an array is over other processes too."""
    array = leaf.array if is_container(leaf) else leaf
    return isinstance(array, jax.Array) and not is_tracer(array) and not array.is_fully_addressable


def _to_local(leaf: Any, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    if isinstance(leaf, PaddedArray):
        raise TypeError(
            "the array is a PaddedArray, and its blocks without padding are no jax.Array; take "
            "them from p.local_shards, or side by side as NumPy from gda.global_to_host_array"
        )
    array = array_of(leaf)
    if array.is_fully_addressable:
        return array
    if not array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim):
        array = reshard(array, mesh, spec)
    return local_array_of(array, mesh, spec)


# Blocks that several processes hold.


def _digests(result: Any, local_inputs: Any, mesh: Mesh) -> Digests:
    """Return digests of the blocks built here that other processes hold too."""
    given, structure = jax.tree.flatten(local_inputs, is_leaf=is_container)
    digests: Digests = {}
    for number, (leaf, built) in enumerate(
        zip(given, structure.flatten_up_to(result), strict=True)
    ):
        if not _is_global(leaf):
            of_blocks = {format_index(index): _digest(data) for index, data in _shared(built, mesh)}
            if of_blocks:
                digests[path_of(local_inputs, number)] = of_blocks
    return digests


def _shared(built: GlobalArray, mesh: Mesh) -> Iterator[tuple[Index, jax.Array]]:
    """Yield the distinct blocks of this process that others hold too."""
    grid = built.grid
    mine = processes_of(mesh).process_of == jax.process_index()
    shared = set(np.intersect1d(grid.block_ids[mine], grid.block_ids[~mine]).tolist())
    for block, data in distinct_shards(built.array, grid).items():
        if block in shared:
            yield grid.block_index(block), data


def _digest(block: Any) -> str:
    if is_extended(block.dtype):
        block = jax.random.key_data(block)
    return blake2b(np.ascontiguousarray(block).tobytes(), digest_size=16).hexdigest()


def _compare(digests: Digests, name: str, mesh: Mesh) -> None:
    """Raise ``DisagreementError`` in all processes of the mesh unless their blocks are the same."""
    processes = processes_of(mesh).numbers
    if processes == (jax.process_index(),) or jax.process_index() not in processes:
        return
    what = f"{name} ({user_location()})"
    said = meet(
        json.dumps(digests).encode(),
        judge_replicas,
        kind="replicas",
        what=what,
        timeout=timeout_of_checks(),
        processes=processes,
    )
    if said:
        raise DisagreementError(f"{what}: {said.decode()}")


def judge_replicas(payloads: dict[int, bytes]) -> bytes:
    """Return a text of the blocks that differ between processes; empty if none does.

    Args:
      payloads: by process, JSON of ``Digests``.

    >>> said = {0: b'{"[0]": {"[:]": "a"}}', 1: b'{"[0]": {"[:]": "b"}}'}
    >>> judge_replicas(said)[:60]
    b'blocks that several processes hold differ: at [0], block [:]'
    """
    holders: dict[tuple[str, str], dict[str, list[int]]] = {}
    for process, payload in sorted(payloads.items()):
        for path, of_blocks in json.loads(payload).items():
            for index, digest in of_blocks.items():
                holders.setdefault((path, index), {}).setdefault(digest, []).append(process)
    differences = []
    for (path, index), by_digest in holders.items():
        if len(by_digest) > 1:
            groups = [format_processes(group) for group in sorted(by_digest.values(), key=len)]
            block = f"at {path}, block {index}" if path else f"block {index}"
            differences.append(f"{block}: {', and other bytes in '.join(groups)}")
    if not differences:
        return b""
    return (
        f"blocks that several processes hold differ: {join_some(differences)}. Give every process "
        "the same data there, or shard the array over the processes"
    ).encode()
