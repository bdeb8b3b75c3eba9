"""What every block keeps and how long it takes under each policy, measured on a sample batch."""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ds_zero.engine import ATTRIBUTE
from ds_zero.hooks import differentiable, tensors_in
from ds_zero.live_storages import LiveStorages
from ds_zero.recompute_plan import POLICIES, BlockCost
from ds_zero.shard import no_sync

ROUNDS = 3

Wrap = Callable[[nn.Module, str], Callable[..., Any]]


def measure(
    model: nn.Module, blocks: Mapping[str, nn.Module], sample: Callable[[], torch.Tensor], *, wrap: Wrap
) -> dict[str, dict[str, BlockCost]]:
    """Costs of every block under every policy.

    Each block is run alone, forward and backward, on the arguments that it gets in one call of ``sample``;
    the fastest of three runs counts.

    Collective when the model is sharded, and then the same on every rank.
    """
    engine = model.__dict__.get(ATTRIBUTE)
    costs: dict[str, dict[str, BlockCost]] = {}
    with no_sync(model) if engine is not None else nullcontext():
        calls = _record_calls(blocks, sample)
        for name, block in blocks.items():
            costs[name] = {policy: _cost(model, block, calls[name], policy, wrap) for policy in POLICIES}
    if engine is None:
        return costs
    rows = {
        name: {policy: [cost.saved_bytes, cost.seconds] for policy, cost in options.items()}
        for name, options in costs.items()
    }
    first = engine.comm.all_gather_object(rows, tag="costs of recomputation")[0]
    return {
        name: {policy: BlockCost(saved_bytes=row[0], seconds=row[1]) for policy, row in options.items()}
        for name, options in first.items()
    }


def _record_calls(
    blocks: Mapping[str, nn.Module], sample: Callable[[], torch.Tensor]
) -> dict[str, tuple[Any, Any]]:
    calls: dict[str, tuple[Any, Any]] = {}
    handles = []
    for name, block in blocks.items():

        def keep(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            calls.setdefault(name, (args, kwargs))

        handles.append(block.register_forward_pre_hook(keep, with_kwargs=True))
    try:
        with torch.no_grad():
            sample()
    finally:
        for handle in handles:
            handle.remove()
    missing = [name for name in blocks if name not in calls]
    if missing:
        raise ValueError(f"recompute: the sample does not reach the block {missing[0]}")
    return calls


def _cost(model: nn.Module, block: nn.Module, call: tuple[Any, Any], policy: str, wrap: Wrap) -> BlockCost:
    if policy != "none":
        block.forward = wrap(block, policy)
    try:
        saved = _saved_bytes(model, block, call)
        seconds = min(_seconds(block, call) for _ in range(ROUNDS))
    finally:
        block.__dict__.pop("forward", None)
    return BlockCost(saved_bytes=saved, seconds=seconds)


def _seconds(block: nn.Module, call: tuple[Any, Any]) -> float:
    args, kwargs = _as_leaves(call)
    given = [*tensors_in(args), *tensors_in(kwargs)]
    inputs = [tensor for tensor in given if tensor.requires_grad]
    begin_s = time.perf_counter()
    with torch.enable_grad():
        output = differentiable(block(*args, **kwargs))
    torch.autograd.grad(output, inputs, [torch.ones_like(t) for t in output], allow_unused=True)
    return time.perf_counter() - begin_s


def _saved_bytes(model: nn.Module, block: nn.Module, call: tuple[Any, Any]) -> int:
    args, kwargs = _as_leaves(call)
    engine = model.__dict__.get(ATTRIBUTE)
    gathered = [flat.full for flat in engine.flats] if engine is not None else []
    ignored = [*model.parameters(), *model.buffers(), *gathered]
    given = [*tensors_in(args), *tensors_in(kwargs)]
    inputs = [tensor for tensor in given if tensor.requires_grad]
    with LiveStorages(ignored=ignored, counted=inputs) as live, torch.enable_grad():
        output = block(*args, **kwargs)
    held = live.held_bytes(without=tensors_in(output))
    # Let backward run, so that an engine with hooks ends what it began.
    results = differentiable(output)
    torch.autograd.grad(results, inputs, [torch.ones_like(t) for t in results], allow_unused=True)
    return held


def _as_leaves(call: tuple[Any, Any]) -> tuple[Any, Any]:
    args, kwargs = call

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.detach().requires_grad_()
        return value

    return tuple(leaf(value) for value in args), {key: leaf(value) for key, value in kwargs.items()}
