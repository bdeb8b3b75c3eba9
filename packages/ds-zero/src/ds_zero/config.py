"""The settings the engine runs, checked once at the edge; nothing here touches a tensor."""

from collections.abc import Sequence

import msgspec
import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NONFINITE = ("raise", "skip")


class Precision(msgspec.Struct, frozen=True, kw_only=True):
    """Which dtype holds what. Master weights and reduced gradients are fp32 always.

    Attributes:
        param: dtype of parameters in forward and backward, and of gradients on the wire.
        reduce: dtype in which the sum over ranks is rounded. ``fp32`` over ``bf16`` gradients costs no
            traffic: the pieces travel as bf16 and are summed in fp32 by their owner.
    """

    param: str
    reduce: str

    @classmethod
    def fp32(cls) -> "Precision":
        """Everything in fp32; the owned parameters are their own master weights."""
        return cls(param="fp32", reduce="fp32")

    @classmethod
    def bf16(cls) -> "Precision":
        """bf16 parameters, fp32 master weights, sums over ranks in fp32."""
        return cls(param="bf16", reduce="fp32")

    @property
    def param_dtype(self) -> torch.dtype:
        """``param`` as torch names it."""
        return DTYPES[self.param]

    @property
    def reduce_dtype(self) -> torch.dtype:
        """``reduce`` as torch names it."""
        return DTYPES[self.reduce]

    @property
    def has_master(self) -> bool:
        """Whether fp32 master weights are kept beside the parameters."""
        return self.param_dtype is not torch.float32


class ZeroOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`ds_zero.shard` was asked for, checked."""

    stage: int
    precision: Precision
    clip_norm: float | None
    units: tuple[str, ...] | None
    max_gathered_units: int
    bucket_numel: int
    on_nonfinite: str


def check_options(
    *,
    stage: int,
    precision: str | Precision,
    clip_norm: float | None,
    units: Sequence[str] | None,
    max_gathered_units: int,
    bucket_numel: int,
    on_nonfinite: str,
) -> ZeroOptions:
    """Check every setting and freeze it.

    Raises:
        ValueError: a setting is outside its range; the message says which and what is allowed.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage!r}")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm must be above 0, or None for no clipping, got {clip_norm!r}")
    if max_gathered_units < 1:
        raise ValueError(f"max_gathered_units must be at least 1, got {max_gathered_units!r}")
    if bucket_numel < 0:
        raise ValueError(f"bucket_numel must be 0 (one bucket per unit) or more, got {bucket_numel!r}")
    if on_nonfinite not in NONFINITE:
        raise ValueError(f"on_nonfinite must be one of {NONFINITE}, got {on_nonfinite!r}")
    return ZeroOptions(
        stage=stage,
        precision=_check_precision(precision),
        clip_norm=clip_norm,
        units=None if units is None else tuple(units),
        max_gathered_units=max_gathered_units,
        bucket_numel=bucket_numel,
        on_nonfinite=on_nonfinite,
    )


def _check_precision(precision: str | Precision) -> Precision:
    if isinstance(precision, str):
        named = {"fp32": Precision.fp32, "bf16": Precision.bf16}
        if precision not in named:
            raise ValueError(f"precision must be one of {sorted(named)} or a Precision, got {precision!r}")
        return named[precision]()
    for field in ("param", "reduce"):
        value = getattr(precision, field)
        if value not in DTYPES:
            raise ValueError(f"Precision.{field} must be one of {sorted(DTYPES)}, got {value!r}")
    if precision.param == "fp32" and precision.reduce != "fp32":
        raise ValueError(
            "Precision(param='fp32') needs reduce='fp32': rounding fp32 gradients loses bits for nothing"
        )
    return precision
