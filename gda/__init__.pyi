from gda.array import GlobalArray as GlobalArray
from gda.array import Shard as Shard
from gda.blocks import DoesNotFitError as DoesNotFitError
from gda.buffers import aligned_empty as aligned_empty
from gda.grid import ShardGrid as ShardGrid
from gda.indices import get_shard_indices as get_shard_indices
from gda.indices import get_shard_indices_replica_ids as get_shard_indices_replica_ids
from gda.indices import get_shard_shape as get_shard_shape
from gda.spec import Index as Index
from gda.transform import constrain as constrain
from gda.transform import jit as jit

__all__ = [
    "DoesNotFitError",
    "GlobalArray",
    "Index",
    "Shard",
    "ShardGrid",
    "aligned_empty",
    "constrain",
    "get_shard_indices",
    "get_shard_indices_replica_ids",
    "get_shard_shape",
    "jit",
]
__version__: str
