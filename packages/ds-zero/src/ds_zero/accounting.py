"""Bytes a sharded model holds on this rank, counted tensor by tensor, and bytes it would hold, planned."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

import ds_spec
from ds_zero.config import Precision, ZeroOptions, check_options
from ds_zero.engine import engine_of
from ds_zero.layout import FlatLayout, plan_flat_layout
from ds_zero.reducer import MAX_IN_FLIGHT
from ds_zero.units import UnitPlan, merge_small_units, plan_units

COMPONENTS = ("parameters", "gradients", "optimizer", "gathered", "buckets", "buffers")
FP32_BYTES = 4


def held_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes this rank holds now by component, each storage counted once.

    ``gradients`` are what stays between backward and step: the full buffer at stages 0 and 1, the reduced
    slice above; ``buckets`` are full buffers that stages 2 and 3 reuse during backward; ``optimizer`` are
    master weights and the state the optimizer made; ``gathered`` is what stage 3 holds for a while.
    """
    engine = engine_of(model)
    seen: set[int] = set()
    whole = [flat.shard for flat in engine.flats]
    held = {
        "parameters": _bytes(
            [*whole, *model.parameters()], seen, skip=[f.full for f in engine.flats if f.stage == 3]
        )
    }
    held["gathered"] = sum(flat.full.untyped_storage().nbytes() for flat in engine.flats if flat.stage == 3)
    buffers = [t for g in engine.gradients for t in (g.full, g.shard, g.whole) if t is not None]
    held["buckets"] = _bytes(engine.pool.free(), seen)
    held["gradients"] = _bytes(buffers, seen)
    masters = [flat.master for flat in engine.flats if flat.master is not None]
    states = engine.optimizer.state.values() if engine.optimizer is not None else ()
    tensors = [
        value
        for state in states
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    held["optimizer"] = _bytes([*masters, *tensors], seen)
    held["buffers"] = _bytes(model.buffers(), seen)
    return {component: held[component] for component in COMPONENTS}


def peak_bytes(model: nn.Module) -> int:
    """Most bytes the engine's own buffers held at once so far, with the optimizer state of now."""
    engine = engine_of(model)
    masters = sum(flat.master.nbytes for flat in engine.flats if flat.has_master and flat.master is not None)
    return engine.ledger.peak_bytes + held_bytes(model)["optimizer"] - masters


def _bytes(tensors: Iterable[torch.Tensor], seen: set[int], skip: Sequence[torch.Tensor] = ()) -> int:
    total = 0
    left_out = {tensor.untyped_storage()._cdata for tensor in skip}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and storage._cdata not in left_out:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total


def plan_bytes(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    stage: int,
    world_size: int,
    precision: str | Precision = "fp32",
    units: Sequence[str] | None = None,
    max_gathered_units: int = 2,
    bucket_numel: int = 1 << 22,
) -> dict[str, int]:
    """Bytes one rank will hold at its peak by component, from shapes alone; the model may be on meta.

    Call it before :func:`ds_zero.shard`. Activations and communication scratch are not counted.
    """
    options = check_options(
        stage=stage,
        precision=precision,
        clip_norm=None,
        units=units,
        max_gathered_units=max_gathered_units,
        bucket_numel=bucket_numel,
        on_nonfinite="raise",
    )
    plans = plan_units(model, names=options.units)
    shapes = dict(model.named_parameters())
    if stage < 3:
        numels = {name: parameter.numel() for name, parameter in shapes.items()}
        plans = merge_small_units(plans, numels, bucket_numel=bucket_numel)
    trained = _layouts(plans, shapes, world_size, trainable=True)
    frozen = _layouts(plans, shapes, world_size, trainable=False)
    planned = _plan_components(trained, frozen, options)
    planned["optimizer"] += _state_bytes(trained, optimizer, stage)
    planned["buffers"] = _bytes(model.buffers(), set())
    return planned


def _layouts(
    plans: Sequence[UnitPlan], parameters: dict[str, nn.Parameter], world_size: int, *, trainable: bool
) -> list[FlatLayout]:
    layouts = []
    for plan in plans:
        names = [name for name in plan.parameters if parameters[name].requires_grad is trainable]
        shapes = [tuple(parameters[name].shape) for name in names]
        layouts.append(plan_flat_layout(names, shapes, world_size=world_size))
    return layouts


def _plan_components(
    trained: Sequence[FlatLayout], frozen: Sequence[FlatLayout], options: ZeroOptions
) -> dict[str, int]:
    itemsize = options.precision.param_dtype.itemsize
    stage = options.stage
    full = sum(layout.padded_numel for layout in trained)
    shard = sum(layout.shard_numel for layout in trained)
    planned: dict[str, int] = dict.fromkeys(COMPONENTS, 0)
    if stage == 3:
        planned["parameters"] = (shard + sum(layout.shard_numel for layout in frozen)) * itemsize
        sizes = sorted(
            (t.padded_numel + f.padded_numel for t, f in zip(trained, frozen, strict=True)), reverse=True
        )
        planned["gathered"] = sum(sizes[: options.max_gathered_units]) * itemsize
    else:
        exact = sum(slot.numel for layout in frozen for slot in layout.slots)
        planned["parameters"] = (full + exact) * itemsize
    planned["gradients"] = _gradient_bytes(options, full, shard)
    planned["buckets"] = _bucket_bytes(trained, options)
    if options.precision.has_master:
        planned["optimizer"] = (full if stage == 0 else shard) * FP32_BYTES
    return planned


def _gradient_bytes(options: ZeroOptions, full: int, shard: int) -> int:
    mixed = options.precision.has_master
    if options.stage >= 2:
        return shard * FP32_BYTES
    reduced = shard * FP32_BYTES if mixed else 0
    whole = full * FP32_BYTES if mixed and options.stage == 0 else 0
    return full * options.precision.param_dtype.itemsize + reduced + whole


def _bucket_bytes(trained: Sequence[FlatLayout], options: ZeroOptions) -> int:
    if options.stage < 2:
        return 0
    sizes: dict[int, int] = {}
    for layout in trained:
        sizes[layout.padded_numel] = sizes.get(layout.padded_numel, 0) + 1
    # Reductions in flight and the flat being filled hold one buffer each, of their size.
    pooled = sum(numel * min(count, MAX_IN_FLIGHT + 1) for numel, count in sizes.items())
    return pooled * options.precision.param_dtype.itemsize


def _state_bytes(trained: Sequence[FlatLayout], optimizer: torch.optim.Optimizer | None, stage: int) -> int:
    """State of the optimizer on the rank that steps most, from what one element makes in a trial step."""
    if optimizer is None or not trained:
        return 0
    if stage == 0:
        numel = sum(slot.numel for layout in trained for slot in layout.slots)
    else:
        numel = max(_stepped_numel(trained, rank) for rank in range(trained[0].world_size))
    return numel * _state_bytes_per_element(optimizer)


def _stepped_numel(trained: Sequence[FlatLayout], rank: int) -> int:
    """Elements of parameters, without padding, in ``rank``'s slices."""
    return sum(piece.numel for layout in trained for piece in layout.pieces(*layout.shard_range(rank)))


def _state_bytes_per_element(optimizer: torch.optim.Optimizer) -> int:
    probe = nn.Parameter(torch.zeros(64))
    probe.grad = torch.ones(64)
    options = {
        key: value for key, value in optimizer.param_groups[0].items() if key not in ("params", "initial_lr")
    }
    trial = type(optimizer).__new__(type(optimizer))
    trial.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    torch.optim.Optimizer.__init__(trial, [{"params": [probe], **options}], dict(optimizer.defaults))
    trial.step()
    state = trial.state.get(probe, {}).values()
    return sum(v.element_size() for v in state if isinstance(v, torch.Tensor) and v.numel() == probe.numel())


def shard_layout(model: nn.Module) -> ds_spec.ShardLayout:
    """Which rank owns which elements of every flat parameter, as every checkpoint and tool can read it."""
    engine = engine_of(model)
    tensors, pieces = [], []
    for flat in engine.flats:
        dtype = str(flat.dtype).removeprefix("torch.")
        for slot in flat.layout.slots:
            tensors.append(ds_spec.TensorSpec(name=slot.name, shape=slot.shape, dtype=dtype))
        for rank in range(engine.comm.world_size):
            first, last = flat.layout.shard_range(rank)
            for piece in flat.layout.pieces(first, last):
                slot = flat.layout.slots[piece.slot_index]
                pieces.append(
                    ds_spec.ShardPiece(
                        tensor=slot.name,
                        rank=rank,
                        start_numel=piece.start_numel - slot.start_numel,
                        numel=piece.numel,
                        buffer=flat.label,
                        buffer_start_numel=piece.start_numel - first,
                    )
                )
    return ds_spec.ShardLayout(
        world_size=engine.comm.world_size, tensors=tuple(tensors), pieces=tuple(pieces)
    )
