"""The hooks that tie the engine to forward and backward of the user's modules, behind removable handles."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_zero.gatherer import Gatherer, Unit


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists, dicts and dataclass-like outputs."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        for field in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, field, None))


def differentiable(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value`` through which gradients flow."""
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


class BackwardUse:
    """One forward call's backward: over when every differentiable input has its gradient."""

    def __init__(self, number: int, *, num_inputs: int) -> None:
        self.number = number
        self.num_inputs = num_inputs
        self._pass = -1
        self._num_left = num_inputs

    def start(self, backward_pass: int) -> None:
        """A gradient has reached the outputs; the first one in a backward starts the count."""
        if backward_pass != self._pass:
            self._pass = backward_pass
            self._num_left = self.num_inputs

    def input_is_done(self) -> bool:
        """Count one input; whether it was the last."""
        self._num_left -= 1
        return self._num_left == 0


class Backward:
    """Life of one backward, at stage 3: units come back when a gradient reaches them and go when done."""

    def __init__(
        self, gatherer: Gatherer, begin: Callable[[], None], is_done: Callable[[Unit], bool]
    ) -> None:
        self._gatherer = gatherer
        self._begin = begin
        self._is_done = is_done
        self._uses = itertools.count()
        self._held: list[Unit] = []
        self._pass = 0

    def watch(self, units: Sequence[Unit], inputs: Any, outputs: Any) -> None:
        """Gather ``units`` when a gradient reaches ``outputs``; let go when all ``inputs`` have theirs."""
        reached, left = differentiable(outputs), differentiable(inputs)
        if not reached:
            return
        use = BackwardUse(next(self._uses), num_inputs=len(left))

        # The closures hold no tensor: the graph holds them, and such a cycle would keep activations alive.
        def enter(_: Any) -> None:
            self._begin()
            use.start(self._pass)
            for unit in units:
                self._enter(unit, use.number, tracked=use.num_inputs > 0)

        def leave(_: Any) -> None:
            if not use.input_is_done():
                return
            for unit in units:
                unit.backward_uses.discard(use.number)
                self.settle(unit)

        # Hooks of a tensor run before hooks of the node that made it: so the unit that took a tensor lets go
        # before the unit that gave it is gathered, and the two are never there together.
        for tensor in reached:
            if tensor.grad_fn is None:
                tensor.register_hook(enter)
            else:
                tensor.grad_fn.register_prehook(enter)
        for tensor in left:
            tensor.register_hook(leave)

    def _enter(self, unit: Unit, use: int, *, tracked: bool) -> None:
        if tracked:
            unit.backward_uses.add(use)
        else:
            unit.needs_all_gradients = True
        if not unit.in_backward:
            unit.in_backward = True
            self._held.append(unit)
            self._gatherer.pin(unit)

    def ensure(self, unit: Unit, _: torch.Tensor) -> None:
        """Have ``unit`` gathered: autograd is about to put a gradient on one of its parameters."""
        self._begin()
        if not unit.in_backward:
            self._enter(unit, -1, tracked=False)

    def settle(self, unit: Unit) -> None:
        """Release ``unit`` if the backward of every use that was entered is over.

        A use whose inputs need no gradient shows its end only by the gradients of the unit's parameters.
        """
        if not unit.in_backward or unit.backward_uses:
            return
        if unit.needs_all_gradients and not self._is_done(unit):
            return
        self._held.remove(unit)
        self._let_go(unit)

    def _let_go(self, unit: Unit) -> None:
        unit.in_backward = unit.needs_all_gradients = False
        unit.backward_uses.clear()
        self._gatherer.unpin(unit)

    def end(self) -> None:
        """Release whatever backward still holds."""
        for unit in self._held:
            self._let_go(unit)
        self._held.clear()
        self._pass += 1
        self._gatherer.end_pass()


class ModuleBracket:
    """Gathers units around the forward of one module.

    Args:
        module: the module to watch.
        units: what its forward needs.
        on_demand: only when the units are not gathered already (a module of the root unit that is called
            on its own).
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        gatherer: Gatherer,
        backward: Backward,
        *,
        on_demand: bool,
    ) -> None:
        self._units = tuple(units)
        self._gatherer = gatherer
        self._backward = backward
        self._on_demand = on_demand
        self._entered: list[tuple[Unit, ...]] = []
        self.handles = [
            module.register_forward_pre_hook(self._before, prepend=True),
            module.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        wanted = tuple(unit for unit in self._units if not (self._on_demand and unit.pins))
        self._entered.append(wanted)
        for unit in wanted:
            self._gatherer.pin(unit)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        entered = self._entered.pop()
        if entered and torch.is_grad_enabled():
            self._backward.watch(entered, (args, kwargs), output)
        for unit in entered:
            self._gatherer.unpin(unit)
        if not torch.is_grad_enabled():
            self._gatherer.end_evaluation()


class StateDictBracket:
    """Gathers a unit while its module is saved or loaded, so both see whole parameters."""

    def __init__(self, module: nn.Module, unit: Unit, gatherer: Gatherer) -> None:
        self._unit = unit
        self._gatherer = gatherer
        self._owned = {id(parameter) for flat in unit.flats for parameter in flat.parameters}
        self.handles = [
            module.register_state_dict_pre_hook(self._before_save),
            module.register_state_dict_post_hook(
                partial(self._after_save)
            ),  # torch marks the hook, a method cannot be
            module.register_load_state_dict_pre_hook(self._before_load),
            module.register_load_state_dict_post_hook(self._after_load),
        ]

    def _before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._gatherer.pin(self._unit)

    def _after_save(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            value = state.get(prefix + name)
            if id(parameter) in self._owned and value is not None and value is not parameter:
                state[prefix + name] = value.clone()
        self._gatherer.unpin(self._unit)

    def _before_load(self, module: nn.Module, *_: Any) -> None:
        self._gatherer.pin(self._unit)

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        with torch.no_grad():
            for flat in self._unit.flats:
                flat.commit()
        self._gatherer.unpin(self._unit)
