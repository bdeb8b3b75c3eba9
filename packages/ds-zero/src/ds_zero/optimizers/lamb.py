"""LAMB: Adam's direction, scaled for every tensor by the ratio of its norm to the direction's."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT

# Norms are taken over rows of this length in fp32 and summed in fp64, so that they do not depend on slices.
ROW_NUMEL = 256
SumOverRanks = Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor]


class Lamb(Optimizer):
    """Large-batch Adam. Steps slices of tensors: only two norms per tensor are summed over ranks.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay of the two moments, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: added to the direction, before its norm is taken.
        max_coeff: largest ratio.
        min_coeff: smallest ratio.
        bias_correction: divide moments by ``1 - beta**step``.

    Attributes:
        sum_over_ranks: given the parameters of a call and their sums of squares, (K, 2) in fp64, returns the
            sums over the ranks that hold other parts. Set by :func:`ds_zero.shard`; alone, the identity.

    Raises:
        ValueError: a setting is out of range.

    Source: Large Batch Optimization for Deep Learning, arXiv:1904.00962, algorithm 2.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        bias_correction: bool = True,
    ) -> None:  # DeepSpeed's names
        if not lr >= 0 or not eps >= 0 or not weight_decay >= 0:
            raise ValueError(f"Lamb needs lr, eps, weight_decay >= 0, got {lr!r}, {eps!r}, {weight_decay!r}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Lamb needs betas in [0, 1), got {betas!r}")
        if not 0 < min_coeff <= max_coeff:
            raise ValueError(f"Lamb needs 0 < min_coeff <= max_coeff, got {min_coeff!r} and {max_coeff!r}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults)
        self.sum_over_ranks: SumOverRanks = _alone

    def needs_whole(self, group: dict[str, Any]) -> bool:
        """Slices are enough."""
        return False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient.

        Collective after :func:`ds_zero.shard`: the norms are summed over ranks.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        chosen = [
            (group, parameter)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        directions = [self._direction(group, parameter) for group, parameter in chosen]
        pairs = [
            (_sum_of_squares(parameter), _sum_of_squares(direction))
            for (_, parameter), direction in zip(chosen, directions, strict=True)
        ]
        squares = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2)
        norms = self.sum_over_ranks([parameter for _, parameter in chosen], squares).sqrt().float().tolist()
        for (group, parameter), direction, (weight, length) in zip(chosen, directions, norms, strict=True):
            ratio = weight / length if weight > 0 and length > 0 else 1.0
            ratio = min(max(ratio, group["min_coeff"]), group["max_coeff"])
            parameter.add_(direction, alpha=-group["lr"] * ratio)
        return loss

    def _direction(self, group: dict[str, Any], parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        first, second = group["betas"]
        grad = parameter.grad
        state["exp_avg"].lerp_(grad, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
        corrections = (1.0, 1.0)
        if group["bias_correction"]:
            count = float(state["step"])
            corrections = (1 - first**count, 1 - second**count)
        root = state["exp_avg_sq"].div(corrections[1]).sqrt_().add_(group["eps"])
        direction = state["exp_avg"].div(corrections[0]).div_(root)
        return direction.add_(parameter, alpha=group["weight_decay"]) if group["weight_decay"] else direction


def _alone(parameters: Sequence[torch.Tensor], squares: torch.Tensor) -> torch.Tensor:
    return squares


def _sum_of_squares(tensor: torch.Tensor) -> float:
    flat = tensor.reshape(-1)
    full = flat.numel() // ROW_NUMEL * ROW_NUMEL
    rows = torch.linalg.vector_norm(flat[:full].view(-1, ROW_NUMEL), dim=1).double()
    tail = torch.linalg.vector_norm(flat[full:]).double()
    return float(rows.square().sum() + tail.square())
