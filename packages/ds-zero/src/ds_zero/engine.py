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
from ds_zero.casting import AutocastBracket, CastBracket
from ds_zero.config import DTYPES, ZeroOptions, fp32_modules
from ds_zero.deferred import forget, is_deferred, materialize
from ds_zero.errors import ZeroError
from ds_zero.flat_plan import FlatSpec, plan_flats
from ds_zero.gatherer import Gatherer, Unit
from ds_zero.gradients import FlatGradients
from ds_zero.homes import Homes, leaving
from ds_zero.hooks import Backward, ModuleBracket, StateDictBracket
from ds_zero.layout import plan_flat_layout
from ds_zero.moves import Moves
from ds_zero.optimizer import ShardedOptimizer, whole_parameters
from ds_zero.parameters import FlatParameters
from ds_zero.pieces import Owned, own_pieces, replace_parameters
from ds_zero.reducer import Reducer
from ds_zero.scaling import LossScaler, scale_outputs
from ds_zero.states import moments_of
from ds_zero.stepper import Stepper
from ds_zero.tensor_norms import TensorSums
from ds_zero.units import UnitPlan, merge_small_units, plan_units
from ds_zero.whole import WholeParameters

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
        self.moves = Moves(mesh, options)
        self.comm: Communicator = self.moves.comm
        self.ledger = Ledger(self.comm.rank)
        self.pool = BufferPool(self.comm, self.ledger, "buckets")
        self._handles: list[Any] = []
        self._in_backward = False
        self.plans = _plan(model, options)
        replaced = replace_deferred(model, self.plans, optimizer)
        self.units: dict[str, Unit] = {}
        self.flats: list[FlatParameters] = []
        self.scaler = LossScaler(options.precision.loss_scale if optimizer is not None else None)
        self.homes = Homes(options, self.comm, self.pool, self.ledger)
        self._build_flats(replaced, optimizer)
        self._share_the_rest(replaced)
        self.gradients = [self._build_gradients(flat) for flat in self.flats if flat.trainable]
        self._of_unit = {
            unit.label: [gradient for gradient in self.gradients if gradient.flat in unit.flats]
            for unit in self.units.values()
        }
        self.reducer = Reducer(self.gradients, self.moves.everyone)
        self.gatherer = Gatherer(self.units.values(), max_gathered_units=options.max_gathered_units)
        self.backward = Backward(self.gatherer, self._begin_backward, self._has_all_gradients)
        self._install()
        self.optimizer = self._wrap(optimizer)
        object.__setattr__(model, ATTRIBUTE, self)
        for flat in self.flats:
            self._mark(flat)

    # Building

    def _build_flats(self, sources: dict[int, torch.Tensor], optimizer: torch.optim.Optimizer | None) -> None:
        specs = plan_flats(self.model, self.plans, options=self.options, trains=optimizer is not None)
        needs_moments = optimizer is not None and self.homes.needs_moments
        self._moments = moments_of(optimizer) if optimizer is not None and needs_moments else ()
        named = dict(self.model.named_parameters())
        numels = [sum(named[name].numel() for name in spec.names) * spec.trainable for spec in specs]
        leaves = leaving(numels, self.options.offload.ratio)
        for spec, leaving_here in zip(specs, leaves, strict=True):
            self.flats.append(
                self._build_flat(spec, named, sources, moments=self._moments, leaves=leaving_here)
            )
        for plan in self.plans:
            mine = [flat for flat, spec in zip(self.flats, specs, strict=True) if spec.unit == plan.name]
            self.units[plan.name] = Unit(plan.label, mine)

    def _build_flat(
        self,
        spec: FlatSpec,
        named: dict[str, nn.Parameter],
        deferred: dict[int, torch.Tensor],
        *,
        moments: Sequence[str],
        leaves: bool,
    ) -> FlatParameters:
        parameters = [named[name] for name in spec.names]
        origins = [deferred.get(id(parameter), parameter.data) for parameter in parameters]
        shapes = [tuple(origin.shape) for origin in origins]
        layout = plan_flat_layout(spec.names, shapes, world_size=self.comm.world_size)
        flat = FlatParameters(
            spec.label,
            layout,
            parameters,
            moves=self.moves,
            dtype=spec.dtype,
            options=self.options,
            trainable=spec.trainable,
            ledger=self.ledger,
        )
        flat.place = self.homes.parameter_place(spec.label, layout.shard_numel * spec.dtype.itemsize)
        if spec.trainable:
            flat.states = self.homes.states_of(flat, moments, leaves=leaves)
        pending = [origin for origin in origins if is_deferred(origin)]
        ready = iter(materialize(pending, device=str(self.comm.device))) if pending else iter(())
        flat.adopt([next(ready) if is_deferred(origin) else origin for origin in origins])
        forget(pending)
        return flat

    def _build_gradients(self, flat: FlatParameters) -> FlatGradients:
        place = self.homes.gradient_place(flat)
        return FlatGradients(flat, options=self.options, pool=self.pool, ledger=self.ledger, place=place)

    def _share_the_rest(self, deferred: dict[int, torch.Tensor]) -> None:
        """Parameters outside the flats and buffers: on the device, as rank 0 has them, whole everywhere."""
        mine = {id(parameter) for flat in self.flats for parameter in flat.parameters}
        wide = tuple(f"{name}." for name in fp32_modules(self.model, self.options.precision))
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in mine:
                dtype = torch.float32 if name.startswith(wide) else self.options.precision.param_dtype
                (value,) = materialize([deferred.get(id(parameter), parameter.data)])
                value = value.to(self.comm.device, dtype if value.is_floating_point() else None)
                parameter.data = self._as_rank_0(value, name)
                self.ledger.add("parameters", parameter.nbytes)
        for name, holder, key, buffer in _buffers(self.model):
            (value,) = materialize([buffer])
            holder._buffers[key] = self._as_rank_0(value.to(self.comm.device), name)
            self.ledger.add("buffers", value.nbytes)

    def _as_rank_0(self, value: torch.Tensor, name: str) -> torch.Tensor:
        if self.moves.everyone.world_size > 1 and value.numel():
            value = value.contiguous()
            self.moves.spread(value.view(-1).view(torch.uint8), src=0, tag=f"{name} initial value")
        return value

    def _wrap(self, optimizer: torch.optim.Optimizer | None) -> ShardedOptimizer | None:
        if optimizer is None:
            return None
        whole = self._deal_whole(optimizer)
        owned = own_pieces(self.gradients, whole)
        listed = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        forgotten = [
            slot.name
            for gradient in self.gradients
            for slot, parameter in zip(gradient.flat.layout.slots, gradient.flat.parameters, strict=True)
            if slot.numel and id(parameter) not in listed
        ]
        if forgotten:
            logger.warning(
                "the optimizer leaves out trainable parameters; %s and others will not change", forgotten[0]
            )
        pieces = replace_parameters(optimizer, owned)
        if hasattr(optimizer, "sum_over_ranks") and self.options.stage > 0:
            optimizer.sum_over_ranks = TensorSums(  # type: ignore[attr-defined]
                pieces, self.gradients, self.comm
            )
        return ShardedOptimizer(
            optimizer,
            pieces,
            reducer=self.reducer,
            gradients=self.gradients,
            moves=self.moves,
            options=self.options,
            stepper=Stepper(optimizer, pieces, self.gradients, whole=whole, pool=self.pool),
            scaler=self.scaler,
            extend=self._extend,
            stray=self._stray_gradient,
        )

    def _extend(self, parameters: Sequence[nn.Parameter]) -> tuple[Sequence[FlatGradients], Sequence[Owned]]:
        from ds_zero.promotion import add_trainable  # builds on this module

        if self.optimizer is not None and whole_parameters(self.optimizer.inner):
            raise ZeroError("an optimizer that needs whole tensors takes its groups before shard()")
        pieces = add_trainable(self, parameters)
        return tuple(self.gradients), pieces

    def stepped_names(self) -> set[str]:
        """Names of the parameters that the optimizer steps on this rank, in parts or whole."""
        return {piece.name for piece in self.optimizer.pieces} if self.optimizer is not None else set()

    def _stray_gradient(self) -> str:
        """Name of a frozen parameter that autograd gave a gradient, empty if there is none."""
        trained = {id(parameter) for gradient in self.gradients for parameter in gradient.flat.parameters}
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in trained and parameter.grad is not None:
                return name
        return ""

    def remove_flat(self, unit: Unit, flat: FlatParameters) -> None:
        """Forget a frozen flat whose parameters are plain again."""
        unit.flats = tuple(other for other in unit.flats if other is not flat)
        self.flats.remove(flat)
        self.ledger.add("parameters", -flat.shard.nbytes)

    def add_flat(self, unit: Unit, spec: FlatSpec, named: dict[str, nn.Parameter]) -> None:
        """Build a flat of parameters that are plain now, and tie it in.

        Collective: every rank, in the same order.
        """
        flat = self._build_flat(spec, named, {}, moments=self._moments, leaves=True)
        unit.flats = (*unit.flats, flat)
        self.flats.append(flat)
        self._mark(flat)
        if spec.trainable:
            gradient = self._build_gradients(flat)
            self.gradients.append(gradient)
            self._of_unit[unit.label].append(gradient)
            self.reducer.add(gradient)
            self._install_gradient(gradient, unit)

    def _mark(self, flat: FlatParameters) -> None:
        for parameter in flat.parameters:
            setattr(parameter, PARAMETER_ATTRIBUTE, weakref.ref(self))

    def _deal_whole(self, optimizer: torch.optim.Optimizer) -> WholeParameters:
        needed = whole_parameters(optimizer)
        names = [name for name, parameter in self.model.named_parameters() if id(parameter) in needed]
        if names and any(gradient.is_stepped_apart for gradient in self.gradients):
            raise ZeroError(
                f"{type(optimizer).__name__} needs whole parameters ({names[0]}), dealt to ranks on the "
                "device; it does not go with offload, with narrow moments or with narrow accumulation"
            )
        return WholeParameters(
            self.gradients, names, comm=self.comm, pool=self.pool, everywhere=self.options.stage == 0
        )

    # Hooks

    def _install(self) -> None:
        for gradient in self.gradients:
            unit = next(unit for unit in self.units.values() if gradient.flat in unit.flats)
            self._install_gradient(gradient, unit)
        modules = dict(self.model.named_modules())
        if self.options.stage == 3:
            for plan in self.plans:
                self._bracket(plan, modules)
        self._install_state_dicts(modules)
        self._install_dtypes(modules)
        self.model.zero_grad = self.zero_grad  # type: ignore[method-assign]

    def _install_gradient(self, gradient: FlatGradients, unit: Unit) -> None:
        for index, parameter in enumerate(gradient.flat.parameters):
            hook = self._gradient_hook(gradient, index, unit)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
            if self.options.stage == 3:
                self._handles.append(parameter.register_hook(partial(self.backward.ensure, unit)))

    def _install_state_dicts(self, modules: dict[str, nn.Module]) -> None:
        if self.options.stage == 3:
            for name, unit in self.units.items():
                self._handles += StateDictBracket(modules[name], unit, self.gatherer).handles
        elif any(flat.has_master or flat.keeps_master_elsewhere for flat in self.flats):
            # A bucket spans modules that are loaded one after the other: each one's values count at once.
            for module in modules.values():
                own = [parameter for parameter in module._parameters.values() if parameter is not None]
                for unit in dict.fromkeys(self.unit_of(parameter) for parameter in own):
                    if unit is not None:
                        self._handles += StateDictBracket(module, unit, self.gatherer).handles

    def _install_dtypes(self, modules: dict[str, nn.Module]) -> None:
        precision = self.options.precision
        if precision.is_mixed:
            dtype = precision.param_dtype
            self._handles += CastBracket(self.model, inside=dtype, outside=None).handles
            for name in fp32_modules(self.model, precision):
                self._handles += CastBracket(modules[name], inside=torch.float32, outside=dtype).handles
        if precision.autocast is not None:
            kind, dtype = self.comm.device.type, DTYPES[precision.autocast]
            self._handles += AutocastBracket(self.model, device_type=kind, dtype=dtype).handles
        if self.scaler.options is not None:
            self._handles.append(self.model.register_forward_hook(self._scale_outputs))

    def _scale_outputs(self, module: nn.Module, args: Any, output: Any) -> Any:
        return scale_outputs(output, self.scaler) if torch.is_grad_enabled() else output

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
        self.scaler.end_backward()

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
        try:
            self.homes.close()
        finally:  # a write that nobody waited for may have failed
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
