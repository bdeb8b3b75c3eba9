"""ZeRO-1/2/3 sharding for a plain PyTorch loop."""

from ds_zero.accounting import held_bytes, peak_bytes, plan_bytes, shard_layout
from ds_zero.config import Precision
from ds_zero.deferred import is_deferred, sharded_init
from ds_zero.errors import InternalError, NonFiniteGradientError, ZeroError
from ds_zero.optimizer import ShardedOptimizer
from ds_zero.shard import BUCKET_NUMEL, close, full_state_dict, gathered, is_sharded, no_sync, shard

__all__ = [
    "BUCKET_NUMEL",
    "InternalError",
    "NonFiniteGradientError",
    "Precision",
    "ShardedOptimizer",
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
    "shard",
    "shard_layout",
    "sharded_init",
]
