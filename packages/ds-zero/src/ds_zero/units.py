"""Which modules are gathered and reduced together, planned from names and sizes alone."""

from collections.abc import Iterator, Sequence

import msgspec
from torch import nn

# A ModuleList or Sequential is a stack of blocks when it holds at least this share of all elements.
STACK_SHARE = 0.1


class UnitPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One unit: a module and the parameters that live and travel with it.

    Attributes:
        name: qualified module name, ``""`` for the root unit.
        parameters: qualified names in registration order, each parameter once, under its first name.
        lenders: units that own tied parameters which this unit's modules also use.
    """

    name: str
    parameters: tuple[str, ...]
    lenders: tuple[str, ...]

    @property
    def label(self) -> str:
        """The name as people and recorded calls show it."""
        return self.name or "(root)"


def plan_units(model: nn.Module, *, names: Sequence[str] | None) -> tuple[UnitPlan, ...]:
    """Split a model into units, in registration order, the root unit first.

    By default each block of the model's large outermost ``ModuleList``s and ``Sequential``s is a unit
    and the rest is the root unit. A parameter tied across two units belongs to the root unit.

    Pure: every rank computes the same answer from the same modules.

    Raises:
        ValueError: a name in ``names`` is not a module of the model, or one that is never called.
    """
    unit_names = _checked_names(model, names) if names is not None else _block_names(model)
    owners = _owners(model, unit_names)
    plans = []
    for name in ("", *unit_names):
        mine = tuple(param for param, (owner, _) in owners.items() if owner == name)
        lenders = {owner for owner, users in owners.values() if name in users and owner != name}
        if mine or name == "" or lenders:
            plans.append(UnitPlan(name=name, parameters=mine, lenders=tuple(sorted(lenders))))
    return tuple(plans)


def merge_small_units(
    plans: Sequence[UnitPlan], numels: dict[str, int], *, bucket_numel: int
) -> tuple[UnitPlan, ...]:
    """Join neighbouring units until a bucket would exceed ``bucket_numel`` elements.

    For stages that keep parameters whole, where a unit is only a bucket of the reduction. The merged unit
    keeps the first one's name. The root unit is joined like any other.
    """
    merged: list[UnitPlan] = []
    size = 0
    for plan in plans:
        numel = sum(numels[name] for name in plan.parameters)
        if merged and size + numel <= bucket_numel:
            last = merged.pop()
            parameters = last.parameters + plan.parameters
            merged.append(UnitPlan(name=last.name, parameters=parameters, lenders=()))
            size += numel
        else:
            merged.append(UnitPlan(name=plan.name, parameters=plan.parameters, lenders=()))
            size = numel
    return tuple(merged)


def _checked_names(model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    order = [name for name, _ in model.named_modules()]
    unknown = sorted(set(names) - set(order))
    if unknown:
        raise ValueError(f"units must name modules of the model, got {unknown}; known are e.g. {order[1:6]}")
    wanted = [(name, module) for name, module in model.named_modules() if name in set(names) and name]
    for name, module in wanted:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(
                f"units must name modules that are called, but {name} is a {type(module).__name__}, "
                f"which never is; name its parts, such as {name}.{next(iter(module._modules), '0')}"
            )
    return tuple(name for name, _ in wanted)


def _block_names(model: nn.Module) -> tuple[str, ...]:
    total = sum(p.numel() for p in model.parameters())
    names: list[str] = []
    for stack_name, stack in _outermost_stacks(model, total):
        prefix = f"{stack_name}." if stack_name else ""
        for child_name, child in stack.named_children():
            if any(True for _ in child.parameters()):
                names.append(prefix + child_name)
    return tuple(names)


def _outermost_stacks(model: nn.Module, total: int) -> Iterator[tuple[str, nn.Module]]:
    pending: list[tuple[str, nn.Module]] = [("", model)]
    while pending:
        name, module = pending.pop(0)
        if _is_stack(module) and sum(p.numel() for p in module.parameters()) >= STACK_SHARE * total:
            yield name, module
            continue
        children = list(module.named_children())
        pending[:0] = [(f"{name}.{child}" if name else child, value) for child, value in children]


def _is_stack(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1


def _owners(model: nn.Module, unit_names: Sequence[str]) -> dict[str, tuple[str, set[str]]]:
    """First name of every parameter -> (unit that owns it, units whose modules use it)."""
    first_name: dict[int, str] = {}
    users: dict[str, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        first = first_name.setdefault(id(param), name)
        users.setdefault(first, set()).add(_unit_of(name, unit_names))
    return {name: (next(iter(found)) if len(found) == 1 else "", found) for name, found in users.items()}


def _unit_of(parameter: str, unit_names: Sequence[str]) -> str:
    holding = [name for name in unit_names if parameter.startswith(f"{name}.")]
    return max(holding, key=len, default="")
