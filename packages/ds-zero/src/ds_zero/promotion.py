"""Parameters that become trainable after sharding: their flats are built anew, unit by unit."""

from collections.abc import Sequence

import torch
from torch import nn

from ds_zero.engine import Engine
from ds_zero.errors import ZeroError
from ds_zero.flat_plan import FlatSpec
from ds_zero.parameters import FlatParameters
from ds_zero.pieces import Owned, own_piece
from ds_zero.units import UnitPlan


def add_trainable(engine: Engine, parameters: Sequence[nn.Parameter]) -> list[Owned]:
    """Make ``parameters`` trainable, if they are not, and give the pieces of them that this rank steps.

    Collective: every rank, same parameters.

    Raises:
        ValueError: a parameter is not of the model, or the optimizer has it already.
        ZeroError: a parameter does not require a gradient.
    """
    names = {id(parameter): name for name, parameter in engine.model.named_parameters()}
    wanted: dict[str, nn.Parameter] = {}
    for parameter in parameters:
        if id(parameter) not in names:
            raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is not of the sharded model")
        name = names[id(parameter)]
        if not parameter.requires_grad:
            raise ZeroError(f"{name} does not require a gradient; call requires_grad_() on it first")
        wanted[name] = parameter
    listed = engine.comm.all_gather_object(sorted(engine.stepped_names()), tag="stepped parameters")
    known = {name for part in listed for name in part}
    twice = sorted(known & wanted.keys())
    if twice:
        raise ValueError(f"the optimizer has {twice[0]} already; a parameter belongs to one group")
    flat_names = {slot.name for gradient in engine.gradients for slot in gradient.flat.layout.slots}
    missing = [name for name in wanted if name not in flat_names]
    for plan in engine.plans:
        chosen = [name for name in plan.parameters if name in missing]
        if chosen:
            _promote(engine, plan, chosen)
    return _pieces(engine, set(wanted))


def _promote(engine: Engine, plan: UnitPlan, names: Sequence[str]) -> None:
    """Take ``names`` of one unit out of its frozen flats and build trainable ones of them."""
    named = dict(engine.model.named_parameters())
    unit = engine.units[plan.name]
    chosen = set(names)
    kept: list[FlatSpec] = []
    for flat in [flat for flat in unit.flats if not flat.trainable and _holds(flat, chosen)]:
        rest = [slot.name for slot in flat.layout.slots if slot.name not in chosen]
        if rest:
            spec = FlatSpec(
                unit=plan.name, label=flat.label, names=tuple(rest), dtype=flat.dtype, trainable=False
            )
            kept.append(spec)
        with torch.no_grad():
            flat.restore()
        engine.remove_flat(unit, flat)
    for spec in kept:
        engine.add_flat(unit, spec, named)
    for dtype in dict.fromkeys(named[name].dtype for name in names):
        mine = tuple(name for name in names if named[name].dtype is dtype)
        label = f"{plan.label} added {len(unit.flats)}"
        engine.add_flat(
            unit, FlatSpec(unit=plan.name, label=label, names=mine, dtype=dtype, trainable=True), named
        )


def _holds(flat: FlatParameters, names: set[str]) -> bool:
    return any(slot.name in names for slot in flat.layout.slots)


def _pieces(engine: Engine, names: set[str]) -> list[Owned]:
    found: list[Owned] = []
    for gradient in engine.gradients:
        for piece in gradient.flat.stepped_pieces():
            if gradient.flat.layout.slots[piece.slot_index].name in names:
                found.append(own_piece(gradient, piece))
    return found
