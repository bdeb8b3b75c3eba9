"""The parts of parameters that this rank steps, as parameters of the user's optimizer."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_zero.errors import ZeroError
from ds_zero.gradients import FlatGradients
from ds_zero.layout import Piece
from ds_zero.states import ELSEWHERE, MASTER
from ds_zero.whole import WholeParameters, WholePiece

# torch's fused step reads and writes each element once; without it the CPU loops over temporaries.
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


class OwnedPiece:
    """One parameter's part that this rank steps: an optimizer parameter viewing the master weights.

    Attributes:
        name: of the model's parameter.
        gradient: of the flat that holds it.
        piece: where it lies in the flat.
        parameter: what the optimizer steps; empty while the flat's states are not open.
    """

    def __init__(self, name: str, gradient: FlatGradients, piece: Piece) -> None:
        self.name = name
        self.gradient = gradient
        self.piece = piece
        flat = gradient.flat
        if flat.master is not None:
            self.parameter = nn.Parameter(self.part_of(flat.master))
        elif flat.keeps_master_elsewhere:
            self.parameter = nn.Parameter(torch.empty(0, dtype=torch.float32))
        else:
            raise ZeroError(f"{name} has no master weights; is it trainable?")

    def part_of(self, stepped: torch.Tensor) -> torch.Tensor:
        """This piece's view of a tensor over the flat's stepped range."""
        offset = self.piece.start_numel - self.gradient.flat.stepped_range[0]
        return self.gradient.flat.view(stepped, offset, self.piece.numel)

    def bind_master(self, opened: Mapping[str, torch.Tensor]) -> None:
        """Point the optimizer parameter at its part of opened states, if the master weights are there."""
        if MASTER in opened:
            self.parameter.data = self.part_of(opened[MASTER])

    def bind_gradient(self, source: torch.Tensor | None) -> None:
        """Point the optimizer parameter at its part of ``source``, the gradient of the stepped range."""
        self.parameter.grad = None if source is None else self.part_of(source)


Owned = OwnedPiece | WholePiece


def own_pieces(gradients: Sequence[FlatGradients], whole: WholeParameters) -> dict[int, Owned | None]:
    """For every trainable parameter, by ``id``, the piece this rank steps, ``None`` if there is none."""
    owned: dict[int, Owned | None] = {}
    for gradient in gradients:
        slots = gradient.flat.layout.slots
        for slot, parameter in zip(slots, gradient.flat.parameters, strict=True):
            owned[id(parameter)] = whole.pieces.get(slot.name)
        for piece in gradient.flat.stepped_pieces():
            if slots[piece.slot_index].name not in whole.names:
                owned[id(gradient.flat.parameters[piece.slot_index])] = own_piece(gradient, piece)
    return owned


def own_piece(gradient: FlatGradients, piece: Piece) -> OwnedPiece:
    """The piece of a flat's parameter as a parameter of the optimizer."""
    return OwnedPiece(gradient.flat.layout.slots[piece.slot_index].name, gradient, piece)


def replace_parameters(inner: torch.optim.Optimizer, owned: Mapping[int, Owned | None]) -> list[Owned]:
    """Give every group this rank's pieces in place of the model's parameters."""
    pieces: list[Owned] = []
    for group in inner.param_groups:
        mine = [owned[id(parameter)] for parameter in _known(group["params"], owned)]
        kept = [piece for piece in mine if piece is not None]
        group["params"] = [piece.parameter for piece in kept]
        pieces += kept
        prefer_fused(inner, group)
    _restart_state(inner, pieces)
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


def prefer_fused(inner: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Choose torch's fused step for a group that leaves it open."""
    undecided = "fused" in group and group["fused"] is None and group.get("foreach") is None
    if type(inner) in FUSED and undecided and not group.get("differentiable"):
        group["fused"] = True


def _restart_state(inner: torch.optim.Optimizer, pieces: Sequence[Owned]) -> None:
    if any(int(values.get("step", 1)) for values in inner.state.values()):
        raise ValueError("shard() needs an optimizer that has not stepped; shard first, then load its state")
    started = bool(inner.state)
    inner.state.clear()
    if not started or not isinstance(inner, torch.optim.Adagrad):
        return
    # Adagrad makes its state when it is built, the others in their first step.
    start = {
        id(p): group["initial_accumulator_value"] for group in inner.param_groups for p in group["params"]
    }
    sliced = [piece for piece in pieces if isinstance(piece, OwnedPiece)]
    for gradient in dict.fromkeys(piece.gradient for piece in sliced):
        states = gradient.flat.states
        opened = states.open() if states is not None else {}
        for piece in (piece for piece in sliced if piece.gradient is gradient):
            value = start[id(piece.parameter)]
            if "sum" in opened:
                piece.part_of(opened["sum"]).fill_(value)
                total = ELSEWHERE
            else:
                total = torch.full_like(piece.parameter, value, requires_grad=False)
            inner.state[piece.parameter] = {"step": torch.tensor(0.0), "sum": total}
        if states is not None:
            states.close()
