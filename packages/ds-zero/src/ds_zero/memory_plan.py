"""What a step will hold on a rank, without allocating it: buffers by formula, activations by a fake run."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from ds_zero.accounting import COMPONENTS, plan_bytes
from ds_zero.casting import cast_floating, map_tensors
from ds_zero.config import DTYPES, Offload, Precision, check_precision
from ds_zero.live_storages import LiveStorages
from ds_zero.recompute import recompute

# What is tried when somebody asks what would fit.
ALTERNATIVES = ("none", "selective", "full")


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one rank.

    Attributes:
        components: of ds-zero's own buffers at their peak, by name (see :func:`ds_zero.held_bytes`).
        held_activation_bytes: between forward and backward.
        peak_activation_bytes: at most at once in forward or backward, with autograd's temporaries.
    """

    components: dict[str, int]
    held_activation_bytes: int
    peak_activation_bytes: int

    @property
    def total_bytes(self) -> int:
        """Everything at its peak; an upper bound, as the peaks of components need not fall together."""
        return sum(self.components.values()) + self.peak_activation_bytes


def plan_memory(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    inputs: Sequence[Any],
    loss: Callable[[Any], torch.Tensor] | None = None,
    stage: int,
    world_size: int,
    precision: str | Precision = "fp32",
    offload: Offload | None = None,
) -> MemoryPlan:
    """Predict a step of one micro-batch, before :func:`ds_zero.shard`; the model may be on meta.

    Blocks that :func:`ds_zero.recompute` has wrapped recompute here too. Communication scratch is left out.

    Args:
        model: the model, left as it is.
        optimizer: for its state.
        inputs: positional arguments of one call; tensors may be on meta.
        loss: from the model's output to a loss; default the output, its ``loss``, or its first element.
        stage: 0 to 3.
        world_size: ranks.
        precision: as for :func:`ds_zero.shard`.
        offload: as for :func:`ds_zero.shard`.

    Returns:
        The plan; see :func:`what_fits` for others.
    """
    components = plan_bytes(
        model, optimizer, stage=stage, world_size=world_size, precision=precision, offload=offload
    )
    held, peak = activation_bytes(model, inputs, loss=loss, precision=precision)
    return MemoryPlan(components=components, held_activation_bytes=held, peak_activation_bytes=peak)


def activation_bytes(
    model: nn.Module,
    inputs: Sequence[Any],
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    precision: str | Precision = "fp32",
) -> tuple[int, int]:
    """Bytes held between forward and backward of one micro-batch, and at most at once; on fake tensors."""
    checked = check_precision(precision)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        whole = _Step(model, loss or default_loss, checked)
        tensors = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
        fake = {name: _faked(mode, tensor, checked) for name, tensor in tensors.items()}
        for tensor in fake.values():
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(_forget_gradient)
        given = map_tensors(tuple(inputs), lambda tensor: _as_fake(mode, tensor))
        live = LiveStorages(ignored=fake.values(), follows_peak=True)
        functional_call(whole, fake, (given, live), tie_weights=True)
    return whole.held_bytes, live.peak_bytes


class _Step(nn.Module):
    """Forward, loss and backward in one call, so that swapped-in parameters last until backward is over."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], torch.Tensor], precision: Precision) -> None:
        super().__init__()
        self.model = model
        self.held_bytes = 0
        self._loss = loss
        self._precision = precision

    def forward(self, inputs: tuple[Any, ...], live: LiveStorages) -> None:
        """Run it under ``live``."""
        casting = nullcontext()
        if self._precision.autocast is not None:
            casting = torch.autocast("cpu", dtype=DTYPES[self._precision.autocast], cache_enabled=False)
        with live:
            if self._precision.is_mixed:
                inputs = cast_floating(inputs, self._precision.param_dtype)
            with casting:
                loss = self._loss(self.model(*inputs))
            self.held_bytes = live.held_bytes()
            loss.backward()


def default_loss(output: Any) -> torch.Tensor:
    """The loss in a model's output: itself, its ``loss``, or its first element."""
    if isinstance(output, torch.Tensor):
        return output if output.dim() == 0 else output.float().mean()
    found = getattr(output, "loss", None)
    return found if isinstance(found, torch.Tensor) else default_loss(output[0])


def _as_fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return mode.from_tensor(tensor)


def _faked(mode: FakeTensorMode, tensor: torch.Tensor, precision: Precision) -> torch.Tensor:
    fake = _as_fake(mode, tensor.detach())
    if isinstance(tensor, nn.Parameter) and fake.is_floating_point():
        fake = fake.to(precision.param_dtype)
    return fake.requires_grad_(tensor.requires_grad)


def _forget_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def what_fits(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    inputs: Sequence[Any],
    budget_bytes: int,
    world_size: int,
    loss: Callable[[Any], torch.Tensor] | None = None,
    precision: str | Precision = "fp32",
) -> str:
    """A table in 80 columns of every stage with every kind of recomputation, and which of them fit.

    The model's blocks must not be wrapped by :func:`ds_zero.recompute` yet.
    """
    lines = [
        f"{'stage':>5} {'recompute':<10} {'states MB':>10} {'activations MB':>15} {'total MB':>10}  fits"
    ]
    activations = {}
    for policy in ALTERNATIVES:
        handle = recompute(model, policy) if policy != "none" else None
        activations[policy] = activation_bytes(model, inputs, loss=loss, precision=precision)[1]
        if handle is not None:
            handle.remove()
    for stage in (0, 1, 2, 3):
        planned = plan_bytes(model, optimizer, stage=stage, world_size=world_size, precision=precision)
        states = sum(planned[component] for component in COMPONENTS)
        for policy in ALTERNATIVES:
            total = states + activations[policy]
            fits = "yes" if total <= budget_bytes else f"no, by {(total - budget_bytes) / 1e6:.1f} MB"
            lines.append(
                f"{stage:>5} {policy:<10} {states / 1e6:>10.1f} {activations[policy] / 1e6:>15.1f} "
                f"{total / 1e6:>10.1f}  {fits}"
            )
    return "\n".join(lines)


class BatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a global batch is taken.

    Attributes:
        micro_batch: samples per rank and backward.
        accumulation: backwards per step.
        total_bytes: predicted for a rank.
    """

    micro_batch: int
    accumulation: int
    total_bytes: int

    def describe(self) -> str:
        """One line for a log."""
        return (
            f"micro-batch {self.micro_batch}, accumulation {self.accumulation}: "
            f"{self.total_bytes / 1e6:.1f} MB predicted"
        )


def plan_batch(
    global_batch: int, *, world_size: int, budget_bytes: int, total_bytes: Callable[[int], int]
) -> BatchPlan:
    """The largest micro-batch that divides the batch and fits, and the accumulation that goes with it.

    Args:
        global_batch: samples per step over all ranks.
        world_size: ranks.
        budget_bytes: of a rank.
        total_bytes: from a micro-batch to what a rank holds, rising; such as
            ``lambda n: plan_memory(model, optimizer, inputs=batch_of(n), ...).total_bytes``. Called about
            ``log2`` of the number of divisors times.

    Raises:
        ValueError: the batch does not divide by the ranks, or not even one sample fits.
    """
    if world_size < 1 or global_batch < 1 or global_batch % world_size:
        raise ValueError(f"a batch of {global_batch} does not divide by {world_size} ranks")
    share = global_batch // world_size
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    low, high = 0, len(sizes)
    known: dict[int, int] = {}
    while low < high:
        middle = math.floor((low + high) / 2)
        known[sizes[middle]] = total_bytes(sizes[middle])
        if known[sizes[middle]] <= budget_bytes:
            low = middle + 1
        else:
            high = middle
    if low == 0:
        raise ValueError(
            f"one sample needs {known[1]} bytes, the budget is {budget_bytes}; recompute activations, shard "
            "more, or offload (what_fits shows what helps)"
        )
    chosen = sizes[low - 1]
    return BatchPlan(micro_batch=chosen, accumulation=share // chosen, total_bytes=known[chosen])
