"""How each system of train_step.py trains: a function per system that gives the function of one step.

Runs on a rank. Peers get fused AdamW, views of buckets as gradients, and bf16 on the wire where they can.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import deepspeed_environment
import torch
import torch.distributed as dist
from torch import nn
from training_cases import CLIP_NORM, LEARNING_RATE, Case, System

from ds.demo.model import GPT, GPTConfig, next_token_loss

# Trains on one batch (B, T + 1) and returns the loss.
Step = Callable[[torch.Tensor], float]


def build(system: System, case: Case) -> tuple[Step, int]:
    """The step function of a system for a fresh model, and the model's number of parameters.

    Collective: every rank.
    """
    model = build_model(case)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return BUILDERS[system.kind](model, system, case), num_parameters


def build_model(case: Case) -> GPT:
    """The model, the same on every rank."""
    torch.manual_seed(0)
    heads = case.width // 64
    return GPT(GPTConfig(vocabulary=case.vocabulary, width=case.width, depth=case.depth, heads=heads))


def adamw(parameters: Any) -> torch.optim.AdamW:
    """The optimizer of every system."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01, fused=True)


def _local(model: nn.Module, system: System, case: Case) -> Step:
    if case.dtype == "bf16":
        return _local_bf16(model)
    return _plain_step(model, adamw(model.parameters()), contextlib.nullcontext)


def _local_bf16(model: nn.Module) -> Step:
    """Mixed precision by hand: a bf16 model, fp32 master weights."""
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    model.to(torch.bfloat16)
    optimizer = adamw(masters)

    def step(batch: torch.Tensor) -> float:
        loss = next_token_loss(model, batch)
        loss.backward()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            master.grad = parameter.grad.float()  # type: ignore[union-attr]
            parameter.grad = None
        nn.utils.clip_grad_norm_(masters, CLIP_NORM)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
        return loss.item()

    return step


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, precision: Callable[[], Any]) -> Step:
    def step(batch: torch.Tensor) -> float:
        with precision():
            loss = next_token_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _wrap_ddp(model: nn.Module, case: Case) -> tuple[nn.Module, Callable[[], Any]]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if case.dtype == "fp32":
        return wrapped, contextlib.nullcontext
    wrapped.register_comm_hook(None, bf16_compress_hook)
    return wrapped, lambda: torch.autocast("cpu", torch.bfloat16)


def _ddp(model: nn.Module, system: System, case: Case) -> Step:
    wrapped, precision = _wrap_ddp(model, case)
    return _plain_step(wrapped, adamw(wrapped.parameters()), precision)


def _zero_redundancy(model: nn.Module, system: System, case: Case) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped, precision = _wrap_ddp(model, case)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(),
        torch.optim.AdamW,
        parameters_as_bucket_view=True,
        lr=LEARNING_RATE,
        weight_decay=0.01,
        fused=True,
    )
    return _plain_step(wrapped, optimizer, precision)


def _fsdp2(model: nn.Module, system: System, case: Case) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    low = torch.bfloat16 if case.dtype == "bf16" else None
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low),
        "reshard_after_forward": system.stage == 3,
    }
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **options)
    fully_shard(model, **options)
    return _plain_step(model, adamw(model.parameters()), contextlib.nullcontext)


def _deepspeed(model: nn.Module, system: System, case: Case) -> Step:
    deepspeed_environment.reach()
    deepspeed: Any = importlib.import_module("deepspeed")

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=adamw(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": case.batch_size,
            "gradient_clipping": CLIP_NORM,
            "zero_optimization": {"stage": system.stage},
            "bf16": {"enabled": case.dtype == "bf16"},
            "steps_per_print": 10**9,
        },
    )

    def step(batch: torch.Tensor) -> float:
        loss = next_token_loss(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def _ds(model: nn.Module, system: System, case: Case) -> Step:
    import ds_comm
    import ds_zero

    ds_comm.init(device="cpu")
    model, optimizer = ds_zero.shard(
        model, adamw(model.parameters()), stage=system.stage or 0, precision=case.dtype, clip_norm=CLIP_NORM
    )

    def step(batch: torch.Tensor) -> float:
        loss = next_token_loss(model, batch)
        loss.backward()
        optimizer.step()  # type: ignore[union-attr]
        optimizer.zero_grad()  # type: ignore[union-attr]
        return loss.item()

    return step


BUILDERS: dict[str, Callable[[GPT, System, Case], Step]] = {
    "local": _local,
    "ds": _ds,
    "ddp": _ddp,
    "zero_redundancy": _zero_redundancy,
    "fsdp2": _fsdp2,
    "deepspeed": _deepspeed,
}
