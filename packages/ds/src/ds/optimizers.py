"""Optimizers by the names of the JSON."""

import logging
from collections.abc import Iterable
from typing import Any

import torch

from ds.config import ConfigError, OptimizerConfig

logger = logging.getLogger(__name__)

NOT_YET = ("lamb", "lion", "muon", "onebitadam", "zerooneadam", "onebitlamb", "muadam", "muadamw", "musgd")
# DeepSpeed's own arguments that choose an implementation, which torch's classes do not have.
IMPLEMENTATION = ("torch_adam", "set_grad_none", "fp32_optimizer_states", "bias_correction", "adam_w_mode")


def build_optimizer(config: OptimizerConfig, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """The torch optimizer that a name means; ``Adam`` is AdamW as in DeepSpeed unless ``adam_w_mode`` is false.

    Raises:
        ConfigError: the name or an argument is unknown or not supported.
    """
    params = dict(config.params)
    if "max_grad_norm" in params:
        raise ConfigError("optimizer.params.max_grad_norm: use gradient_clipping at the top level instead")
    if params.get("bias_correction") is False:
        raise ConfigError(
            "optimizer.params.bias_correction: false is not supported; torch's Adam always corrects"
        )
    kind = _class_of(config.type, adam_w_mode=params.get("adam_w_mode", True))
    arguments = {key: value for key, value in params.items() if key not in IMPLEMENTATION}
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    try:
        return kind(parameters, **arguments)
    except TypeError as error:
        raise ConfigError(f"optimizer.params of {config.type}: {error}") from None


def _class_of(name: str, *, adam_w_mode: bool) -> type[torch.optim.Optimizer]:
    lowered = name.lower()
    if lowered in NOT_YET:
        raise ConfigError(
            f"optimizer.type {name}: not supported yet; AdamW, Adam, SGD, Adagrad and others of torch are"
        )
    if lowered == "adam" and adam_w_mode:
        logger.warning(
            'optimizer "%s" is AdamW here, as in DeepSpeed; set params.adam_w_mode=false for Adam', name
        )
        return torch.optim.AdamW
    classes = {key.lower(): value for key, value in vars(torch.optim).items() if isinstance(value, type)}
    found = classes.get(lowered)
    if found is None or found is torch.optim.Optimizer:
        raise ConfigError(
            f"optimizer.type {name} is not known; use AdamW, Adam, SGD, Adagrad or another of torch.optim"
        )
    return found
