"""The systems that train_step.py compares: how each one wraps the same model and takes one step."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from ds.demo.model import GPT, GPTConfig, next_token_loss
from torch import nn

CLIP_NORM = 1.0
LEARNING_RATE = 1e-4
Step = Callable[[torch.Tensor], torch.Tensor]

SIZES = {
    "27M": {"vocabulary": 8192, "context": 256, "width": 512, "depth": 7, "heads": 8},
    "110M": {"vocabulary": 32000, "context": 256, "width": 768, "depth": 12, "heads": 12},
}
# Case -> (micro-batch, sequence length).
LOADS = {"small": (1, 64), "large": (2, 256)}


def build(size: str) -> GPT:
    """The model, the same on every rank and in every system."""
    torch.manual_seed(0)
    return GPT(GPTConfig(**SIZES[size]))


def adamw(parameters: Any) -> torch.optim.AdamW:
    """The optimizer every system gets."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def autocast(dtype: str) -> contextlib.AbstractContextManager[None]:
    """bf16 autocast for systems that keep fp32 weights."""
    return torch.autocast("cpu", torch.bfloat16) if dtype == "bf16" else contextlib.nullcontext()


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: str) -> Step:
    """Forward, backward, clip, step as a plain loop writes it."""

    def step(batch: torch.Tensor) -> torch.Tensor:
        with autocast(dtype):
            loss = next_token_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def no_communication(model: GPT, dtype: str) -> Step:
    """Every rank for itself: the time nobody can beat without touching the computation."""
    return plain_step(model, adamw(model.parameters()), dtype)


def ddp(model: GPT, dtype: str) -> Step:
    """torch DistributedDataParallel."""
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return plain_step(wrapped, adamw(model.parameters()), dtype)


def zero_redundancy(model: GPT, dtype: str) -> Step:
    """DDP with torch's ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=LEARNING_RATE, fused=True
    )
    return plain_step(wrapped, optimizer, dtype)


def fsdp2(model: GPT, dtype: str) -> Step:
    """torch fully_shard, one unit per block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    low = torch.bfloat16 if dtype == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return plain_step(model, adamw(model.parameters()), "fp32")


def deepspeed(stage: int) -> Callable[[GPT, str], Step]:
    """DeepSpeed at its defaults, with torch's fused AdamW so that nothing needs compiling."""

    def wrap(model: GPT, dtype: str) -> Step:
        import deepspeed as peer

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": CLIP_NORM,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": dtype == "bf16"},
            "zero_optimization": {"stage": stage},
        }
        engine, _, _, _ = peer.initialize(model=model, optimizer=adamw(model.parameters()), config=config)

        def step(batch: torch.Tensor) -> torch.Tensor:
            loss = next_token_loss(engine, batch)
            engine.backward(loss)
            engine.step()
            return loss

        return step

    return wrap


def ours(stage: int) -> Callable[[GPT, str], Step]:
    """ds_zero in the same plain loop."""

    def wrap(model: GPT, dtype: str) -> Step:
        import ds_zero

        wrapped, optimizer = ds_zero.shard(
            model, adamw(model.parameters()), stage=stage, precision=dtype, clip_norm=CLIP_NORM
        )
        if optimizer is None:
            raise RuntimeError("no optimizer")

        def step(batch: torch.Tensor) -> torch.Tensor:
            loss = next_token_loss(wrapped, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    return wrap


SYSTEMS: dict[str, Callable[[GPT, str], Step]] = {
    "no communication": no_communication,
    "ds stage 0": ours(0),
    "ds stage 1": ours(1),
    "ds stage 2": ours(2),
    "ds stage 3": ours(3),
    "DDP": ddp,
    "ZeroRedundancyOptimizer": zero_redundancy,
    "FSDP2": fsdp2,
    "DeepSpeed 1": deepspeed(1),
    "DeepSpeed 2": deepspeed(2),
    "DeepSpeed 3": deepspeed(3),
}


def join(system: str) -> None:
    """Meet the other rank the way the system does it."""
    if system.startswith("ds "):
        import ds_comm

        ds_comm.init(device="cpu")
    elif system.startswith("DeepSpeed"):
        import deepspeed as peer

        peer.init_distributed(dist_backend="gloo")
    else:
        dist.init_process_group("gloo")


def batches(size: str, load: str, rank: int) -> Iterator[torch.Tensor]:
    """Random tokens (micro-batch, length + 1), the same in every system."""
    micro, length = LOADS[load]
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randint(SIZES[size]["vocabulary"], (micro, length + 1), generator=generator)
