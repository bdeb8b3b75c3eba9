"""DeepSpeed's names for activation checkpointing inside a model's own code, over ds_zero.

What :func:`configure` sets holds for the process, as these names have no other place for it. In new code,
``ds_zero.recompute(model, policy)`` needs no change of the model.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from ds.config import ConfigError
from ds.config_reader import read_config
from ds_zero.recompute import keeping
from ds_zero.stowing import OnCpu, Queue, Stowed


class _Settings(msgspec.Struct, frozen=True, kw_only=True):
    in_cpu: bool


_state: dict[str, Any] = {"settings": None, "queue": Queue()}


def configure(  # noqa: PLR0917 -- DeepSpeed's signature
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set how :func:`checkpoint` keeps what it keeps.

    Args:
        mpu_: accepted and not needed.
        deepspeed_config: a configuration whose ``activation_checkpointing`` applies; arguments go before it.
        partition_activations: not supported yet: it needs tensor parallelism.
        contiguous_checkpointing: accepted and not needed: the allocator keeps freed memory.
        num_checkpoints: accepted and not needed.
        checkpoint_in_cpu: keep inputs in CPU memory.
        synchronize: accepted and not needed.
        profile: accepted and not needed: ``torch.profiler`` shows the recomputation.

    Raises:
        ConfigError: ``partition_activations`` is true, or the configuration is wrong.
    """
    if partition_activations:
        raise ConfigError(
            "partition_activations: not yet supported by ds 0.1; ds_zero.recompute(partition=...) cuts "
            "inputs up over any group of ranks"
        )
    in_cpu = checkpoint_in_cpu
    if in_cpu is None and deepspeed_config is not None:
        in_cpu = read_config(deepspeed_config).activation_checkpointing.cpu_checkpointing
    _state["settings"] = _Settings(in_cpu=bool(in_cpu))
    _state["queue"] = Queue()


def is_configured() -> bool:
    """Whether :func:`configure` has been called."""
    return _state["settings"] is not None


def reset() -> None:
    """Forget what is kept of earlier iterations. Settings stay."""
    _state["queue"] = Queue()


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function``, keep its inputs alone, and run it again in backward, with the same dropout."""
    settings: _Settings | None = _state["settings"]
    stow = OnCpu if settings is not None and settings.in_cpu else Stowed
    return keeping(function, "full", stow=stow, queue=_state["queue"])(*args)


non_reentrant_checkpoint = checkpoint
