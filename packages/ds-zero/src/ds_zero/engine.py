"""The engine behind one sharded model: flats, hooks and optimizer, composed, and how to take it off."""

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from ds_comm import Communicator, Mesh
from ds_zero.buffers import BufferPool, Ledger
from ds_zero.config import ZeroOptions
from ds_zero.deferred import forget, is_deferred, materialize
from ds_zero.errors import ZeroError
from ds_zero.gatherer import Gatherer, Unit
from ds_zero.gradients import FlatGradients
from ds_zero.hooks import Backward, ModuleBracket, StateDictBracket, cast_floating
from ds_zero.layout import plan_flat_layout
from ds_zero.optimizer import ShardedOptimizer, own_pieces
from ds_zero.parameters import FlatParameters
from ds_zero.reducer import Reducer
from ds_zero.units import UnitPlan, merge_small_units, plan_units

logger = logging.getLogger(__name__)

# Where a model keeps its engine. An attribute, so that no registry outlives the model.
ATTRIBUTE = "_ds_zero_engine"
# How a flat parameter finds its engine: a weak reference, for calls that are given parameters only.
PARAMETER_ATTRIBUTE = "_ds_zero_engine_ref"


class Engine:
    """Everything that :func:`ds_zero.shard` installs on one model."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, mesh: Mesh, options: ZeroOptions
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.options = options
        self.comm: Communicator = mesh.axis("dp")
        self.ledger = Ledger(self.comm.rank)
        self.pool = BufferPool(self.comm, self.ledger, "buckets")
        self._handles: list[Any] = []
        self._in_backward = False
        self.plans = _plan(model, options)
        replaced = replace_deferred(model, self.plans, optimizer)
        self.units: dict[str, Unit] = {}
        self.flats: list[FlatParameters] = []
        self._build_units(replaced, trains=optimizer is not None)
        self._share_the_rest(replaced)
        self.gradients = [
            FlatGradients(flat, options=options, pool=self.pool, ledger=self.ledger)
            for flat in self.flats
            if flat.trainable
        ]
        self._of_unit = {
            unit.label: [gradient for gradient in self.gradients if gradient.flat in unit.flats]
            for unit in self.units.values()
        }
        self.reducer = Reducer(self.gradients, self.comm)
        self.gatherer = Gatherer(self.units.values(), max_gathered_units=options.max_gathered_units)
        self.backward = Backward(self.gatherer, self._begin_backward, self._has_all_gradients)
        self._install()
        self.optimizer = self._wrap(optimizer)
        object.__setattr__(model, ATTRIBUTE, self)
        for flat in self.flats:
            for parameter in flat.parameters:
                setattr(parameter, PARAMETER_ATTRIBUTE, weakref.ref(self))

    # Building

    def _build_units(self, sources: dict[int, torch.Tensor], *, trains: bool) -> None:
        named = dict(self.model.named_parameters())
        for plan in self.plans:
            flats = []
            for trainable in (True, False):
                if not trainable and self.options.stage < 3:
                    continue
                names = [
                    name
                    for name in plan.parameters
                    if named[name].is_floating_point() and (named[name].requires_grad and trains) is trainable
                ]
                if names:
                    flats.append(self._build_flat(plan, names, named, sources, trainable=trainable))
            self.units[plan.name] = Unit(plan.label, flats)
            self.flats += flats

    def _build_flat(
        self,
        plan: UnitPlan,
        names: Sequence[str],
        named: dict[str, nn.Parameter],
        deferred: dict[int, torch.Tensor],
        *,
        trainable: bool,
    ) -> FlatParameters:
        parameters = [named[name] for name in names]
        origins = [deferred.get(id(parameter), parameter.data) for parameter in parameters]
        layout = plan_flat_layout(names, [tuple(t.shape) for t in origins], world_size=self.comm.world_size)
        flat = FlatParameters(
            plan.label if trainable else f"{plan.label} frozen",
            layout,
            parameters,
            comm=self.comm,
            options=self.options,
            trainable=trainable,
            ledger=self.ledger,
        )
        pending = [origin for origin in origins if is_deferred(origin)]
        ready = iter(materialize(pending, device=str(self.comm.device))) if pending else iter(())
        flat.adopt([next(ready) if is_deferred(origin) else origin for origin in origins])
        forget(pending)
        return flat

    def _share_the_rest(self, deferred: dict[int, torch.Tensor]) -> None:
        """Parameters outside the flats and buffers: on the device, as rank 0 has them, whole everywhere."""
        mine = {id(parameter) for flat in self.flats for parameter in flat.parameters}
        dtype = self.options.precision.param_dtype
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in mine:
                (value,) = materialize([deferred.get(id(parameter), parameter.data)])
                value = value.to(self.comm.device, dtype if value.is_floating_point() else None)
                parameter.data = self._as_rank_0(value, name)
                self.ledger.add("parameters", parameter.nbytes)
        for name, holder, key, buffer in _buffers(self.model):
            (value,) = materialize([buffer])
            holder._buffers[key] = self._as_rank_0(value.to(self.comm.device), name)
            self.ledger.add("buffers", value.nbytes)

    def _as_rank_0(self, value: torch.Tensor, name: str) -> torch.Tensor:
        if self.comm.world_size > 1 and value.numel():
            value = value.contiguous()
            self.comm.broadcast(value.view(-1).view(torch.uint8), src=0, tag=f"{name} initial value")
        return value

    def _wrap(self, optimizer: torch.optim.Optimizer | None) -> ShardedOptimizer | None:
        if optimizer is None:
            return None
        owned = own_pieces(self.gradients)
        listed = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        forgotten = [
            name for name, p in self.model.named_parameters() if id(p) in owned and id(p) not in listed
        ]
        if forgotten:
            logger.warning(
                "the optimizer leaves out trainable parameters; %s and others will not change", forgotten[0]
            )
        return ShardedOptimizer(
            optimizer,
            owned,
            reducer=self.reducer,
            gradients=self.gradients,
            comm=self.comm,
            options=self.options,
        )

    # Hooks

    def _install(self) -> None:
        for gradient in self.gradients:
            for index, parameter in enumerate(gradient.flat.parameters):
                unit = next(unit for unit in self.units.values() if gradient.flat in unit.flats)
                hook = self._gradient_hook(gradient, index, unit)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
                if self.options.stage == 3:
                    self._handles.append(parameter.register_hook(partial(self.backward.ensure, unit)))
        modules = dict(self.model.named_modules())
        if self.options.stage == 3:
            for plan in self.plans:
                self._bracket(plan, modules)
        for name, unit in self.units.items():
            if self.options.stage == 3 or self.options.precision.has_master:
                self._handles += StateDictBracket(modules[name], unit, self.gatherer).handles
        if self.options.precision.has_master:
            self._handles.append(self.model.register_forward_pre_hook(self._cast_inputs, with_kwargs=True))
        self.model.zero_grad = self.zero_grad  # type: ignore[method-assign]

    def _bracket(self, plan: UnitPlan, modules: dict[str, nn.Module]) -> None:
        unit = self.units[plan.name]
        needed = [unit, *(self.units[name] for name in plan.lenders)]
        common = (self.gatherer, self.backward)
        self._handles += ModuleBracket(modules[plan.name], needed[:1], *common, on_demand=False).handles
        if needed[1:]:
            self._handles += ModuleBracket(modules[plan.name], needed[1:], *common, on_demand=True).handles
        if plan.name:
            return
        owned = {id(parameter) for flat in unit.flats for parameter in flat.parameters}
        for name, module in modules.items():
            if name and name not in self.units and any(id(p) in owned for p in module._parameters.values()):
                self._handles += ModuleBracket(module, [unit], *common, on_demand=True).handles

    def _gradient_hook(
        self, gradient: FlatGradients, index: int, unit: Unit
    ) -> Callable[[torch.Tensor], None]:
        def on_gradient(_: torch.Tensor) -> None:
            self._begin_backward()
            with torch.no_grad():
                gradient.accept(index, keep=not self.reducer.enabled)
                if not gradient.pending:
                    self.reducer.mark_ready(gradient)
                    self.backward.settle(unit)

        return on_gradient

    def _has_all_gradients(self, unit: Unit) -> bool:
        return all(not gradient.pending for gradient in self._of_unit[unit.label])

    def _begin_backward(self) -> None:
        if self._in_backward:
            return
        self._in_backward = True
        self.reducer.begin_backward()
        # The one public-enough way to run code when a backward ends; DDP and FSDP2 use it too.
        Variable._execution_engine.queue_callback(self._end_backward)

    @torch.no_grad()
    def _end_backward(self) -> None:
        self._in_backward = False
        self.backward.end()
        self.reducer.end_backward()

    def _cast_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        dtype = self.options.precision.param_dtype
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """What ``model.zero_grad`` and ``optimizer.zero_grad`` do."""
        self._in_backward = False
        self.reducer.zero()

    # Using and leaving

    def unit_of(self, parameter: nn.Parameter) -> Unit | None:
        """The unit whose flats hold ``parameter``, if any."""
        for unit in self.units.values():
            if any(parameter is own for flat in unit.flats for own in flat.parameters):
                return unit
        return None

    def close(self) -> None:
        """Take the engine off: hooks gone, every parameter whole and plain on every rank.

        Collective: every rank.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        with torch.no_grad():
            for flat in self.flats:
                flat.restore()
                for parameter in flat.parameters:
                    delattr(parameter, PARAMETER_ATTRIBUTE)
        del self.model.zero_grad
        object.__delattr__(self.model, ATTRIBUTE)


def engine_of(model: nn.Module) -> Engine:
    """The engine that :func:`ds_zero.shard` put on ``model``.

    Raises:
        ZeroError: there is none.
    """
    engine = model.__dict__.get(ATTRIBUTE)
    if engine is None:
        raise ZeroError(
            f"this {type(model).__name__} is not sharded; call ds_zero.shard(model, optimizer) first"
        )
    return engine


def _plan(model: nn.Module, options: ZeroOptions) -> tuple[UnitPlan, ...]:
    plans = plan_units(model, names=options.units)
    if options.stage == 3:
        return plans
    numels = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return merge_small_units(plans, numels, bucket_numel=options.bucket_numel)


def replace_deferred(
    model: nn.Module, plans: Sequence[UnitPlan], optimizer: torch.optim.Optimizer | None
) -> dict[int, torch.Tensor]:
    """Put real, empty parameters in the place of meta ones, in the model and in the optimizer.

    Returns:
        For every new parameter, by ``id``, the meta tensor whose recorded initialisation gives its values.

    Raises:
        ZeroError: a meta parameter was not built inside :func:`ds_zero.sharded_init`.
    """
    fresh: dict[int, nn.Parameter] = {}
    origins: dict[int, torch.Tensor] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if not is_deferred(parameter):
                raise ZeroError(
                    f"{name}.{key} is on the meta device without recorded values; "
                    "build the model inside ds_zero.sharded_init()"
                )
            if id(parameter) not in fresh:
                empty = torch.empty(0, dtype=parameter.dtype)
                fresh[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                origins[id(fresh[id(parameter)])] = parameter
            module._parameters[key] = fresh[id(parameter)]
    for group in optimizer.param_groups if optimizer is not None else ():
        group["params"] = [fresh.get(id(parameter), parameter) for parameter in group["params"]]
    return origins


def _buffers(model: nn.Module) -> list[tuple[str, nn.Module, str, torch.Tensor]]:
    return [
        (f"{name}.{key}" if name else key, module, key, buffer)
        for name, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
