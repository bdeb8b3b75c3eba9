"""``ds.initialize``: from a model, a configuration and what goes with them to an engine ready to train."""

import argparse
import datetime
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

import ds_comm
from ds import checkpointing
from ds.config import Config, ConfigError, solve_batch
from ds.config_reader import read_config
from ds.engine import Engine
from ds.loader import ShardedLoader
from ds.optimizers import build_optimizer
from ds.rank_log import log_once
from ds.schedules import build_scheduler
from ds_zero.optimizers import mark_hidden_matrices

logger = logging.getLogger(__name__)

OptimizerLike = torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]
SchedulerLike = LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler]


def initialize(  # noqa: PLR0917 -- DeepSpeed's signature
    args: argparse.Namespace | None = None,
    model: nn.Module | None = None,
    optimizer: OptimizerLike | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: SchedulerLike | None = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    mesh_param: Any = None,
    config_params: Mapping[str, Any] | str | Path | None = None,
) -> tuple[Engine, torch.optim.Optimizer | None, DataLoader[Any] | None, LRScheduler | None]:
    """Shard a model for training as the configuration says; DeepSpeed's signature and result.

    Collective: every rank, with the same arguments.

    Args:
        args: with ``deepspeed_config``, a path, when no ``config`` is given.
        model: the model.
        optimizer: an optimizer or a callable that makes one from parameters; goes before the configuration's.
        model_parameters: what a configured optimizer trains, parameters or groups; default all trainable.
        training_data: dataset for the returned loader, split over ranks and shuffled.
        lr_scheduler: a scheduler or a callable that makes one; goes before the configuration's.
        distributed_port: taken from the launcher; accepted and not needed.
        mpu: DeepSpeed's model-parallel unit, not supported yet.
        dist_init_required: accepted and not needed: processes meet when they have not.
        collate_fn: for the loader.
        config: DeepSpeed's JSON as a dict, a path or base64. ``config_params`` is its older name.
        mesh_param: not supported yet.
        config_params: see ``config``.

    Returns:
        ``(engine, optimizer, loader or None, scheduler or None)``.

    Raises:
        ConfigError: the configuration is wrong or asks for what is not there.
        ValueError: there is no model, or arguments contradict each other.
    """
    if model is None:
        raise ValueError("initialize needs model=")
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise ConfigError(
                f"{name}: not yet supported by ds 0.1, which shards over all ranks; leave it out"
            )
    source = _one_config(args, config, config_params)
    world = ds_comm.init()
    parsed = read_config(source, data_parallel_size=world.world_size)
    batch = solve_batch(parsed, world.world_size)
    if parsed.activation_checkpointing.cpu_checkpointing:
        checkpointing.configure(checkpoint_in_cpu=True)
    built = _optimizer(parsed, optimizer, model_parameters, model)
    scheduler = _scheduler(parsed, lr_scheduler, built)
    engine = Engine(model, built, scheduler, config=parsed, batch=batch)
    if training_data is not None:
        engine.training_dataloader = ShardedLoader(
            training_data,
            micro_batch_size=batch.micro,
            rank=world.rank,
            world_size=world.world_size,
            drop_last=parsed.dataloader_drop_last,
            collate_fn=collate_fn,
        )
    return engine, engine.optimizer, engine.training_dataloader, scheduler


def _one_config(args: argparse.Namespace | None, config: Any, config_params: Any) -> Any:
    given = [item for item in (config, config_params) if item is not None]
    if len(given) > 1:
        raise ValueError("give config or config_params, not both")
    path = getattr(args, "deepspeed_config", None)
    if not given and path is None:
        raise ValueError(
            "initialize needs config= (a dict or the path of a JSON file), or args.deepspeed_config"
        )
    return given[0] if given else path


def _optimizer(
    config: Config, given: OptimizerLike | None, parameters: Iterable[Any] | None, model: nn.Module
) -> torch.optim.Optimizer | None:
    if given is not None and config.optimizer is not None:
        log_once(
            logger, logging.INFO, "optimizer of the configuration is not used: initialize() was given one"
        )
    if isinstance(given, torch.optim.Optimizer):
        return given
    trainable = (parameter for parameter in model.parameters() if parameter.requires_grad)
    chosen = list(trainable if parameters is None else parameters)
    if given is not None:
        return given(chosen)
    if config.optimizer is None or not chosen:
        return None
    if config.optimizer.type.lower() == "muon" and not any(
        hasattr(p, "use_muon") for p in model.parameters()
    ):
        mark_hidden_matrices(model)
    return build_optimizer(config.optimizer, chosen)


def _scheduler(
    config: Config, given: SchedulerLike | None, optimizer: torch.optim.Optimizer | None
) -> LRScheduler | None:
    if given is None and config.scheduler is None:
        return None
    if optimizer is None:
        raise ConfigError(
            "scheduler: there is no optimizer to schedule; give one, or leave the scheduler out"
        )
    if given is not None and config.scheduler is not None:
        log_once(
            logger, logging.INFO, "scheduler of the configuration is not used: initialize() was given one"
        )
    if isinstance(given, LRScheduler):
        return given
    if given is not None:
        return given(optimizer)
    return build_scheduler(config.scheduler, optimizer) if config.scheduler is not None else None


def init_distributed(
    dist_backend: str | None = None, *_: Any, timeout: datetime.timedelta | None = None, **__: Any
) -> None:
    """Meet the other processes; DeepSpeed's name for :func:`ds_comm.init`.

    Collective: every rank.

    Args:
        dist_backend: accepted and not needed, like all others: the device decides.
        timeout: how long a collective may stand still.
    """
    if timeout is None:
        ds_comm.init()
    else:
        ds_comm.init(timeout_s=timeout.total_seconds())


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed``, ``--deepspeed_config`` and their older names, as DeepSpeed's scripts expect."""
    group = parser.add_argument_group("ds")
    group.add_argument(
        "--deepspeed", action="store_true", help="accepted; what counts is calling initialize()"
    )
    group.add_argument("--deepspeed_config", type=str, help="path of the JSON configuration")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", type=str, help=argparse.SUPPRESS)
    return parser
