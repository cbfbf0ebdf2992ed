from gda import checkpoint as checkpoint
from gda import show as show
from gda import storage as storage
from gda.arrays import libraries as libraries
from gda.arrays.buffers import aligned_empty as aligned_empty
from gda.arrays.global_array import GlobalArray as GlobalArray
from gda.arrays.narrowing import DoesNotFitError as DoesNotFitError
from gda.arrays.shard import Shard as Shard
from gda.compiled.collectives import assert_collectives as assert_collectives
from gda.compiled.collectives import collectives as collectives
from gda.compiled.hlo import Collective as Collective
from gda.compiled.hlo import Collectives as Collectives
from gda.layout.grid import ShardGrid as ShardGrid
from gda.layout.process_view import ProcessView as ProcessView
from gda.layout.reshard.plan import Move as Move
from gda.layout.reshard.plan import ReshardPlan as ReshardPlan
from gda.layout.spec import Index as Index
from gda.mesh import get_shard_indices as get_shard_indices
from gda.mesh import get_shard_indices_replica_ids as get_shard_indices_replica_ids
from gda.mesh import get_shard_shape as get_shard_shape
from gda.multihost.agreement import check_processes_agree as check_processes_agree
from gda.multihost.agreement import checking_agreement as checking_agreement
from gda.multihost.meeting import DisagreementError as DisagreementError
from gda.multihost.meeting import LateProcessError as LateProcessError
from gda.show.visualize import visualize_sharding as visualize_sharding
from gda.storage.options import Retry as Retry
from gda.trees.batches import DataPartitionType as DataPartitionType
from gda.trees.batches import global_to_host_array as global_to_host_array
from gda.trees.batches import host_to_global_array as host_to_global_array
from gda.trees.batches import host_to_global_device_array as host_to_global_device_array
from gda.trees.batches import with_sharding_constraint as with_sharding_constraint
from gda.trees.host_local import (
    global_array_to_host_local_array as global_array_to_host_local_array,
)
from gda.trees.host_local import (
    host_local_array_to_global_array as host_local_array_to_global_array,
)
from gda.trees.jit import constrain as constrain
from gda.trees.jit import jit as jit
from gda.trees.load import load_tree as load_tree
from gda.trees.store import store as store
from gda.trees.store import store_tree as store_tree
from gda.trees.to_numpy import to_numpy as to_numpy

__all__ = [
    "Collective",
    "Collectives",
    "DataPartitionType",
    "DisagreementError",
    "DoesNotFitError",
    "GlobalArray",
    "Index",
    "LateProcessError",
    "Move",
    "ProcessView",
    "ReshardPlan",
    "Retry",
    "Shard",
    "ShardGrid",
    "aligned_empty",
    "assert_collectives",
    "check_processes_agree",
    "checking_agreement",
    "checkpoint",
    "collectives",
    "constrain",
    "get_shard_indices",
    "get_shard_indices_replica_ids",
    "get_shard_shape",
    "global_array_to_host_local_array",
    "global_to_host_array",
    "host_local_array_to_global_array",
    "host_to_global_array",
    "host_to_global_device_array",
    "jit",
    "libraries",
    "load_tree",
    "show",
    "storage",
    "store",
    "store_tree",
    "to_numpy",
    "visualize_sharding",
    "with_sharding_constraint",
]
__version__: str
