"""DeepSpeed's names for whole parameters, gradients and optimizer states: thin calls of ds_zero.

Collective, all of them: every rank, with the same parameter.
"""

import torch
from torch import nn

import ds_zero


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """A copy of the whole master weights."""
    return ds_zero.read_whole(*ds_zero.owner_of(param))


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """A copy of the whole reduced gradient, unscaled and before clipping; ``None`` when there is none."""
    return _or_none(param, "gradient")


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """A copy of one whole state, such as ``exp_avg``; ``None`` before the first step."""
    return _or_none(param, optim_state_key)


def _or_none(param: nn.Parameter, what: str) -> torch.Tensor | None:
    model, name = ds_zero.owner_of(param)
    try:
        return ds_zero.read_whole(model, name, what)
    except ds_zero.ZeroError:
        return None


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the whole master weights, and the parameters made of them."""
    ds_zero.write_whole(*ds_zero.owner_of(param), value)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the whole reduced gradient, between backward and step."""
    ds_zero.write_whole(*ds_zero.owner_of(param), value, "gradient")


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set one whole state."""
    ds_zero.write_whole(*ds_zero.owner_of(param), value, optim_state_key)
