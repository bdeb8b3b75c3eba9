"""The user's optimizer over the owned pieces: unscale, clip, step, and fresh parameters for all."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ds_zero.config import ZeroOptions
from ds_zero.errors import NonFiniteGradientError, SwapError, ZeroError
from ds_zero.gradient_norm import GradientNorm
from ds_zero.gradients import FlatGradients
from ds_zero.moves import Moves
from ds_zero.pieces import Owned, prefer_fused
from ds_zero.reducer import Reducer
from ds_zero.scaling import LossScaler
from ds_zero.stepper import Stepper

logger = logging.getLogger(__name__)

# Their update of one element depends on other elements, so they get whole parameters, dealt out to ranks.
NOT_ELEMENTWISE = ("Adafactor", "Muon", "LAMB", "Lamb", "LARS", "Shampoo", "SOAP", "Scion")
NOT_SHARDED = {
    "LBFGS": "it runs forward and backward again inside its step",
    "SparseAdam": "gradients are dense here",
}
CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


class ShardedOptimizer(torch.optim.Optimizer):
    """Drop-in for the optimizer it wraps; ``param_groups`` are the same dicts, so schedulers work on both.

    Attributes:
        grad_norm: global gradient norm of the last step before clipping.
        clipped_grad_norm: the same after clipping.
        step_skipped: whether the last ``step`` changed nothing because the norm was not finite.
        num_steps: steps that changed weights.
        scaler: of the loss.
        pieces: what this rank steps.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        pieces: Sequence[Owned],
        *,
        reducer: Reducer,
        gradients: Sequence[FlatGradients],
        moves: Moves,
        options: ZeroOptions,
        stepper: Stepper,
        scaler: LossScaler,
        extend: Callable[[Sequence[torch.nn.Parameter]], tuple[Sequence[FlatGradients], Sequence[Owned]]],
        stray: Callable[[], str],
    ) -> None:  # each one its own concern, composed here
        self.inner = inner
        self.stage = options.stage
        self.grad_norm = 0.0
        self.clipped_grad_norm = 0.0
        self.step_skipped = False
        self.num_steps = 0
        self.scaler = scaler
        self._options = options
        self._moves = moves
        self._comm = moves.comm
        self._reducer = reducer
        self._gradients: Sequence[FlatGradients] = tuple(gradients)
        self._norm = GradientNorm(gradients, moves)
        self.pieces = tuple(pieces)
        self._stepper = stepper
        self._extend = extend
        self._stray = stray
        self._sealed = False
        super().__init__(inner.param_groups, inner.defaults)
        self.state = inner.state
        self._sealed = True

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, to call ``backward`` on; the loss itself without loss scaling.

        Needed only where backward does not begin at outputs of the sharded model, which scale by themselves.
        """
        return self.scaler.apply(loss)

    @property
    def loss_scale(self) -> float:
        """What gradients are multiplied by until the step; 1 without loss scaling."""
        return self.scaler.scale

    @property
    def overflow(self) -> bool:
        """DeepSpeed's and apex's name of ``step_skipped``."""
        return self.step_skipped

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters of the model: frozen ones that now require a gradient, or ones left out.

        Collective: every rank, same group, not during a backward.

        Raises:
            ValueError: a parameter is not of the model, or belongs to a group already.
            ZeroError: a parameter does not require a gradient, or the optimizer needs whole tensors.
        """
        if not self._sealed:
            super().add_param_group(param_group)
            return
        given = param_group["params"]
        members: list[Any] = [given] if isinstance(given, torch.Tensor) else list(given)
        self._gradients, pieces = self._extend(members)
        self.pieces = (*self.pieces, *pieces)
        self._norm = GradientNorm(self._gradients, self._moves)
        self._stepper.add(self._gradients, pieces)
        self.inner.add_param_group({**param_group, "params": [piece.parameter for piece in pieces]})
        group = self.inner.param_groups[-1]
        prefer_fused(self.inner, group)
        if self.param_groups is not self.inner.param_groups:
            self.param_groups.append(group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of every rank's buffers. ``set_to_none`` is accepted and has no effect."""
        self._reducer.zero()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Clip by the global norm, step the owned pieces, and bring the new parameters to every rank.

        Collective: every rank.

        Raises:
            ZeroError: a closure was given, or gradients of ``no_sync`` were never reduced.
            NonFiniteGradientError: the norm is not finite and ``on_nonfinite="raise"``.
            LossScaleError: an overflow at the smallest loss scale.
            SwapError: a swap file of any rank could not be read or written; the weights are then undefined.
        """
        if closure is not None:
            raise ZeroError(
                "step(closure) is not supported: a closure would run backward again inside the step"
            )
        self._check_reduced()
        self._check_frozen()
        scale = self.scaler.scale
        self.grad_norm = self.clipped_grad_norm = self._norm.measure() / scale
        self.step_skipped = not math.isfinite(self.grad_norm)
        self.scaler.update(overflow=self.step_skipped)
        if self.step_skipped:
            self._report_nonfinite()
            return
        self._step_pieces(self._clip_factor() / scale)
        for gradient in self._gradients:
            gradient.flat.publish()
        self.num_steps += 1

    def _check_frozen(self) -> None:
        name = self._stray()
        if name:
            raise ZeroError(
                f"{name} was frozen when the model was sharded and has a gradient now; to train it, call "
                "optimizer.add_param_group({'params': [...]}) after requires_grad_()"
            )

    def _step_pieces(self, factor: float) -> None:
        failure: SwapError | None = None
        try:
            self._stepper.step(factor, self._norm.untouched)
        except SwapError as error:
            failure = error
        if self._options.offload.optimizer == "file" and self.stage > 0:
            texts = self._moves.everyone.all_gather_object(str(failure or ""), tag="swap files")
            told = next((text for text in texts if text), "")
            failure = failure or (SwapError(f"on another rank: {told}") if told else None)
        if failure is not None:
            raise failure

    def _clip_factor(self) -> float:
        limit = self._options.clip_norm
        if limit is None or self.grad_norm <= limit:
            return 1.0
        factor = limit / (self.grad_norm + CLIP_EPSILON)
        self.clipped_grad_norm = self.grad_norm * factor
        return factor

    def _check_reduced(self) -> None:
        waiting = [gradient.flat.label for gradient in self._gradients if gradient.has_open_window]
        if waiting:
            raise ZeroError(
                f"step() found gradients that no rank has reduced yet (first: {waiting[0]}); run the last "
                "backward before step() outside no_sync(), and let every backward finish"
            )

    def _report_nonfinite(self) -> None:
        if self.scaler.options is not None:
            logger.info("step skipped: gradients overflow in fp16; loss scale is now %g", self.scaler.scale)
            return
        name = self._norm.first_nonfinite()
        text = (
            f"the gradient norm is {self.grad_norm} at step {self.num_steps + 1}; first non-finite gradient: "
            f"{name or 'none by itself, the sum overflows'}. No rank has changed its weights. "
            "Look for a NaN in the batch, a division by zero in the loss, or a learning rate that is too high"
        )
        if self._options.on_nonfinite == "raise":
            raise NonFiniteGradientError(f"{text}; on_nonfinite='skip' skips such steps instead.")
        logger.warning("step skipped: %s.", text)

    def read_state(self, name: str) -> dict[str, Any]:
        """A copy of this rank's state of one parameter, empty when it has none."""
        return self._stepper.read_states(name).get(name, {})

    def write_state(self, name: str, state: dict[str, Any]) -> None:
        """Replace this rank's state of one parameter."""
        self._stepper.write_states({name: state})

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """This rank's part: moments by parameter name, groups with names in place of parameters."""
        names = {id(owned.parameter): owned.name for owned in self.pieces}
        groups = [
            {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in self.param_groups
        ]
        shard = {"rank": self._comm.rank, "world_size": self._comm.world_size, "stage": self.stage}
        return {
            "state": self._stepper.read_states(),
            "param_groups": groups,
            "shard": shard,
            "num_steps": self.num_steps,
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave on the same rank of the same layout.

        Raises:
            ValueError: it was made by another rank, world size, stage or model.
        """
        shard = {"rank": self._comm.rank, "world_size": self._comm.world_size, "stage": self.stage}
        if state_dict.get("shard") != shard:
            raise ValueError(f"this state belongs to {state_dict.get('shard')}, this rank is {shard}")
        unknown = sorted(set(state_dict["state"]) - {owned.name for owned in self.pieces})
        if unknown or len(state_dict["param_groups"]) != len(self.param_groups):
            raise ValueError(f"this state belongs to another model; unknown parameters {unknown[:3]}")
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        self._stepper.write_states(state_dict["state"])
        self.num_steps = state_dict["num_steps"]
        self.scaler.load_state_dict(state_dict["scaler"])


def whole_parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    """``id``s of the parameters whose update needs the whole tensor.

    An optimizer says so itself by a method ``needs_whole(group) -> bool``; torch's are known by name.

    Raises:
        ZeroError: the optimizer cannot be sharded at all.
    """
    name = type(optimizer).__name__
    if name in NOT_SHARDED:
        raise ZeroError(
            f"{name} cannot be sharded: {NOT_SHARDED[name]}. Use one such as AdamW, SGD, Lion or Muon"
        )
    needs_whole = getattr(optimizer, "needs_whole", None)
    chosen = [
        group
        for group in optimizer.param_groups
        if (needs_whole(group) if needs_whole is not None else name in NOT_ELEMENTWISE)
    ]
    return {id(parameter) for group in chosen for parameter in group["params"]}
