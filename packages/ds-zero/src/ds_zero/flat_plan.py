"""Which parameters share a flat buffer: those of one unit, one dtype and one trainability. Pure."""

from collections.abc import Sequence

import msgspec
import torch
from torch import nn

from ds_zero.config import ZeroOptions, fp32_modules
from ds_zero.units import UnitPlan


class FlatSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One flat buffer to be built.

    Attributes:
        unit: name of the unit that gathers it.
        label: as people and recorded calls show it; unique in a model.
        names: of its parameters, in registration order.
        dtype: of its parameters in forward and backward.
        trainable: whether the optimizer steps it.
    """

    unit: str
    label: str
    names: tuple[str, ...]
    dtype: torch.dtype
    trainable: bool


def plan_flats(
    model: nn.Module, plans: Sequence[UnitPlan], *, options: ZeroOptions, trains: bool
) -> tuple[FlatSpec, ...]:
    """The flats of every unit, trainable ones first, the precision's dtype before fp32.

    Frozen floating parameters lie in flats only at stage 3, where they are sharded; below they stay plain.

    Args:
        model: with its parameters, which may be on meta.
        plans: its units.
        options: for the stage, the dtype and what stays fp32.
        trains: whether there is an optimizer.
    """
    named = dict(model.named_parameters())
    wide = tuple(f"{name}." for name in fp32_modules(model, options.precision))
    narrow_dtype = options.precision.param_dtype
    specs: list[FlatSpec] = []
    for plan in plans:
        groups: dict[tuple[bool, torch.dtype], list[str]] = {}
        for name in plan.parameters:
            if named[name].is_floating_point():
                dtype = torch.float32 if name.startswith(wide) else narrow_dtype
                groups.setdefault((named[name].requires_grad and trains, dtype), []).append(name)
        for trainable in (True, False):
            for dtype in dict.fromkeys((narrow_dtype, torch.float32)):
                names = groups.get((trainable, dtype), [])
                if names and (trainable or options.stage == 3):
                    marks = [] if dtype is narrow_dtype else ["fp32"]
                    marks += [] if trainable else ["frozen"]
                    label = " ".join([plan.label, *marks])
                    specs.append(
                        FlatSpec(
                            unit=plan.name, label=label, names=tuple(names), dtype=dtype, trainable=trainable
                        )
                    )
    return tuple(specs)
