"""ZeRO-1/2/3 sharding for a plain PyTorch loop."""

from ds_zero.accounting import held_bytes, peak_bytes, plan_bytes, shard_layout
from ds_zero.config import LossScale, Offload, Precision, Reach
from ds_zero.deferred import is_deferred, sharded_init
from ds_zero.errors import InternalError, LossScaleError, NonFiniteGradientError, SwapError, ZeroError
from ds_zero.memory_plan import BatchPlan, MemoryPlan, plan_batch, plan_memory, what_fits
from ds_zero.optimizer import ShardedOptimizer
from ds_zero.recompute import Recompute, recompute
from ds_zero.recompute_plan import RecomputePlan
from ds_zero.shard import BUCKET_NUMEL, close, full_state_dict, gathered, is_sharded, no_sync, shard
from ds_zero.whole_tensors import owner_of, read_whole, write_whole

__all__ = [
    "owner_of",
    "what_fits",
    "plan_memory",
    "plan_batch",
    "MemoryPlan",
    "BatchPlan",
    "BUCKET_NUMEL",
    "InternalError",
    "LossScale",
    "LossScaleError",
    "NonFiniteGradientError",
    "Offload",
    "Precision",
    "Reach",
    "Recompute",
    "RecomputePlan",
    "ShardedOptimizer",
    "SwapError",
    "ZeroError",
    "close",
    "full_state_dict",
    "gathered",
    "held_bytes",
    "is_deferred",
    "is_sharded",
    "no_sync",
    "peak_bytes",
    "plan_bytes",
    "read_whole",
    "recompute",
    "shard",
    "shard_layout",
    "sharded_init",
    "write_whole",
]
