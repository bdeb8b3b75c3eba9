"""Bytes a sharded model holds on this rank, counted tensor by tensor, and bytes it would hold, planned."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

import ds_spec
from ds_zero.config import Offload, Precision, ZeroOptions, check_options, fp32_modules
from ds_zero.engine import engine_of
from ds_zero.flat_plan import FlatSpec, plan_flats
from ds_zero.homes import leaving
from ds_zero.layout import FlatLayout, plan_flat_layout
from ds_zero.reducer import MAX_IN_FLIGHT
from ds_zero.states import trial_state
from ds_zero.units import merge_small_units, plan_units

COMPONENTS = ("parameters", "gradients", "optimizer", "gathered", "buckets", "buffers", "host")
# Staging buffers beside files: one in use, one being read, one being written.
NUM_STAGING = 3
FP32_BYTES = 4


def held_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes this rank holds now by component, each storage counted once.

    ``gradients`` are what stays between backward and step: the full buffer at stages 0 and 1, the reduced
    slice above; ``buckets`` are full buffers that stages 2 and 3 reuse during backward; ``optimizer`` are
    master weights and the state the optimizer made; ``gathered`` is what stage 3 holds for a while; ``host``
    is what offload keeps on the CPU, staging buffers of files among it.
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
    if engine.options.offload.optimizer == "device":
        held["optimizer"] += sum(flat.states.nbytes for flat in engine.flats if flat.states is not None)
    held["host"] = engine.ledger.held.get("host", 0)
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
    offload: Offload | None = None,
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
        offload=offload,
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
    specs = plan_flats(model, plans, options=options, trains=True)
    flats = [
        (
            spec,
            plan_flat_layout(spec.names, [tuple(shapes[n].shape) for n in spec.names], world_size=world_size),
        )
        for spec in specs
    ]
    trained = [(spec, layout) for spec, layout in flats if spec.trainable]
    planned: dict[str, int] = dict.fromkeys(COMPONENTS, 0)
    planned["parameters"] = _parameter_bytes(flats, stage) + _plain_bytes(model, specs, options)
    planned["gathered"] = _gathered_bytes(flats, options)
    planned["gradients"] = sum(_gradient_bytes(spec, layout, options) for spec, layout in trained)
    planned["buckets"] = _bucket_bytes(trained, options)
    masters = [layout for spec, layout in trained if spec.dtype is not torch.float32]
    stepped = [layout.padded_numel if stage == 0 else layout.shard_numel for layout in masters]
    planned["optimizer"] = sum(stepped) * FP32_BYTES
    planned["optimizer"] += _state_bytes([layout for _, layout in trained], optimizer, stage)
    _move_off(planned, flats, optimizer, options)
    planned["buffers"] = _bytes(model.buffers(), set())
    return planned


Flats = Sequence[tuple[FlatSpec, FlatLayout]]


def _layout(spec: FlatSpec, parameters: dict[str, nn.Parameter], world_size: int) -> FlatLayout:
    shapes = [tuple(parameters[name].shape) for name in spec.names]
    return plan_flat_layout(spec.names, shapes, world_size=world_size)


def _parameter_bytes(flats: Flats, stage: int) -> int:
    sizes = [
        (layout.shard_numel if stage == 3 else layout.padded_numel, spec.dtype) for spec, layout in flats
    ]
    return sum(numel * dtype.itemsize for numel, dtype in sizes)


def _plain_bytes(model: nn.Module, specs: Sequence[FlatSpec], options: ZeroOptions) -> int:
    """Of parameters that lie in no flat."""
    flat = {name for spec in specs for name in spec.names}
    wide = tuple(f"{name}." for name in fp32_modules(model, options.precision))
    total = 0
    for name, parameter in model.named_parameters():
        if name not in flat:
            dtype = torch.float32 if name.startswith(wide) else options.precision.param_dtype
            floating = parameter.is_floating_point()
            total += parameter.numel() * (dtype.itemsize if floating else parameter.element_size())
    return total


def _gathered_bytes(flats: Flats, options: ZeroOptions) -> int:
    if options.stage < 3:
        return 0
    units: dict[str, int] = {}
    for spec, layout in flats:
        units[spec.unit] = units.get(spec.unit, 0) + layout.padded_numel * spec.dtype.itemsize
    return sum(sorted(units.values(), reverse=True)[: options.max_gathered_units])


def _gradient_bytes(spec: FlatSpec, layout: FlatLayout, options: ZeroOptions) -> int:
    sent = _grad_dtype(spec, options)
    kept = torch.float32 if sent is torch.float32 else options.precision.accumulate_dtype
    if options.stage >= 2:
        return layout.shard_numel * kept.itemsize
    full = layout.padded_numel * sent.itemsize
    if sent is kept:
        return full
    whole = layout.padded_numel * kept.itemsize if options.stage == 0 else 0
    return full + layout.shard_numel * kept.itemsize + whole


def _grad_dtype(spec: FlatSpec, options: ZeroOptions) -> torch.dtype:
    return options.precision.grad_dtype if options.precision.grad is not None else spec.dtype


def _bucket_bytes(trained: Flats, options: ZeroOptions) -> int:
    if options.stage < 2:
        return 0
    sizes: dict[int, int] = {}
    for spec, layout in trained:
        num_bytes = layout.padded_numel * _grad_dtype(spec, options).itemsize
        sizes[num_bytes] = sizes.get(num_bytes, 0) + 1
    # Reductions in flight and the flat being filled hold one buffer each, of their size.
    return sum(num_bytes * min(count, MAX_IN_FLIGHT + 1) for num_bytes, count in sizes.items())


def _move_off(
    planned: dict[str, int], flats: Flats, optimizer: torch.optim.Optimizer | None, options: ZeroOptions
) -> None:
    """Count on the host what offload takes off the device; of files only the staging buffers."""
    offload, stage = options.offload, options.stage
    itemsize = (
        sum(value.element_size() for _, value in trial_state(optimizer)) if optimizer is not None else 0
    )
    leaves = leaving([sum(s.numel for s in lay.slots) * spec.trainable for spec, lay in flats], offload.ratio)
    places: dict[str, list[int]] = {"cpu": [], "file": []}
    for (spec, layout), leaving_here in zip(flats, leaves, strict=True):
        stepped = layout.padded_numel if stage == 0 else layout.shard_numel
        if offload.optimizer != "device" and spec.trainable and leaving_here:
            places[offload.optimizer].append(stepped * (FP32_BYTES + itemsize))
            master = stepped * FP32_BYTES if spec.dtype is not torch.float32 else 0
            elements = sum(slot.numel for slot in layout.slots) if stage == 0 else _stepped_numel([layout], 0)
            planned["optimizer"] -= master + elements * itemsize
        if offload.gradients != "device" and spec.trainable:
            places[offload.gradients].append(layout.shard_numel * FP32_BYTES)
            planned["gradients"] -= _gradient_bytes(spec, layout, options)
        if offload.parameters != "device":
            places[offload.parameters].append(layout.shard_numel * spec.dtype.itemsize)
            planned["parameters"] -= layout.shard_numel * spec.dtype.itemsize
    planned["optimizer"] = max(0, planned["optimizer"])
    planned["host"] = sum(places["cpu"]) + NUM_STAGING * max(places["file"], default=0)


def _state_bytes(trained: Sequence[FlatLayout], optimizer: torch.optim.Optimizer | None, stage: int) -> int:
    """State of the optimizer on the rank that steps most, from what one element makes in a trial step."""
    if optimizer is None or not trained:
        return 0
    if stage == 0:
        numel = sum(slot.numel for layout in trained for slot in layout.slots)
    else:
        numel = max(_stepped_numel(trained, rank) for rank in range(trained[0].world_size))
    return numel * sum(value.element_size() for _, value in trial_state(optimizer))


def _stepped_numel(trained: Sequence[FlatLayout], rank: int) -> int:
    """Elements of parameters, without padding, in ``rank``'s slices."""
    return sum(piece.numel for layout in trained for piece in layout.pieces(*layout.shard_range(rank)))


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
