"""gda: sharded arrays outside ``jit``.

A ``GlobalArray`` is a thin container over one ``jax.Array`` and knows the part of the whole that
every device holds. Build it from an array, a file or a callback, compute on it like on any array,
and read it shard by shard. The names come in the order in which a user meets them; those of other
libraries for the same things come last.
"""

from importlib import import_module
from typing import Any

from gda.layout.distribution import DISTRIBUTION

# A table of contents that loads nothing: a name's module is imported when the name is first used,
# so that the index math runs without importing JAX. Type checkers read __init__.pyi.
_MODULE_OF = {
    # Build an array and look at it.
    "GlobalArray": "gda.arrays.global_array",
    "PaddedArray": "gda.arrays.padded_array",
    "load_tree": "gda.trees.load",
    "local_rows": "gda.mesh",
    "prefetch": "gda.trees.batches.prefetch",
    "Prefetched": "gda.trees.batches.prefetch",
    "Shard": "gda.arrays.shard",
    "Index": "gda.layout.spec",
    "to_numpy": "gda.trees.plain",
    "to_jax": "gda.trees.plain",
    "fingerprint": "gda.trees.digests",
    "show": "gda.show",
    "memory": "gda.trees.live_arrays",
    "MemoryReport": "gda.show.memory_report",
    "ArrayMemory": "gda.show.memory_report",
    "DeviceMemory": "gda.show.memory_report",
    "layouts": "gda.trees.layouts",
    "assert_sharded": "gda.trees.layouts",
    "Layouts": "gda.trees.layouts",
    "ArrayLayout": "gda.trees.layouts",
    "storage": "gda.storage",
    "Retry": "gda.storage.options",
    "aligned_empty": "gda.arrays.buffers",
    "DoesNotFitError": "gda.storage.casts",
    "LayoutUnknownError": "gda.mesh",
    # Compute.
    "jit": "gda.trees.jit",
    "constrain": "gda.trees.jit",
    "collectives": "gda.compiled.collectives",
    "assert_collectives": "gda.compiled.collectives",
    "Collectives": "gda.compiled.hlo",
    "Collective": "gda.compiled.hlo",
    "Traffic": "gda.compiled.hlo",
    # Move, save, and exchange with other programs.
    "reshard_tree": "gda.trees.resharding",
    "offer": "gda.exchange.offering",
    "Offer": "gda.exchange.offering",
    "pull": "gda.exchange.pulling",
    "checkpoint": "gda.checkpoint",
    "store": "gda.trees.files.store",
    # Many processes.
    "launch": "gda.launch",
    "check_processes_agree": "gda.multihost.agreement",
    "checking_agreement": "gda.multihost.agreement",
    "DisagreementError": "gda.multihost.meeting",
    "LateProcessError": "gda.multihost.meeting",
    "check_replicas_agree": "gda.trees.replicas",
    "ReplicaMismatch": "gda.trees.replicas",
    "ReplicaMismatchError": "gda.trees.replicas",
    # Plan without devices.
    "ShardGrid": "gda.layout.grid",
    "ProcessView": "gda.layout.process_view",
    "Processes": "gda.layout.processes",
    "ReshardPlan": "gda.layout.reshard.plan",
    "Move": "gda.layout.reshard.plan",
    # Rehearse on devices that are not here.
    "rehearsal_mesh": "gda.compiled.topologies.rehearsal_mesh",
    "abstract": "gda.compiled.abstract",
    "rehearse": "gda.compiled.rehearse",
    "assert_fits": "gda.compiled.rehearse",
    "Rehearsal": "gda.compiled.rehearsal",
    "AxisTraffic": "gda.compiled.rehearsal_facts",
    "StepSeconds": "gda.compiled.seconds",
    "PlaceSeconds": "gda.compiled.seconds",
    "MeasuredRange": "gda.compiled.devices.measured_steps",
    "Timeline": "gda.compiled.device_clock",
    "TimelineEvent": "gda.compiled.device_clock",
    "Temporary": "gda.compiled.hlo.allocations",
    "ArgumentBytes": "gda.compiled.rehearsal_facts",
    "Advice": "gda.compiled.report.advice",
    "CheckpointInterval": "gda.compiled.checkpoint_interval",
    # Test, and read code of others.
    "testing": "gda.testing",
    "compat": "gda.compat",
    # The names of GlobalDeviceArray.
    "get_shard_shape": "gda.mesh",
    "get_shard_indices": "gda.mesh",
    "get_shard_indices_replica_ids": "gda.mesh",
}

# Public too, but not listed: types of results and options, which are documented with their
# functions, and names for code that comes from other libraries.
_UNLISTED = {
    "compat",
    "Prefetched",
    "Index",
    "MemoryReport",
    "ArrayMemory",
    "DeviceMemory",
    "Layouts",
    "ArrayLayout",
    "Retry",
    "Collectives",
    "Collective",
    "Traffic",
    "Offer",
    "ReplicaMismatch",
    "Processes",
    "Move",
    "Rehearsal",
    "AxisTraffic",
    "StepSeconds",
    "PlaceSeconds",
    "MeasuredRange",
    "Timeline",
    "TimelineEvent",
    "Temporary",
    "ArgumentBytes",
    "Advice",
    "CheckpointInterval",
}

_MODULES = {"checkpoint", "compat", "launch", "show", "storage", "testing"}

# Names that JAX had for the same in 2022.
_SUCCESSOR_OF = {"GlobalDeviceArray": "GlobalArray", "pjit": "jit"} | {
    name: f"compat.{name}"
    for name in (
        *("host_local_array_to_global_array", "global_array_to_host_local_array"),
        *("host_to_global_device_array", "global_to_host_array"),
        *("with_sharding_constraint", "DataPartitionType"),
    )
}

__all__ = [name for name in _MODULE_OF if name not in _UNLISTED]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        # Here, because importlib.metadata takes longer to import than all of the above.
        return import_module("importlib.metadata").version(DISTRIBUTION)
    if name not in _MODULE_OF:
        from gda.layout.text import near_name

        successor = _SUCCESSOR_OF.get(name)
        hint = f"; its successor is gda.{successor}" if successor else near_name(name, _MODULE_OF)
        raise AttributeError(f"module 'gda' has no attribute {name!r}{hint}")
    module = import_module(_MODULE_OF[name])
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
