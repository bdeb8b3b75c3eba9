"""ZeRO-1/2/3 sharding for a plain PyTorch loop."""

from ds_zero.accounting import held_bytes, peak_bytes, plan_bytes, shard_layout
from ds_zero.config import Precision
from ds_zero.deferred import is_deferred, sharded_init
from ds_zero.errors import InternalError, NonFiniteGradientError, ZeroError
from ds_zero.optimizer import ShardedOptimizer
from ds_zero.shard import close, full_state_dict, gathered, no_sync, shard

__all__ = [
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
    "no_sync",
    "peak_bytes",
    "plan_bytes",
    "shard",
    "shard_layout",
    "sharded_init",
]
