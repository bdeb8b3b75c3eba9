"""Optimizers by the names of the JSON: DeepSpeed's names and defaults on torch's classes."""

import difflib
import inspect
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch

import ds_zero.optimizers
from ds.config import ConfigError, OptimizerConfig
from ds.config_keys import OPTIMIZERS_NOT_YET
from ds.rank_log import log_once

logger = logging.getLogger(__name__)

ADAM = ("adam", "adamw")
# DeepSpeed's own arguments of Adam that choose an implementation; torch's classes do not have them.
IMPLEMENTATION = ("torch_adam", "set_grad_none", "fp32_optimizer_states", "bias_correction", "adam_w_mode")
CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
} | {name.lower(): getattr(ds_zero.optimizers, name) for name in ("Lamb", "Lion", "Muon")}
# DeepSpeed's arguments of Muon under the names of the class.
MUON_NAMES = {"muon_lr": "lr"}


def check_optimizer(config: OptimizerConfig) -> Iterator[str]:
    """What is wrong with a name and its arguments, one line each; values are checked when it is built."""
    lowered = config.type.lower()
    if lowered in OPTIMIZERS_NOT_YET:
        yield f"optimizer.type: {config.type} is not yet supported by ds 0.1; use AdamW, Lion, Lamb or Muon"
        return
    if lowered not in CLASSES:
        close = difflib.get_close_matches(lowered, CLASSES, n=1)
        hint = (
            f"did you mean {CLASSES[close[0]].__name__}?"
            if close
            else "use AdamW, SGD or a class of torch.optim"
        )
        yield f"optimizer.type: {config.type} is not known; {hint}"
        return
    if lowered in ADAM and config.params.get("bias_correction", True) is not True:
        yield "optimizer.params.bias_correction: false is not yet supported by ds 0.1; leave it out"
    known = [*_arguments_of(CLASSES[lowered]), *(IMPLEMENTATION if lowered in ADAM else ())]
    known += MUON_NAMES if lowered == "muon" else ()
    for key in config.params:
        if key == "max_grad_norm":
            yield "optimizer.params.max_grad_norm: not an optimizer's; set gradient_clipping at the top level"
        elif key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = (
                f"did you mean optimizer.params.{close[0]}?" if close else f"known here: {', '.join(known)}"
            )
            yield f"optimizer.params.{key}: unknown key; {hint}"


def _arguments_of(kind: type[torch.optim.Optimizer]) -> list[str]:
    return [name for name in inspect.signature(kind).parameters if name != "params"]


def build_optimizer(config: OptimizerConfig, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """The torch optimizer that a name means.

    As in DeepSpeed ``Adam`` is AdamW unless ``adam_w_mode`` is false, ``AdamW`` always is, and both have
    weight decay 0 when it is not given (with ``torch_adam`` torch's own default holds).

    Raises:
        ConfigError: the name or an argument is unknown or not supported, or torch refuses a value.
    """
    mistakes = list(check_optimizer(config))
    if mistakes:
        raise ConfigError(*mistakes)
    arguments = {key: value for key, value in config.params.items() if key not in IMPLEMENTATION}
    kind = CLASSES[config.type.lower()]
    for name, own in MUON_NAMES.items() if kind is ds_zero.optimizers.Muon else ():
        if name in arguments:
            arguments.setdefault("adam_lr", arguments.get("lr"))
            arguments[own] = arguments.pop(name)
    if config.type.lower() in ADAM:
        kind = _adam(config, arguments)
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    try:
        return kind(parameters, **arguments)
    except (TypeError, ValueError, IndexError) as error:  # IndexError: betas of another length
        raise ConfigError(f"optimizer.params: {kind.__name__} refuses them: {error}") from None


def _adam(config: OptimizerConfig, arguments: dict[str, Any]) -> type[torch.optim.Optimizer]:
    """Adam or AdamW by DeepSpeed's rules; fills in its weight decay."""
    if "weight_decay" not in arguments and not config.params.get("torch_adam", False):
        arguments["weight_decay"] = 0.0
        if config.type.lower() == "adamw":
            log_once(
                logger,
                logging.INFO,
                "optimizer.params.weight_decay is not set: DeepSpeed's default of 0 applies",
            )
    if config.type.lower() == "adam" and config.params.get("adam_w_mode", True):
        log_once(
            logger,
            logging.WARNING,
            'optimizer "%s" is AdamW, as in DeepSpeed; set params.adam_w_mode to false for Adam',
            config.type,
        )
        return torch.optim.AdamW
    return CLASSES[config.type.lower()]
