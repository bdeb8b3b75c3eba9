"""What the demo is told, what its ranks tell back, and the DeepSpeed JSON it trains with."""

from typing import Any

import msgspec

SIZES: dict[str, dict[str, int]] = {
    "full": {"vocabulary": 2048, "context": 128, "width": 256, "depth": 6, "heads": 4},
    "quick": {"vocabulary": 2048, "context": 128, "width": 192, "depth": 4, "heads": 6},
    "tiny": {"vocabulary": 512, "context": 32, "width": 32, "depth": 2, "heads": 2},
}
STEPS = {"full": 450, "quick": 200, "tiny": 12}
LEARNING_RATE = {"full": 3e-3, "quick": 3e-3, "tiny": 1e-2}
MICRO_BATCH = 4


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank is told."""

    size: str
    stage: int
    steps: int
    text: str | None
    out: str


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started", tag_field="kind"):
    """The model is sharded and training begins."""

    ranks: int
    device: str
    stage: int
    dtype: str
    num_parameters: int
    num_tokens: int
    steps: int
    planned_bytes: int


class Sample(msgspec.Struct, frozen=True, kw_only=True, tag="sample", tag_field="kind"):
    """What the untrained model writes, and its loss on the held-out text."""

    text: str
    loss: float


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="kind"):
    """One step: loss of rank 0's batch, tokens per second of all ranks so far, most bytes each rank held."""

    step: int
    loss: float
    tokens_per_s: float
    peak_bytes: tuple[int, ...]


class Result(msgspec.Struct, frozen=True, kw_only=True, tag="result", tag_field="kind"):
    """The outcome.

    Attributes:
        loss_first: on the held-out text before training, nats per token.
        loss_last: the same after.
        peak_bytes: most that any rank held in the engine's tensors at once: parameters, gradients, optimizer
            state, gathered units, buckets. Activations are not in it.
        planned_bytes: the same by ``ds_zero.plan_bytes`` from shapes alone, before anything was allocated.
    """

    stage: int
    ranks: int
    device: str
    dtype: str
    steps: int
    num_parameters: int
    loss_first: float
    loss_last: float
    tokens_per_s: float
    peak_bytes: int
    planned_bytes: int
    out: str


Message = Started | Sample | Step | Result
# Marks a line of a rank's output that is a message.
MARK = "@ds-demo "


def deepspeed_config(options: DemoOptions, *, bf16: bool) -> dict[str, Any]:
    """The demo's DeepSpeed JSON."""
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE[options.size], "betas": [0.9, 0.95], "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": options.steps,
                "warmup_num_steps": max(2, options.steps // 10),
                "cos_min_ratio": 0.1,
            },
        },
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": options.stage},
    }
