"""The public calls: shard a model and its optimizer, look into whole parameters, take it all off again."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ds_comm import Mesh
from ds_zero.config import Offload, Precision, Reach, check_options
from ds_zero.engine import ATTRIBUTE, PARAMETER_ATTRIBUTE, Engine, engine_of
from ds_zero.errors import ZeroError
from ds_zero.gatherer import Unit
from ds_zero.optimizer import ShardedOptimizer

# Neighbouring units below this many elements share one reduction at stages 0 to 2 (16 MiB in fp32).
BUCKET_NUMEL = 1 << 22


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    stage: int = 3,
    mesh: Mesh | None = None,
    precision: str | Precision = "fp32",
    offload: Offload | None = None,
    reach: Reach | None = None,
    clip_norm: float | None = None,
    units: Sequence[str] | None = None,
    max_gathered_units: int = 2,
    bucket_numel: int = BUCKET_NUMEL,
    on_nonfinite: str = "raise",
) -> tuple[nn.Module, ShardedOptimizer | None]:
    """Shard a model's parameters, gradients and optimizer state over the ``dp`` axis of a mesh, in place.

    The model stays the same object with hooks installed; gradients are the mean over ranks and are reduced
    after every backward, at every stage, so all stages give the same bits. Rank 0's initial values count.

    Collective: every rank, with the same arguments.

    Args:
        model: any module; its floating parameters are cast to ``precision.param``.
        optimizer: a torch optimizer over ``model.parameters()`` that has not stepped yet. One that needs
            whole tensors (Muon, Adafactor) gets them, dealt out to ranks. ``None`` is for inference.
        stage: 0 shards nothing, 1 the optimizer state, 2 gradients too, 3 parameters too.
        mesh: ranks to shard over, default all of them (one process alone needs no set-up).
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"`` (both with fp32 master weights and sums, fp16 with
            dynamic loss scaling), or a :class:`Precision`.
        offload: what lies on the CPU or in files between uses; ``None`` keeps all on the device.
        reach: quantized and node-wise communication; ``None`` sends everything as it is over all ranks.
        clip_norm: limit of the global gradient norm, ``None`` for no clipping.
        units: names of modules that are gathered and reduced together; default each block of the large
            ``ModuleList``s and ``Sequential``s.
        max_gathered_units: at stage 3, look ahead only while fewer units than this are gathered.
        bucket_numel: at stages 0 to 2, neighbouring units below this many elements are reduced together.
        on_nonfinite: ``"raise"`` or ``"skip"`` when the gradient norm is not finite; weights stay.

    Returns:
        The model, and the optimizer to step; both drop-in.

    Raises:
        ValueError: a setting is out of range, or the optimizer does not fit the model.
        SwapError: there is no room for the files, or the folder cannot be used.
        ZeroError: the model is sharded already, or the optimizer cannot be sharded.

    Source: ZeRO, arXiv:1910.02054.
    """
    options = check_options(
        stage=stage,
        precision=precision,
        offload=offload,
        reach=reach,
        clip_norm=clip_norm,
        units=units,
        max_gathered_units=max_gathered_units,
        bucket_numel=bucket_numel,
        on_nonfinite=on_nonfinite,
    )
    if ATTRIBUTE in model.__dict__:
        raise ZeroError(f"this {type(model).__name__} is sharded already; call ds_zero.close(model) first")
    engine = Engine(model, optimizer, mesh=mesh or Mesh.world(), options=options)
    return model, engine.optimizer


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Keep the gradients of backwards inside on this rank; the next backward outside reduces their sum.

    Saves traffic under accumulation, and holds the full gradient at every stage meanwhile. The sums are then
    in another order than when every backward reduces, so the last bits differ.
    """
    reducer = engine_of(model).reducer
    before = reducer.enabled
    reducer.enabled = False
    try:
        yield
    finally:
        reducer.enabled = before


@contextmanager
def gathered(parameters: nn.Parameter | Iterable[nn.Parameter], *, src: int | None = None) -> Iterator[None]:
    """Whole parameters inside, to read or to edit in place (under ``torch.no_grad``).

    Collective: every rank, same parameters.

    Args:
        parameters: one or several parameters of sharded models; their whole units are gathered. Others, such
            as plain or frozen whole ones, are left as they are.
        src: rank whose edits count. ``None``: every rank makes the same edits itself.
    """
    wanted = [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
    holders = dict.fromkeys(holder for holder in map(_holder, wanted) if holder is not None)
    for engine, unit in holders:
        engine.gatherer.pin(unit)
    try:
        yield
        with torch.no_grad():
            for engine, unit in holders:
                for flat in unit.flats:
                    if src is not None:
                        engine.moves.spread(flat.full, src=src, tag=f"{flat.label} edited parameters")
                    flat.commit()
    finally:
        for engine, unit in holders:
            engine.gatherer.unpin(unit)


def _holder(parameter: nn.Parameter) -> tuple[Engine, Unit] | None:
    reference = getattr(parameter, PARAMETER_ATTRIBUTE, None)
    engine: Engine | None = reference() if reference is not None else None
    unit = engine.unit_of(parameter) if engine is not None else None
    return None if engine is None or unit is None else (engine, unit)


def full_state_dict(model: nn.Module, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
    """The whole model on the CPU under its own names, one unit gathered at a time.

    Collective: every rank. Tied parameters appear under every name, sharing memory.

    Args:
        model: the sharded model.
        rank0_only: ranks other than 0 take part and return an empty dict.
    """
    engine = engine_of(model)
    keeps = not rank0_only or engine.comm.rank == 0
    whole: dict[int, torch.Tensor] = {}
    for unit in engine.units.values():
        engine.gatherer.pin(unit)
        if keeps:
            for flat in unit.flats:
                whole |= {id(parameter): _copy(parameter) for parameter in flat.parameters}
        engine.gatherer.unpin(unit)
    if not keeps:
        return {}
    state = {
        name: whole.get(id(p), p.detach().cpu()) for name, p in model.named_parameters(remove_duplicate=False)
    }
    persistent = set(_persistent_buffers(model))
    return state | {name: _copy(buffer) for name, buffer in model.named_buffers() if name in persistent}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _persistent_buffers(model: nn.Module) -> Iterator[str]:
    for prefix, module in model.named_modules():
        for key in module._buffers:
            if key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key


def is_sharded(model: nn.Module) -> bool:
    """Whether :func:`shard` has been called on ``model`` and :func:`close` has not."""
    return ATTRIBUTE in model.__dict__


def close(model: nn.Module) -> None:
    """Take the engine off ``model``: hooks gone, plain whole parameters on every rank.

    Collective: every rank.
    """
    engine_of(model).close()
