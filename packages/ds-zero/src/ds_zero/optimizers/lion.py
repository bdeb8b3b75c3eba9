"""Lion: the sign of an interpolated momentum; one moment per element."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT


class Lion(Optimizer):
    """Element-wise, so it can be sharded like AdamW, with half of its state.

    Args:
        params: parameters or groups.
        lr: learning rate; Lion wants 3 to 10 times less than AdamW.
        betas: weights of the momentum in the update, and of the old momentum in the new one; in [0, 1).
        weight_decay: decoupled, times ``lr``.

    Raises:
        ValueError: a setting is out of range.

    Source: Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675, program 1.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if not lr >= 0 or not weight_decay >= 0:
            raise ValueError(f"Lion needs lr >= 0 and weight_decay >= 0, got {lr!r} and {weight_decay!r}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Lion needs betas in [0, 1), got {betas!r}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            update, keep = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter)
                state["step"] += 1
                momentum = state["exp_avg"]
                direction = torch.lerp(parameter.grad, momentum, update).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(direction, alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 1 - keep)
        return loss
