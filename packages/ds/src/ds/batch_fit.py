"""The micro-batch and the accumulation that fit a memory budget, chosen from predicted bytes."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ds_comm
import ds_zero
from ds.config import ConfigError
from ds.config_reader import load, read_config
from ds.optimizers import build_optimizer
from ds.rank_log import log_once
from ds.zero_options import offload_of, precision_of

logger = logging.getLogger(__name__)


def fit_batch(
    config: Mapping[str, Any] | str | Path,
    model: nn.Module,
    inputs: Callable[[int], Sequence[Any]],
    *,
    budget_bytes: int,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> dict[str, Any]:
    """Fill in ``train_micro_batch_size_per_gpu`` and ``gradient_accumulation_steps``.

    The largest micro-batch that divides ``train_batch_size`` and whose predicted bytes fit is taken; nothing
    is allocated. Call it before :func:`ds.initialize`, and after ``ds_zero.recompute`` if blocks are to be
    wrapped.

    Args:
        config: with ``train_batch_size``; the other two sizes in it are not looked at.
        model: the model, which may be on meta.
        inputs: positional arguments of one call for a number of samples; tensors may be on meta.
        budget_bytes: of a rank, for everything that :func:`ds_zero.plan_memory` counts.
        loss: from the model's output to a loss; default the output, its ``loss``, or its first element.

    Returns:
        The configuration as a dict, to give to :func:`ds.initialize`.

    Raises:
        ConfigError: there is no ``train_batch_size``, or it does not divide by the ranks.
        ValueError: not even one sample fits.
    """
    ranks = ds_comm.init().world_size
    raw = load(config)
    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    rest = {key: value for key, value in raw.items() if key not in sizes}
    parsed = read_config(rest)
    if parsed.train_batch_size is None:
        raise ConfigError("train_batch_size: fit_batch needs it, to keep it")
    if parsed.train_batch_size % ranks:
        raise ConfigError(f"train_batch_size: {parsed.train_batch_size} does not divide by {ranks} ranks")
    optimizer = build_optimizer(parsed.optimizer, list(model.parameters())) if parsed.optimizer else None

    def total_bytes(micro_batch: int) -> int:
        plan = ds_zero.plan_memory(
            model,
            optimizer,
            inputs=inputs(micro_batch),
            loss=loss,
            stage=parsed.zero_optimization.stage,
            world_size=ranks,
            precision=precision_of(parsed),
            offload=offload_of(parsed),
        )
        return plan.total_bytes

    plan = ds_zero.plan_batch(
        parsed.train_batch_size, world_size=ranks, budget_bytes=budget_bytes, total_bytes=total_bytes
    )
    log_once(logger, logging.INFO, "fit_batch: %s of %.1f MB", plan.describe(), budget_bytes / 1e6)
    return rest | dict(zip(sizes, (plan.micro_batch, plan.accumulation), strict=True))
