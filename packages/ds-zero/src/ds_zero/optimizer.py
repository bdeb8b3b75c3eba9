"""The user's optimizer on the owned pieces: global norm, clipping, the step, and fresh parameters for all."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_comm import Communicator
from ds_zero.config import ZeroOptions
from ds_zero.errors import NonFiniteGradientError, ZeroError
from ds_zero.gradients import FlatGradients
from ds_zero.layout import ALIGN_NUMEL, Piece
from ds_zero.reducer import Reducer

logger = logging.getLogger(__name__)

# Their update of one element depends on other elements, so a piece of a parameter is not enough.
NOT_ELEMENTWISE = ("LBFGS", "Adafactor", "Muon", "SparseAdam", "LAMB", "Lamb")
# torch's fused step reads and writes each element once; without it the CPU loops over temporaries.
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


class OwnedPiece:
    """One parameter's part that this rank steps: an optimizer parameter viewing the master weights."""

    def __init__(self, name: str, gradient: FlatGradients, piece: Piece) -> None:
        self.name = name
        self.gradient = gradient
        self.piece = piece
        flat = gradient.flat
        if flat.master is None:
            raise ZeroError(f"{name} has no master weights; is it trainable?")
        offset = piece.start_numel - flat.stepped_range[0]
        self.parameter = nn.Parameter(flat.view(flat.master, offset, piece.numel))

    def bind_gradient(self, source: torch.Tensor | None) -> None:
        """Point the optimizer parameter at its part of ``source``, the gradient of the stepped range."""
        if source is None:
            self.parameter.grad = None
            return
        offset = self.piece.start_numel - self.gradient.flat.stepped_range[0]
        self.parameter.grad = self.gradient.flat.view(source, offset, self.piece.numel)


def own_pieces(gradients: Sequence[FlatGradients]) -> dict[int, OwnedPiece | None]:
    """For every trainable parameter, by ``id``, the piece this rank steps, ``None`` if it owns no element."""
    owned: dict[int, OwnedPiece | None] = {}
    for gradient in gradients:
        for parameter in gradient.flat.parameters:
            owned[id(parameter)] = None
        for piece in gradient.flat.stepped_pieces():
            parameter = gradient.flat.parameters[piece.slot_index]
            name = gradient.flat.layout.slots[piece.slot_index].name
            owned[id(parameter)] = OwnedPiece(name, gradient, piece)
    return owned


class ShardedOptimizer(torch.optim.Optimizer):
    """Drop-in for the optimizer it wraps; ``param_groups`` are the same dicts, so schedulers work on both.

    Attributes:
        grad_norm: global gradient norm of the last step before clipping.
        clipped_grad_norm: the same after clipping.
        step_skipped: whether the last ``step`` changed nothing because the norm was not finite.
        num_steps: steps that changed weights.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        owned: Mapping[int, OwnedPiece | None],
        *,
        reducer: Reducer,
        gradients: Sequence[FlatGradients],
        comm: Communicator,
        options: ZeroOptions,
    ) -> None:
        self.inner = inner
        self.stage = options.stage
        self.grad_norm = 0.0
        self.clipped_grad_norm = 0.0
        self.step_skipped = False
        self.num_steps = 0
        self._options = options
        self._comm = comm
        self._reducer = reducer
        self._gradients = tuple(gradients)
        self._pieces = _replace_parameters(inner, owned)
        self._sealed = False
        super().__init__(inner.param_groups, inner.defaults)
        self.state = inner.state
        self._sealed = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: the layout of the flat buffers is fixed by then."""
        if self._sealed:
            raise ZeroError("a parameter group cannot be added after shard(); add it to the optimizer before")
        super().add_param_group(param_group)

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
        """
        if closure is not None:
            raise ZeroError(
                "step(closure) is not supported: a closure would run backward again inside the step"
            )
        self._check_reduced()
        untouched = self._exchange_norm()
        self.step_skipped = not math.isfinite(self.grad_norm)
        if self.step_skipped:
            self._report_nonfinite()
            return
        self._clip()
        self._bind_gradients(untouched)
        self._step_inner()
        for gradient in self._gradients:
            gradient.flat.publish()
        self.num_steps += 1

    def _check_reduced(self) -> None:
        waiting = [gradient.flat.label for gradient in self._gradients if gradient.has_open_window]
        if waiting:
            raise ZeroError(
                f"step() found gradients that no rank has reduced yet (first: {waiting[0]}); run the last "
                "backward before step() outside no_sync(), and let every backward finish"
            )

    def _exchange_norm(self) -> set[int]:
        """Set ``grad_norm``; the ``id``s of parameters that no rank got a gradient for."""
        local = sum(
            _sum_of_squares(g.shard) for g in self._gradients if g.num_reduced and g.shard is not None
        )
        flags = [flag for gradient in self._gradients for flag in gradient.touched]
        row = torch.tensor([local, float(len(flags) - sum(flags))], dtype=torch.float64)
        rows = self._comm.exchange(row, tag="gradient norm")
        self._comm.agree(tag="step")
        # Rounded to fp32, because the order of the fp64 sums depends on the units.
        self.grad_norm = float(rows[:, 0].sum().sqrt().float())
        self.clipped_grad_norm = self.grad_norm
        if not float(rows[:, 1].sum()):
            return set()
        return self._untouched(flags)

    def _untouched(self, flags: Sequence[bool]) -> set[int]:
        row = torch.tensor([float(flag) for flag in flags], dtype=torch.float64)
        touched = self._comm.exchange(row, tag="touched parameters").amax(dim=0) > 0
        parameters = [parameter for gradient in self._gradients for parameter in gradient.flat.parameters]
        return {
            id(parameter) for parameter, flag in zip(parameters, touched.tolist(), strict=True) if not flag
        }

    def _clip(self) -> None:
        limit = self._options.clip_norm
        if limit is None or self.grad_norm <= limit:
            return
        factor = limit / (self.grad_norm + CLIP_EPSILON)
        self.clipped_grad_norm = self.grad_norm * factor
        if self._can_scale():
            # The fused step divides the gradient as it reads it, and leaves it so: a pass over memory saved.
            self.inner.grad_scale = torch.tensor(1.0 / factor, device=self._comm.device)  # type: ignore[attr-defined]
            self.inner.found_inf = torch.zeros((), device=self._comm.device)  # type: ignore[attr-defined]
            return
        for gradient in self._gradients:
            if gradient.num_reduced and gradient.shard is not None:
                gradient.shard.mul_(factor)

    def _can_scale(self) -> bool:
        groups = self.inner.param_groups
        return type(self.inner) in FUSED and all(group.get("fused") for group in groups)

    def _step_inner(self) -> None:
        try:
            self.inner.step()
        finally:
            for name in ("grad_scale", "found_inf"):
                self.inner.__dict__.pop(name, None)

    def _bind_gradients(self, untouched: set[int]) -> None:
        sources: dict[int, torch.Tensor | None] = {}
        for gradient in self._gradients:
            source = None
            if gradient.num_reduced:
                source = gradient.gather_whole() if self.stage == 0 else gradient.shard
            sources[id(gradient)] = source
        for owned in self._pieces:
            parameter = owned.gradient.flat.parameters[owned.piece.slot_index]
            owned.bind_gradient(None if id(parameter) in untouched else sources[id(owned.gradient)])

    def _report_nonfinite(self) -> None:
        names = [
            name for name in self._comm.all_gather_object(self._first_nonfinite(), tag="non-finite") if name
        ]
        text = (
            f"the gradient norm is {self.grad_norm} at step {self.num_steps + 1}; first non-finite gradient: "
            f"{names[0] if names else 'none by itself, the sum overflows'}. No rank has changed its weights. "
            "Look for a NaN in the batch, a division by zero in the loss, or a learning rate that is too high"
        )
        if self._options.on_nonfinite == "raise":
            raise NonFiniteGradientError(f"{text}; on_nonfinite='skip' skips such steps instead.")
        logger.warning("step skipped: %s.", text)

    def _first_nonfinite(self) -> str:
        for gradient in self._gradients:
            if not gradient.num_reduced or gradient.shard is None:
                continue
            first, last = gradient.flat.shard_range
            for piece in gradient.flat.layout.pieces(first, last):
                part = gradient.flat.view(gradient.shard, piece.start_numel - first, piece.numel)
                if not bool(torch.isfinite(part).all()):
                    return gradient.flat.layout.slots[piece.slot_index].name
        return ""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """This rank's part: moments by parameter name, groups with names in place of parameters."""
        names = {id(owned.parameter): owned.name for owned in self._pieces}
        state = {names[id(parameter)]: dict(values) for parameter, values in self.state.items()}
        groups = [
            {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in self.param_groups
        ]
        shard = {"rank": self._comm.rank, "world_size": self._comm.world_size, "stage": self.stage}
        return {"state": state, "param_groups": groups, "shard": shard, "num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave on the same rank of the same layout.

        Raises:
            ValueError: it was made by another rank, world size, stage or model.
        """
        shard = {"rank": self._comm.rank, "world_size": self._comm.world_size, "stage": self.stage}
        if state_dict.get("shard") != shard:
            raise ValueError(f"this state belongs to {state_dict.get('shard')}, this rank is {shard}")
        by_name = {owned.name: owned.parameter for owned in self._pieces}
        unknown = sorted(set(state_dict["state"]) - set(by_name))
        if unknown or len(state_dict["param_groups"]) != len(self.param_groups):
            raise ValueError(f"this state belongs to another model; unknown parameters {unknown[:3]}")
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for name, values in state_dict["state"].items():
            self.state[by_name[name]] = {key: _clone(value) for key, value in values.items()}
        self.num_steps = state_dict["num_steps"]


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _sum_of_squares(shard: torch.Tensor) -> float:
    """Sum of squares in fp64 over fp32 norms of aligned rows, so that any slicing gives the same digits."""
    rows = torch.linalg.vector_norm(shard.view(-1, ALIGN_NUMEL), dim=1)
    return float(rows.double().square().sum())


def _replace_parameters(
    inner: torch.optim.Optimizer, owned: Mapping[int, OwnedPiece | None]
) -> list[OwnedPiece]:
    """Give every group this rank's pieces in place of the model's parameters."""
    pieces: list[OwnedPiece] = []
    for group in inner.param_groups:
        mine = [owned[id(parameter)] for parameter in _known(group["params"], owned)]
        kept = [piece for piece in mine if piece is not None]
        group["params"] = [piece.parameter for piece in kept]
        pieces += kept
        _prefer_fused(inner, group)
    _restart_state(inner)
    return pieces


def _known(parameters: Sequence[nn.Parameter], owned: Mapping[int, Any]) -> Iterator[nn.Parameter]:
    for parameter in parameters:
        if id(parameter) in owned:
            yield parameter
        elif parameter.requires_grad:
            raise ValueError(
                f"the optimizer holds a parameter of shape {tuple(parameter.shape)} "
                "that is not in the model; "
                "build the optimizer from model.parameters() of the model given to shard()"
            )


def _prefer_fused(inner: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    undecided = "fused" in group and group["fused"] is None and group.get("foreach") is None
    if type(inner) in FUSED and undecided and not group.get("differentiable"):
        group["fused"] = True


def _restart_state(inner: torch.optim.Optimizer) -> None:
    if any(int(values.get("step", 1)) for values in inner.state.values()):
        raise ValueError("shard() needs an optimizer that has not stepped; shard first, then load its state")
    started = bool(inner.state)
    inner.state.clear()
    if started and isinstance(inner, torch.optim.Adagrad):
        for group in inner.param_groups:
            for parameter in group["params"]:
                start = torch.full_like(parameter, group["initial_accumulator_value"], requires_grad=False)
                inner.state[parameter] = {"step": torch.tensor(0.0), "sum": start}


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers whose update of one element needs others.

    Raises:
        ZeroError: with the optimizer's name.
    """
    name = type(optimizer).__name__
    if name in NOT_ELEMENTWISE or getattr(optimizer, "elementwise", True) is False:
        raise ZeroError(
            f"{name} does not update element by element, so it cannot step slices of parameters; "
            "not supported yet. Use an element-wise optimizer such as AdamW, Adam, SGD or Adagrad"
        )
