"""Activation checkpointing on any model: blocks recompute in backward what they do not keep."""

import difflib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from ds_comm import Communicator
from ds_zero.recompute_measure import measure
from ds_zero.recompute_plan import RecomputePlan, choose, plan_policies
from ds_zero.stowing import OnCpu, Partitioned, Queue, Stow, Stowed, bring_arguments, stow_arguments
from ds_zero.units import plan_units

logger = logging.getLogger(__name__)

aten = torch.ops.aten
PRODUCTS = {aten.mm.default: 1, aten.addmm.default: 2, aten.bmm.default: 1, aten.baddbmm.default: 2}
ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


class Recompute:
    """What :func:`recompute` installed.

    Attributes:
        plan: which block does what.
    """

    def __init__(self, plan: RecomputePlan, blocks: Sequence[nn.Module]) -> None:
        self.plan = plan
        self._blocks = list(blocks)

    def remove(self) -> None:
        """Give every block its own forward back."""
        for block in self._blocks:
            block.__dict__.pop("forward", None)
        self._blocks.clear()


def recompute(
    model: nn.Module,
    policy: str | Mapping[str, str] = "full",
    *,
    layers: Sequence[str] | None = None,
    budget_bytes: int | None = None,
    sample: Callable[[], torch.Tensor] | None = None,
    offload: bool = False,
    partition: Communicator | None = None,
) -> Recompute:
    """Have blocks of a model recompute activations in backward instead of keeping them.

    Dropout draws the same numbers again, so gradients are those of the model without. Call it before or after
    :func:`ds_zero.shard`; at stage 3 a block recomputes while its parameters are gathered for backward.

    Args:
        model: the model; its blocks get another ``forward``, names and state stay.
        policy: for every block, or by block name: ``"full"``, ``"selective"``, ``"matmuls"``,
            ``"attention"``, ``"none"`` (see :data:`ds_zero.recompute_plan.POLICIES`), or ``"budget"``: the
            fastest mix that holds at most ``budget_bytes``.
        layers: names of the blocks; default each block of the model's large ``ModuleList``s.
        budget_bytes: for ``"budget"``: bytes that all blocks of this rank may hold between forward and
            backward.
        sample: for ``"budget"``: runs one forward; blocks are measured on what they are given in it.
            Collective when the model is sharded: the measurement of the first rank counts.
        offload: keep the input of every recomputed block in CPU memory.
        partition: cut the kept inputs up over this group, whose ranks all have the same inputs.

    Returns:
        A handle with the plan and ``remove()``.

    Raises:
        ValueError: a policy or a layer is not known, a block is wrapped already, or the budget is too small.

    Source: Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174, section 4; for what is kept,
    Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198, section 5.
    """
    blocks = _blocks(model, layers)
    if offload and partition is not None:
        raise ValueError("recompute: choose offload or partition, not both")
    if policy == "budget":
        if budget_bytes is None or sample is None:
            raise ValueError(
                "recompute: the policy 'budget' needs budget_bytes= and sample=, a call that gives a loss"
            )
        plan = choose(measure(model, blocks, sample, wrap=wrapped), budget_bytes)
    else:
        plan = plan_policies(list(blocks), policy)
    stow: Stow = OnCpu if offload else Stowed if partition is None else partial(Partitioned, comm=partition)
    queue = Queue()
    chosen = {blocks[name]: kind for name, kind in plan.policies.items() if kind != "none"}
    for block, kind in chosen.items():
        block.forward = wrapped(block, kind, stow=stow, queue=queue)
    logger.info("%s", plan.describe())
    return Recompute(plan, list(chosen))


def _blocks(model: nn.Module, layers: Sequence[str] | None) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    names = (
        [plan.name for plan in plan_units(model, names=None) if plan.name] if layers is None else list(layers)
    )
    for name in names:
        if name not in modules:
            close = difflib.get_close_matches(name, modules, n=1)
            raise ValueError(
                f"recompute: there is no module {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")
            )
        if "forward" in modules[name].__dict__:
            raise ValueError(
                f"recompute: {name} has a forward of its own already; remove() the other wrapper first"
            )
    if not names:
        raise ValueError("recompute: the model has no list of blocks; name some modules in layers=")
    return {name: modules[name] for name in names}


def wrapped(
    block: nn.Module, policy: str, *, stow: Stow = Stowed, queue: Queue | None = None
) -> Callable[..., Any]:
    """A forward for ``block`` that keeps what ``policy`` says."""
    return keeping(block.forward, policy, stow=stow, queue=queue)


def keeping(
    inner: Callable[..., Any], policy: str, *, stow: Stow = Stowed, queue: Queue | None = None
) -> Callable[..., Any]:
    """A function like ``inner`` that keeps what ``policy`` says and recomputes the rest in backward."""
    saved = {
        "full": None,
        "selective": _keeps_wide,
        "matmuls": _keeps_products,
        "attention": _keeps_attention,
    }[policy]
    contexts = noop_context_fn if saved is None else partial(create_selective_checkpoint_contexts, saved)

    def run(arguments: Any, kept: list[Stowed]) -> Any:
        if queue is not None and kept:
            queue.look_ahead(kept[0])
        args, kwargs = bring_arguments(arguments)
        return inner(*args, **kwargs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        kept: list[Stowed] = []
        arguments = stow_arguments((args, kwargs), stow, kept)
        output = checkpoint(run, arguments, kept, use_reentrant=False, context_fn=contexts)
        for stowed in kept:
            stowed.stow()
            if queue is not None:
                queue.add(stowed)
        return output

    return forward


def _keeps_attention(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = getattr(operator, "_schema", operator)
    keep = str(getattr(name, "name", name)).removeprefix("aten::") in ATTENTION
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _keeps_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in PRODUCTS else _keeps_attention(context, operator)


def _keeps_wide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator not in PRODUCTS:
        return _keeps_attention(context, operator)
    matrix = args[PRODUCTS[operator]]
    is_wide = matrix.shape[-1] >= matrix.shape[-2]
    return CheckpointPolicy.MUST_SAVE if is_wide else CheckpointPolicy.PREFER_RECOMPUTE
