from gda import checkpoint as checkpoint
from gda import libraries as libraries
from gda import show as show
from gda import storage as storage
from gda.agreement import check_processes_agree as check_processes_agree
from gda.agreement import checking_agreement as checking_agreement
from gda.array import GlobalArray as GlobalArray
from gda.array import Shard as Shard
from gda.blocks import DoesNotFitError as DoesNotFitError
from gda.buffers import aligned_empty as aligned_empty
from gda.communication import assert_collectives as assert_collectives
from gda.communication import collectives as collectives
from gda.grid import ShardGrid as ShardGrid
from gda.hlo import Collective as Collective
from gda.hlo import Collectives as Collectives
from gda.host_local import global_array_to_host_local_array as global_array_to_host_local_array
from gda.host_local import host_local_array_to_global_array as host_local_array_to_global_array
from gda.indices import get_shard_indices as get_shard_indices
from gda.indices import get_shard_indices_replica_ids as get_shard_indices_replica_ids
from gda.indices import get_shard_shape as get_shard_shape
from gda.load import load_tree as load_tree
from gda.meeting import DisagreementError as DisagreementError
from gda.meeting import LateProcessError as LateProcessError
from gda.numpy_tree import to_numpy as to_numpy
from gda.placement import DataPartitionType as DataPartitionType
from gda.placement import global_to_host_array as global_to_host_array
from gda.placement import host_to_global_array as host_to_global_array
from gda.placement import host_to_global_device_array as host_to_global_device_array
from gda.placement import with_sharding_constraint as with_sharding_constraint
from gda.reading import Retry as Retry
from gda.reshard import Move as Move
from gda.reshard import ReshardPlan as ReshardPlan
from gda.spec import Index as Index
from gda.storing import store as store
from gda.storing import store_tree as store_tree
from gda.transform import constrain as constrain
from gda.transform import jit as jit
from gda.views import ProcessView as ProcessView
from gda.visualize import visualize_sharding as visualize_sharding

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
