"""gda: sharded arrays outside ``jit``.

A ``GlobalArray`` is a thin container over one ``jax.Array`` and knows, for every device, which part
of the whole it holds. It is built block by block from callbacks, computed on like any array, and
read shard by shard. Everything below comes in the order in which one meets it.
"""

from importlib import import_module
from typing import Any

# A table of contents that loads nothing: a name's module is imported when the name is first used,
# so that the index math runs without importing JAX. Type checkers read __init__.pyi.
_MODULE_OF = {
    "GlobalArray": "gda.array",
    "Shard": "gda.array",
    "aligned_empty": "gda.buffers",
    "DoesNotFitError": "gda.blocks",
    "load_tree": "gda.load",
    "Retry": "gda.reading",
    "to_numpy": "gda.numpy_tree",
    "jit": "gda.transform",
    "constrain": "gda.transform",
    "host_to_global_array": "gda.placement",
    "host_to_global_device_array": "gda.placement",
    "global_to_host_array": "gda.placement",
    "with_sharding_constraint": "gda.placement",
    "DataPartitionType": "gda.placement",
    "host_local_array_to_global_array": "gda.host_local",
    "global_array_to_host_local_array": "gda.host_local",
    "store": "gda.storing",
    "store_tree": "gda.storing",
    "get_shard_shape": "gda.indices",
    "get_shard_indices": "gda.indices",
    "get_shard_indices_replica_ids": "gda.indices",
    "check_processes_agree": "gda.agreement",
    "checking_agreement": "gda.agreement",
    "DisagreementError": "gda.meeting",
    "LateProcessError": "gda.meeting",
    "visualize_sharding": "gda.visualize",
    "collectives": "gda.communication",
    "assert_collectives": "gda.communication",
    "Collectives": "gda.hlo",
    "Collective": "gda.hlo",
    "ReshardPlan": "gda.reshard",
    "Move": "gda.reshard",
    "ShardGrid": "gda.grid",
    "ProcessView": "gda.views",
    "Index": "gda.spec",
}

_SUBMODULES = ("checkpoint", "libraries", "show", "storage")

# What JAX had for the same in 2022.
_SUCCESSOR_OF = {"GlobalDeviceArray": "GlobalArray", "pjit": "jit"}

__all__ = [*_MODULE_OF, *_SUBMODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        # Here, because importlib.metadata takes longer to import than all of the above.
        return import_module("importlib.metadata").version("gda")
    if name in _SUBMODULES:
        return import_module(f"gda.{name}")
    if name not in _MODULE_OF:
        hint = f"; its successor is gda.{_SUCCESSOR_OF[name]}" if name in _SUCCESSOR_OF else ""
        raise AttributeError(f"module 'gda' has no attribute {name!r}{hint}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
