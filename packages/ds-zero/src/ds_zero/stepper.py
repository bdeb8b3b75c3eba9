"""Runs the user's optimizer over the owned pieces: at once, or flat by flat where states lie elsewhere."""

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ds_zero.buffers import BufferPool
from ds_zero.gradients import FlatGradients
from ds_zero.pieces import FUSED, Owned, OwnedPiece
from ds_zero.states import ELSEWHERE, MASTER, FlatStates
from ds_zero.whole import WholeParameters


class Stepper:
    """Steps every piece once, with gradients multiplied by one factor on the way.

    A flat whose states are kept elsewhere, or whose gradient is narrower than fp32, is stepped on its own:
    its states are opened, the optimizer's groups shrink to its pieces for a moment, and the states are closed
    while the next flat's are on their way.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        pieces: Sequence[Owned],
        gradients: Sequence[FlatGradients],
        *,
        whole: WholeParameters,
        pool: BufferPool,
    ) -> None:
        self._inner = inner
        self._whole = whole
        self._pool = pool
        self._pieces: dict[int, list[OwnedPiece]] = {}
        self._apart: list[FlatGradients] = []
        self._together: list[FlatGradients] = []
        self.add(gradients, pieces)

    def add(self, gradients: Sequence[FlatGradients], pieces: Sequence[Owned]) -> None:
        """Step these too from now on."""
        for gradient in gradients:
            if id(gradient) not in self._pieces:
                self._pieces[id(gradient)] = []
                (self._apart if gradient.is_stepped_apart else self._together).append(gradient)
        for piece in pieces:
            if isinstance(piece, OwnedPiece):
                self._pieces[id(piece.gradient)].append(piece)

    def step(self, factor: float, untouched: Collection[int]) -> None:
        """Step what has a reduced gradient; the pieces of ``untouched`` parameters stay as they are.

        Collective at stage 0, where the reduced gradient is gathered, and for whole parameters.
        """
        options = _OptionsOfGroups(self._inner)
        ready: list[Owned] = []
        sources = {id(g): g.stepped_gradient() for g in self._together if g.num_reduced}
        for gradient in self._together:
            ready += self._bind(gradient, sources.get(id(gradient)), untouched)
        if sources:
            ready += self._whole.collect(sources, untouched)
        scales = self._scales_itself()
        if not scales and factor != 1.0:
            _scale([piece.parameter.grad for piece in ready], factor)
        self._step_pieces(ready, factor if scales else 1.0, options)
        if sources:
            self._whole.deliver()
        waiting = [gradient for gradient in self._apart if gradient.num_reduced]
        for position, gradient in enumerate(waiting):
            following = waiting[position + 1].flat.states if position + 1 < len(waiting) else None
            self._step_apart(gradient, factor, untouched, following=following, options=options)

    def _bind(
        self, gradient: FlatGradients, source: torch.Tensor | None, untouched: Collection[int]
    ) -> list[OwnedPiece]:
        """Give the flat's pieces their gradients; those that have one."""
        pieces = self._pieces[id(gradient)]
        for piece in pieces:
            parameter = gradient.flat.parameters[piece.piece.slot_index]
            piece.bind_gradient(None if id(parameter) in untouched else source)
        return [piece for piece in pieces if piece.parameter.grad is not None]

    def _scales_itself(self) -> bool:
        """Whether torch's fused step divides the gradient as it reads it: a pass over memory saved."""
        groups = self._inner.param_groups
        return type(self._inner) in FUSED and all(group.get("fused") for group in groups)

    def _step_pieces(self, pieces: Sequence[Owned], factor: float, options: "_OptionsOfGroups") -> None:
        if not pieces and not hasattr(self._inner, "sum_over_ranks"):
            return
        chosen = {id(piece.parameter) for piece in pieces}
        groups = self._inner.param_groups
        everyone = [group["params"] for group in groups]
        options.restart()
        try:
            for group, parameters in zip(groups, everyone, strict=True):
                group["params"] = [parameter for parameter in parameters if id(parameter) in chosen]
            if factor != 1.0 and pieces:
                device = pieces[0].parameter.device
                self._inner.grad_scale = torch.tensor(1.0 / factor, device=device)  # type: ignore[attr-defined]
                self._inner.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]
            self._inner.step()
        finally:
            for group, parameters in zip(groups, everyone, strict=True):
                group["params"] = parameters
            for name in ("grad_scale", "found_inf"):
                self._inner.__dict__.pop(name, None)

    def _step_apart(
        self,
        gradient: FlatGradients,
        factor: float,
        untouched: Collection[int],
        *,
        following: FlatStates | None,
        options: "_OptionsOfGroups",
    ) -> None:
        flat = gradient.flat
        opened = flat.states.open() if flat.states is not None else {}
        if following is not None:
            following.fetch()
        pieces = self._pieces[id(gradient)]
        for piece in pieces:
            piece.bind_master(opened)
        device = opened[MASTER].device if MASTER in opened else flat.comm.device
        source = gradient.stepped_gradient()
        fits = source.dtype is torch.float32 and source.device == device
        wide = source if fits else self._pool.take(source.numel(), torch.float32, device).copy_(source)
        ready = self._bind(gradient, wide, untouched)
        scales = self._scales_itself()
        if not scales and factor != 1.0:
            wide.mul_(factor)
        self._bring_moments(pieces, opened)
        self._step_pieces(ready, factor if scales else 1.0, options)
        self._keep_moments(pieces, opened)
        if MASTER in opened:
            flat.publish_from(opened[MASTER])
        for piece in pieces:
            piece.parameter.grad = None
        if not fits:
            self._pool.give(wide)
        if flat.states is not None:
            flat.states.close()

    def _bring_moments(self, pieces: Sequence[OwnedPiece], opened: dict[str, torch.Tensor]) -> None:
        for piece in pieces:
            state = self._inner.state.get(piece.parameter, {})
            for name in opened.keys() & state.keys():
                if state[name] is ELSEWHERE:
                    state[name] = piece.part_of(opened[name]).view_as(piece.parameter)

    def _keep_moments(self, pieces: Sequence[OwnedPiece], opened: dict[str, torch.Tensor]) -> None:
        for piece in pieces:
            state = self._inner.state.get(piece.parameter, {})
            for name in opened.keys() & state.keys():
                kept = piece.part_of(opened[name])
                if state[name].data_ptr() != kept.data_ptr():
                    kept.copy_(state[name])
                state[name] = ELSEWHERE

    def read_states(self, only: str | None = None) -> dict[str, dict[str, Any]]:
        """Copies of pieces' states by parameter name, wherever they lie; pieces without one are left out.

        Args:
            only: name of the one parameter that is wanted; ``None`` for all.
        """
        found: dict[str, dict[str, Any]] = {}
        for gradient, pieces in self._by_flat(only):
            states = gradient.flat.states
            opened = states.open() if states is not None else {}
            for piece in pieces:
                state = self._inner.state.get(piece.parameter, {})
                kept = {key: piece.part_of(opened[key]) for key in opened.keys() & state.keys()}
                if state:
                    found[piece.name] = {key: _clone(kept.get(key, value)) for key, value in state.items()}
            if states is not None:
                states.drop()
        for piece in self._whole.pieces.values():
            if only in (None, piece.name) and self._inner.state.get(piece.parameter):
                found[piece.name] = {key: _clone(v) for key, v in self._inner.state[piece.parameter].items()}
        return found

    def write_states(self, by_name: dict[str, dict[str, Any]]) -> None:
        """Replace the states of the pieces that are named."""
        only = next(iter(by_name)) if len(by_name) == 1 else None
        for gradient, pieces in self._by_flat(only):
            states = gradient.flat.states
            opened = states.open() if states is not None else {}
            for piece in pieces:
                if piece.name not in by_name:
                    continue
                state = {key: _clone(value) for key, value in by_name[piece.name].items()}
                for key in opened.keys() & state.keys():
                    piece.part_of(opened[key]).copy_(state[key])
                    state[key] = ELSEWHERE
                self._inner.state[piece.parameter] = state
            if states is not None:
                states.close()
        for piece in self._whole.pieces.values():
            if piece.name in by_name:
                self._inner.state[piece.parameter] = {k: _clone(v) for k, v in by_name[piece.name].items()}

    def _by_flat(self, only: str | None) -> list[tuple[FlatGradients, list[OwnedPiece]]]:
        pairs = [(gradient, self._pieces[id(gradient)]) for gradient in (*self._together, *self._apart)]
        if only is None:
            return pairs
        return [(g, [p for p in pieces if p.name == only]) for g, pieces in pairs if g.flat.holds(only)]


class _OptionsOfGroups:
    """What optimizers keep in their groups, such as a step count, moves once a step and not once a flat."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._groups = inner.param_groups
        self._before = [
            {key: value for key, value in group.items() if key != "params"} for group in self._groups
        ]

    def restart(self) -> None:
        """Set the options back to what they were before the step."""
        for group, before in zip(self._groups, self._before, strict=True):
            group.update(before)


def _scale(gradients: Sequence[torch.Tensor | None], factor: float) -> None:
    for gradient in gradients:
        if gradient is not None:
            gradient.mul_(factor)


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
