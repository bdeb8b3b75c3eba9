"""Loss scaling: the scale and how it moves, and the boundary that applies it to plain ``loss.backward()``."""

import logging
import math
from typing import Any

import torch

from ds_zero.casting import map_tensors
from ds_zero.config import LossScale
from ds_zero.errors import LossScaleError, ZeroError

logger = logging.getLogger(__name__)

FACTOR = 2.0


class LossScaler:
    """The loss scale, halved after overflows and doubled after a while without one.

    Attributes:
        scale: what gradients are multiplied by now; 1 without loss scaling.
        num_overflows: steps skipped because a gradient was not finite.
    """

    def __init__(self, options: LossScale | None) -> None:
        self.options = options
        self.scale = options.initial if options is not None else 1.0
        self.num_overflows = 0
        self._num_good = 0
        self._patience = options.hysteresis if options is not None else 1
        self._applied = False
        self._explicit = False

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call ``backward`` on."""
        if self.options is None:
            return loss
        self._explicit = True
        return loss.float() * self.scale

    def factor_at_boundary(self) -> float:
        """By what a gradient that comes into the model is to be multiplied."""
        self._applied = True
        return 1.0 if self._explicit else self.scale

    def end_backward(self) -> None:
        """Check that the backward which ends was scaled.

        Raises:
            ZeroError: it began beyond the model's outputs, so its gradients were not multiplied.
        """
        scaled = self._applied or self._explicit
        self._applied = self._explicit = False
        if self.options is not None and not scaled:
            raise ZeroError(
                "this backward did not pass through the outputs of the sharded model, so its loss was not "
                "scaled; call optimizer.scale(loss).backward() instead of loss.backward()"
            )

    def update(self, *, overflow: bool) -> None:
        """Move the scale after a step that was made, or skipped because of an overflow.

        Raises:
            LossScaleError: an overflow at the smallest scale.
        """
        options = self.options
        if options is None:
            return
        if not overflow:
            self._grow(options)
            return
        self.num_overflows += 1
        self._num_good = 0
        if not options.dynamic:
            return
        if self._patience > 1:
            self._patience -= 1
            return
        if self.scale <= options.minimum:
            raise LossScaleError(
                f"a gradient overflows at the smallest loss scale, {options.minimum:g}: gradients are not "
                "finite by themselves, or too large for fp16. Look for a NaN in the batch or in the loss, "
                "lower the learning rate, or use bf16, which has the range of fp32"
            )
        self.scale = max(self.scale / FACTOR, options.minimum)
        logger.info("gradient overflow: loss scale is now %g", self.scale)

    def _grow(self, options: LossScale) -> None:
        self._num_good += 1
        if options.restores_hysteresis:
            self._patience = options.hysteresis
        if options.dynamic and self._num_good % options.window == 0:
            self._patience = options.hysteresis
            if math.isfinite(self.scale * FACTOR):
                self.scale *= FACTOR

    def state_dict(self) -> dict[str, Any]:
        """Everything that moves."""
        return {
            "scale": self.scale,
            "num_overflows": self.num_overflows,
            "num_good": self._num_good,
            "patience": self._patience,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self.scale, self.num_overflows = state["scale"], state["num_overflows"]
        self._num_good, self._patience = state["num_good"], state["patience"]


class _Boundary(torch.autograd.Function):
    """Forward: to fp32. Backward: times the scale, then to the narrow dtype again."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scaler: LossScaler) -> torch.Tensor:
        ctx.scaler = scaler
        ctx.dtype = tensor.dtype
        return tensor.float() if tensor.dtype is not torch.float32 else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        factor = ctx.scaler.factor_at_boundary()
        return (grads[0] * factor if factor != 1.0 else grads[0]).to(ctx.dtype), None


def scale_outputs(output: Any, scaler: LossScaler) -> Any:
    """The outputs of a model in fp32, with gradients that are scaled as they come back in."""

    def bound(tensor: torch.Tensor) -> torch.Tensor:
        return _Boundary.apply(tensor, scaler) if tensor.requires_grad else tensor  # type: ignore[no-any-return]

    return map_tensors(output, bound)
