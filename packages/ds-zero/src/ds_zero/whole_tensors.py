"""Read and set whole parameters, gradients and optimizer states by name, wherever their parts lie."""

import torch
from torch import nn

from ds_zero.engine import PARAMETER_ATTRIBUTE, Engine, engine_of
from ds_zero.errors import ZeroError
from ds_zero.gradients import FlatGradients
from ds_zero.layout import Slot
from ds_zero.pieces import OwnedPiece
from ds_zero.states import MASTER
from ds_zero.whole import WholePiece

PARAMETER = "parameter"
GRADIENT = "gradient"
NOTHING_REDUCED = (
    "no gradient has been reduced since the last zero_grad(); call this between backward and step"
)


def read_whole(model: nn.Module, name: str, what: str = PARAMETER) -> torch.Tensor:
    """A copy of one whole tensor, on every rank, in the parameter's shape and in fp32.

    Collective: every rank, same arguments.

    Args:
        model: the sharded model.
        name: of a trainable parameter.
        what: ``"parameter"`` for the master weights, ``"gradient"`` for what has been reduced since the last
            ``zero_grad`` (unscaled, before clipping), or the optimizer's name of a state (``"exp_avg"``).

    Raises:
        ZeroError: there is no such parameter or state, or nothing has been reduced.
    """
    engine = engine_of(model)
    gradient, slot = _find(engine, name)
    if what == PARAMETER:
        stepped = _master(gradient)
    elif what == GRADIENT:
        stepped = _reduced(engine, gradient)
    else:
        return _read_state(engine, gradient, slot, what)
    return _whole(engine, gradient, slot, stepped)


def write_whole(model: nn.Module, name: str, value: torch.Tensor, what: str = PARAMETER) -> None:
    """Set one whole tensor; the counterpart of :func:`read_whole`.

    Collective: every rank, same arguments and the same ``value``.

    Raises:
        ValueError: ``value`` has another shape than the parameter.
        ZeroError: as :func:`read_whole`.
    """
    engine = engine_of(model)
    gradient, slot = _find(engine, name)
    if tuple(value.shape) != slot.shape:
        raise ValueError(f"{name} has shape {slot.shape}, got {tuple(value.shape)}")
    if what == PARAMETER:
        _write_parameter(gradient, slot, value)
    elif what == GRADIENT:
        _write_gradient(gradient, slot, value * engine.scaler.scale)
    else:
        _write_state(engine, slot, what, value)


def owner_of(parameter: nn.Parameter) -> tuple[nn.Module, str]:
    """The sharded model that ``parameter`` belongs to, and its name there.

    Raises:
        ZeroError: it lies in no sharded model.
    """
    reference = getattr(parameter, PARAMETER_ATTRIBUTE, None)
    engine: Engine | None = reference() if reference is not None else None
    for name, own in engine.model.named_parameters() if engine is not None else ():
        if engine is not None and own is parameter:
            return engine.model, name
    raise ZeroError(f"this parameter of shape {tuple(parameter.shape)} is not in a sharded model")


def _find(engine: Engine, name: str) -> tuple[FlatGradients, Slot]:
    for gradient in engine.gradients:
        for slot in gradient.flat.layout.slots:
            if slot.name == name:
                return gradient, slot
    raise ZeroError(f"{name!r} is not a trainable parameter of this model (tied ones go by their first name)")


def _master(gradient: FlatGradients) -> torch.Tensor:
    flat = gradient.flat
    if flat.master is not None:
        return flat.master
    if flat.states is None:
        raise ZeroError(f"{flat.label} has no master weights")
    master = flat.states.open()[MASTER].clone()
    flat.states.drop()
    return master


def _reduced(engine: Engine, gradient: FlatGradients) -> torch.Tensor:
    if not gradient.num_reduced:
        raise ZeroError(
            "no gradient has been reduced since the last zero_grad(); call this between backward and step"
        )
    return gradient.read_shard().float() / engine.scaler.scale


def _whole(engine: Engine, gradient: FlatGradients, slot: Slot, mine: torch.Tensor) -> torch.Tensor:
    """Join every rank's slice; ``mine`` may be everything already."""
    layout = gradient.flat.layout
    if mine.numel() == layout.padded_numel:
        whole = mine
    else:
        whole = torch.empty(layout.padded_numel, dtype=torch.float32, device=engine.comm.device)
        engine.comm.all_gather(whole, mine.to(engine.comm.device), tag=f"{slot.name} whole")
    return whole[slot.start_numel : slot.stop_numel].view(slot.shape).clone()


def _copy_part(target: torch.Tensor, first: int, slot: Slot, value: torch.Tensor) -> None:
    """Copy what of ``value`` falls into ``target``, which begins at element ``first`` of the flat."""
    start = max(slot.start_numel, first)
    stop = min(slot.stop_numel, first + target.numel())
    if start < stop:
        part = value.reshape(-1)[start - slot.start_numel : stop - slot.start_numel]
        target[start - first : stop - first].copy_(part)


@torch.no_grad()
def _write_parameter(gradient: FlatGradients, slot: Slot, value: torch.Tensor) -> None:
    flat = gradient.flat
    first = flat.stepped_range[0]
    if flat.states is not None and flat.states.has_master:
        master = flat.states.open()[MASTER]
        _copy_part(master, first, slot, value)
        flat.publish_from(master)
        flat.states.close()
    elif flat.master is not None:
        _copy_part(flat.master, first, slot, value)
    flat.publish()


def _write_gradient(gradient: FlatGradients, slot: Slot, value: torch.Tensor) -> None:
    if not gradient.num_reduced:
        raise ZeroError(
            "no gradient has been reduced since the last zero_grad(); call this between backward and step"
        )
    gradient.edit_shard(lambda shard: _copy_part(shard, gradient.flat.shard_range[0], slot, value))


def _piece(engine: Engine, slot: Slot) -> OwnedPiece | WholePiece | None:
    pieces = engine.optimizer.pieces if engine.optimizer is not None else ()
    return next((piece for piece in pieces if piece.name == slot.name), None)


def _read_state(engine: Engine, gradient: FlatGradients, slot: Slot, key: str) -> torch.Tensor:
    if engine.optimizer is None:
        raise ZeroError("this model was sharded without an optimizer, so there is no state")
    state = engine.optimizer.read_state(slot.name)
    mine = state.get(key)
    known = engine.comm.all_gather_object(sorted(state), tag=f"{slot.name} states")
    if not any(key in keys for keys in known):
        names = sorted({name for keys in known for name in keys}) or "none before the first step"
        raise ZeroError(f"{slot.name} has no state {key!r}; known: {names}")
    flat = torch.zeros(slot.numel, dtype=torch.float32, device=engine.comm.device)
    piece = _piece(engine, slot)
    counts = engine.options.stage > 0 or engine.comm.rank == 0
    if isinstance(mine, torch.Tensor) and mine.numel() and counts:
        start = piece.piece.start_numel - slot.start_numel if isinstance(piece, OwnedPiece) else 0
        flat[start : start + mine.numel()].copy_(mine.reshape(-1))
    engine.comm.all_reduce(flat, tag=f"{slot.name} {key}")  # a sum with zeros is exact
    return flat.view(slot.shape)


def _write_state(engine: Engine, slot: Slot, key: str, value: torch.Tensor) -> None:
    if engine.optimizer is None:
        raise ZeroError("this model was sharded without an optimizer, so there is no state")
    state = engine.optimizer.read_state(slot.name)
    piece = _piece(engine, slot)
    if piece is None:
        return
    if key not in state:
        raise ZeroError(
            f"{slot.name} has no state {key!r}; known: {sorted(state) or 'none before the first step'}"
        )
    if isinstance(piece, OwnedPiece):
        start = piece.piece.start_numel - slot.start_numel
        value = value.reshape(-1)[start : start + piece.piece.numel]
    engine.optimizer.write_state(
        slot.name, state | {key: value.reshape(state[key].shape).to(state[key].dtype)}
    )
