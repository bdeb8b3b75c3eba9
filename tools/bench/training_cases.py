"""What is measured by train_step.py: model sizes, batches, dtypes and the systems with their ZeRO stage."""

from __future__ import annotations

import dataclasses

WORLD_SIZE = 2
LEARNING_RATE = 3e-4
CLIP_NORM = 1.0
# Batches that come round again, so that the loss falls and a wrong update shows.
NUM_BATCHES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One training set-up, the same for every system.

    Attributes:
        width: of the model; a head has 64.
        depth: blocks.
        batch_size: sequences per rank.
        length: tokens per sequence.
        dtype: ``fp32``, or ``bf16`` with fp32 master weights.
        num_steps: measured, after ``num_warmup``.
    """

    name: str
    vocabulary: int
    width: int
    depth: int
    batch_size: int
    length: int
    dtype: str
    num_steps: int
    num_warmup: int = 3

    @property
    def element_bytes(self) -> int:
        """Bytes of one element that travels."""
        return 4 if self.dtype == "fp32" else 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """One way to train.

    Attributes:
        name: as shown.
        kind: which function of ``training_systems`` builds it.
        stage: what it shards, in ZeRO's terms; ``None`` for the limit without communication.
    """

    name: str
    kind: str
    stage: int | None

    @property
    def is_peer(self) -> bool:
        """Whether it is somebody else's."""
        return self.kind not in ("ds", "local")

    def traffic_formula(self, element_bytes: int) -> float:
        """Bytes per parameter that a rank must send in a step: 2, 2, 2, 3 elements times (N - 1) / N.

        Source: ZeRO, arXiv:1910.02054, section 7.
        """
        if self.stage is None:
            return 0.0
        return (3 if self.stage == 3 else 2) * element_bytes * (WORLD_SIZE - 1) / WORLD_SIZE


SMALL = {"vocabulary": 16384, "width": 512, "depth": 6}  # 27.3 M parameters
LARGE = {"vocabulary": 32768, "width": 768, "depth": 12}  # 110.1 M parameters

CASES = (
    Case(name="27M fp32, 1 x 64", **SMALL, batch_size=1, length=64, dtype="fp32", num_steps=20),
    Case(name="27M fp32, 2 x 256", **SMALL, batch_size=2, length=256, dtype="fp32", num_steps=8),
    Case(name="27M bf16, 1 x 64", **SMALL, batch_size=1, length=64, dtype="bf16", num_steps=8),
    Case(name="110M fp32, 1 x 64", **LARGE, batch_size=1, length=64, dtype="fp32", num_steps=6),
    Case(name="110M bf16, 1 x 64", **LARGE, batch_size=1, length=64, dtype="bf16", num_steps=4),
)
SYSTEMS = (
    System(name="no communication", kind="local", stage=None),
    System(name="ds 0", kind="ds", stage=0),
    System(name="DDP", kind="ddp", stage=0),
    System(name="DeepSpeed 0", kind="deepspeed", stage=0),
    System(name="ds 1", kind="ds", stage=1),
    System(name="DDP + ZeroRedundancyOptimizer", kind="zero_redundancy", stage=1),
    System(name="DeepSpeed 1", kind="deepspeed", stage=1),
    System(name="ds 2", kind="ds", stage=2),
    System(name="FSDP2, kept after forward", kind="fsdp2", stage=2),
    System(name="DeepSpeed 2", kind="deepspeed", stage=2),
    System(name="ds 3", kind="ds", stage=3),
    System(name="FSDP2", kind="fsdp2", stage=3),
    System(name="DeepSpeed 3", kind="deepspeed", stage=3),
)
