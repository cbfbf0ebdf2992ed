# In the order of __init__.py.
# ruff: noqa: I001

# Build an array and look at it.
from gda.arrays.global_array import GlobalArray as GlobalArray
from gda.arrays.padded_array import PaddedArray as PaddedArray
from gda.trees.load import load_tree as load_tree
from gda.mesh import local_rows as local_rows
from gda.trees.batches.prefetch import prefetch as prefetch
from gda.trees.batches.prefetch import Prefetched as Prefetched
from gda.arrays.shard import Shard as Shard
from gda.layout.spec import Index as Index
from gda.trees.plain import to_numpy as to_numpy
from gda.trees.plain import to_jax as to_jax
from gda.trees.digests import fingerprint as fingerprint
from gda.show import this_module as show
from gda.trees.live_arrays import memory as memory
from gda.show.memory_report import MemoryReport as MemoryReport
from gda.show.memory_report import ArrayMemory as ArrayMemory
from gda.show.memory_report import DeviceMemory as DeviceMemory
from gda.trees.layouts import layouts as layouts
from gda.trees.layouts import assert_sharded as assert_sharded
from gda.trees.layouts import Layouts as Layouts
from gda.trees.layouts import ArrayLayout as ArrayLayout
from gda import storage as storage
from gda.storage.options import Retry as Retry
from gda.arrays.buffers import aligned_empty as aligned_empty
from gda.storage.casts import DoesNotFitError as DoesNotFitError
from gda.mesh import LayoutUnknownError as LayoutUnknownError

# Compute.
from gda.trees.jit import jit as jit
from gda.trees.jit import constrain as constrain
from gda.compiled.collectives import collectives as collectives
from gda.compiled.collectives import assert_collectives as assert_collectives
from gda.compiled.hlo import Collectives as Collectives
from gda.compiled.hlo import Collective as Collective
from gda.compiled.hlo import Traffic as Traffic

# Move, save, and exchange with other programs.
from gda.trees.resharding import reshard_tree as reshard_tree
from gda.exchange.offering import offer as offer
from gda.exchange.offering import Offer as Offer
from gda.exchange.pulling import pull as pull
from gda import checkpoint as checkpoint
from gda.trees.files.store import store as store

# Many processes.
from gda import launch as launch
from gda.multihost.agreement import check_processes_agree as check_processes_agree
from gda.multihost.meeting import DisagreementError as DisagreementError
from gda.multihost.meeting import LateProcessError as LateProcessError
from gda.trees.replicas import check_replicas_agree as check_replicas_agree
from gda.trees.replicas import ReplicaMismatch as ReplicaMismatch
from gda.trees.replicas import ReplicaMismatchError as ReplicaMismatchError

# Plan without devices.
from gda.layout.grid import ShardGrid as ShardGrid
from gda.layout.process_view import ProcessView as ProcessView
from gda.layout.processes import Processes as Processes
from gda.layout.reshard.plan import ReshardPlan as ReshardPlan
from gda.layout.reshard.plan import Move as Move

# Rehearse on devices that are not here.
from gda.compiled.topologies.rehearsal_mesh import rehearsal_mesh as rehearsal_mesh
from gda.compiled.abstract import abstract as abstract
from gda.compiled.rehearse import rehearse as rehearse
from gda.compiled.rehearse import assert_fits as assert_fits
from gda.compiled.rehearsal import Rehearsal as Rehearsal
from gda.compiled.rehearsal import AxisTraffic as AxisTraffic
from gda.compiled.seconds import StepSeconds as StepSeconds
from gda.compiled.seconds import PlaceSeconds as PlaceSeconds
from gda.compiled.hlo.allocations import Temporary as Temporary
from gda.compiled.rehearsal import ArgumentBytes as ArgumentBytes
from gda.compiled.report.advice import Advice as Advice

# Test, and use other libraries.
from gda import testing as testing
from gda.multihost.fault_report import report as report
from gda.trees.batches import compat as compat

# The names of GlobalDeviceArray.
from gda.mesh import get_shard_shape as get_shard_shape
from gda.mesh import get_shard_indices as get_shard_indices
from gda.mesh import get_shard_indices_replica_ids as get_shard_indices_replica_ids

__all__ = [  # noqa: RUF022
    # Build an array and look at it.
    "GlobalArray",
    "PaddedArray",
    "load_tree",
    "local_rows",
    "prefetch",
    "Shard",
    "to_numpy",
    "to_jax",
    "fingerprint",
    "show",
    "memory",
    "layouts",
    "assert_sharded",
    "storage",
    "aligned_empty",
    "DoesNotFitError",
    "LayoutUnknownError",
    # Compute.
    "jit",
    "constrain",
    "collectives",
    "assert_collectives",
    # Move, save, and exchange with other programs.
    "reshard_tree",
    "offer",
    "pull",
    "checkpoint",
    "store",
    # Many processes.
    "launch",
    "check_processes_agree",
    "DisagreementError",
    "LateProcessError",
    "check_replicas_agree",
    "ReplicaMismatchError",
    # Plan without devices.
    "ShardGrid",
    "ProcessView",
    "ReshardPlan",
    # Rehearse on devices that are not here.
    "rehearsal_mesh",
    "abstract",
    "rehearse",
    "assert_fits",
    # Test, and read code of others.
    "testing",
    "report",
    # The names of GlobalDeviceArray.
    "get_shard_shape",
    "get_shard_indices",
    "get_shard_indices_replica_ids",
]
__version__: str
