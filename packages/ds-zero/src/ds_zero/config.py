"""The settings the engine runs, checked once at the edge; nothing here touches a tensor."""

import fnmatch
from collections.abc import Sequence

import msgspec
import torch
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NONFINITE = ("raise", "skip")
HOMES = ("device", "cpu", "file")


class LossScale(msgspec.Struct, frozen=True, kw_only=True):
    """By what the loss is multiplied before backward, so that small gradients survive fp16.

    Attributes:
        initial: the scale at the start; a power of two changes no bit of the result.
        dynamic: halve it after an overflow, double it after ``window`` steps without one.
        window: steps.
        hysteresis: overflows in a row that are only skipped, but for the last, before the scale is halved.
        restores_hysteresis: whether each good step gives the whole hysteresis back.
        minimum: an overflow at this scale is an error.

    Source: Mixed Precision Training, arXiv:1710.03740, section 3.2.
    """

    initial: float = 65536.0
    dynamic: bool = True
    window: int = 1000
    hysteresis: int = 2
    restores_hysteresis: bool = False
    minimum: float = 1.0


class Precision(msgspec.Struct, frozen=True, kw_only=True):
    """Which dtype holds what. Master weights are fp32 always.

    Attributes:
        param: dtype of parameters in forward and backward.
        grad: dtype of gradients before their reduction and on the wire; ``None``: the parameters'.
        reduce: dtype in which the sum over ranks is rounded. ``fp32`` over narrower gradients costs no
            traffic: the pieces travel as they are and are summed in fp32 by their owner.
        accumulate: dtype in which reduced gradients of several micro-batches are added and kept.
        autocast: run forward under ``torch.autocast`` with this dtype, over fp32 parameters.
        keep_fp32: names of modules (``fnmatch`` patterns of a whole name or its last part) whose parameters
            stay fp32; what comes in is cast to fp32 for them, and what goes out back. Modules that a model
            lists in ``_keep_in_fp32_modules`` (Hugging Face) are added. Buffers, such as rotary tables, keep
            their dtype always.
        loss_scale: for fp16; ``None`` multiplies by nothing.
        state: dtype in which moments are kept between steps. ``bf16`` rounds them stochastically, without
            bias, and steps in fp32.
    """

    param: str = "fp32"
    grad: str | None = None
    reduce: str = "fp32"
    accumulate: str = "fp32"
    autocast: str | None = None
    keep_fp32: tuple[str, ...] = ()
    loss_scale: LossScale | None = None
    state: str = "fp32"

    @classmethod
    def fp32(cls) -> "Precision":
        """Everything in fp32; the owned parameters are their own master weights."""
        return cls()

    @classmethod
    def bf16(cls) -> "Precision":
        """bf16 parameters, fp32 master weights, sums over ranks in fp32."""
        return cls(param="bf16")

    @classmethod
    def fp16(cls) -> "Precision":
        """fp16 parameters, fp32 master weights, sums over ranks in fp32, dynamic loss scaling."""
        return cls(param="fp16", loss_scale=LossScale())

    @property
    def param_dtype(self) -> torch.dtype:
        """``param`` as torch names it."""
        return DTYPES[self.param]

    @property
    def grad_dtype(self) -> torch.dtype:
        """``grad`` as torch names it."""
        return DTYPES[self.grad or self.param]

    @property
    def reduce_dtype(self) -> torch.dtype:
        """``reduce`` as torch names it."""
        return DTYPES[self.reduce]

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """``accumulate`` as torch names it."""
        return DTYPES[self.accumulate]

    @property
    def is_mixed(self) -> bool:
        """Whether parameters are narrower than fp32."""
        return self.param_dtype is not torch.float32


class Offload(msgspec.Struct, frozen=True, kw_only=True):
    """Where states lie between uses: ``"device"``, ``"cpu"`` (pinned beside an accelerator) or ``"file"``.

    Attributes:
        optimizer: home of master weights and moments; the optimizer steps them on the CPU.
        gradients: home of reduced gradients between backward and step; stages 2 and 3.
        parameters: home of parameter slices; stage 3.
        path: folder for files, on a local disk.
        ratio: share of the optimizer's elements that leave the device, in whole flats.
    """

    optimizer: str = "device"
    gradients: str = "device"
    parameters: str = "device"
    path: str | None = None
    ratio: float = 1.0

    @property
    def uses_files(self) -> bool:
        """Whether anything is kept in files."""
        return "file" in (self.optimizer, self.gradients, self.parameters)


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """How far and how wide parameters and gradients travel: ZeRO++ and sharding within nodes.

    Attributes:
        weight_bits: 8 or 4: parameters are gathered as block codes, at stage 3. Every rank, the owner too,
            computes with the decoded values; master weights are exact.
        gradient_bits: 8 or 4: gradients are reduced as block codes, in two hops where there are nodes.
        node_size: neighbouring ranks that make a node; ``None``: all ranks are one.
        secondary: at stage 3, a second copy of the parameters is cut over each node's ranks from their first
            gather in a step to the next step, so that backward gathers stay within the node.
        within_node: shard over the ranks of a node only; nodes hold copies, and gradients are averaged over
            them.

    Source: ZeRO++, arXiv:2306.10209, section 3; MiCS, arXiv:2205.00119, section 3.
    """

    weight_bits: int | None = None
    gradient_bits: int | None = None
    node_size: int | None = None
    secondary: bool = False
    within_node: bool = False


def check_reach(reach: Reach, *, stage: int) -> None:
    """Refuse settings that have no effect or no sense.

    Raises:
        ValueError: with the setting, and what it needs.
    """
    for field in ("weight_bits", "gradient_bits"):
        if getattr(reach, field) not in (None, 8, 4):
            raise ValueError(f"Reach.{field} must be 8, 4 or None, got {getattr(reach, field)!r}")
    if reach.node_size is not None and reach.node_size < 1:
        raise ValueError(f"Reach.node_size must be at least 1, got {reach.node_size!r}")
    if reach.weight_bits is not None and stage < 3:
        raise ValueError(
            f"Reach.weight_bits needs stage 3, got {stage}: below, weights are not gathered for use"
        )
    if reach.secondary and (stage < 3 or reach.node_size is None):
        raise ValueError(f"Reach.secondary needs stage 3 and node_size, got {stage} and {reach.node_size!r}")
    if reach.within_node and (reach.node_size is None or reach.secondary):
        raise ValueError(
            "Reach.within_node needs node_size, and does not go with secondary: copies are near already"
        )


def check_offload(offload: Offload, *, stage: int) -> None:
    """Refuse homes that do not exist or do not go with the stage.

    Raises:
        ValueError: with the setting, and what is allowed.
    """
    for field in ("optimizer", "gradients", "parameters"):
        if getattr(offload, field) not in HOMES:
            raise ValueError(f"Offload.{field} must be one of {HOMES}, got {getattr(offload, field)!r}")
    if offload.gradients != "device" and stage < 2:
        raise ValueError(
            f"Offload.gradients needs stage 2 or 3, got {stage}: below, every rank keeps whole gradients"
        )
    if offload.parameters != "device" and stage < 3:
        raise ValueError(
            f"Offload.parameters needs stage 3, got {stage}: below, every rank keeps whole parameters"
        )
    if offload.uses_files and offload.path is None:
        raise ValueError("Offload to 'file' needs path=, a folder on a local disk with room for the states")
    if not 0 < offload.ratio <= 1:
        raise ValueError(f"Offload.ratio must be above 0 and at most 1, got {offload.ratio!r}")


def fp32_modules(model: nn.Module, precision: Precision) -> tuple[str, ...]:
    """Names of the outermost modules that stay fp32, in registration order.

    Raises:
        ValueError: a pattern in ``keep_fp32`` matches no module.
    """
    if not precision.is_mixed:
        return ()
    listed = (
        getattr(model, "_keep_in_fp32_modules", None),
        getattr(model, "_keep_in_fp32_modules_strict", None),
    )
    parts = {part for names in listed for part in names or ()}
    unused = set(precision.keep_fp32)
    kept: list[str] = []
    for name, _ in model.named_modules():
        ends = (name, name.rpartition(".")[2])
        matching = {
            pattern
            for pattern in precision.keep_fp32
            if name and any(fnmatch.fnmatchcase(end, pattern) for end in ends)
        }
        unused -= matching
        inside = any(name.startswith(f"{outer}.") for outer in kept)
        if not inside and (matching or parts & set(name.split("."))):
            kept.append(name)
    if unused:
        names = [name for name, _ in model.named_modules()][1:6]
        raise ValueError(
            f"keep_fp32 must match modules of the model, {sorted(unused)} match none; known are e.g. {names}"
        )
    return tuple(kept)


class ZeroOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`ds_zero.shard` was asked for, checked."""

    stage: int
    precision: Precision
    offload: Offload
    reach: Reach
    clip_norm: float | None
    units: tuple[str, ...] | None
    max_gathered_units: int
    bucket_numel: int
    on_nonfinite: str


def check_options(
    *,
    stage: int,
    precision: str | Precision,
    offload: Offload | None = None,
    reach: Reach | None = None,
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
    check_offload(offload or Offload(), stage=stage)
    check_reach(reach or Reach(), stage=stage)
    return ZeroOptions(
        stage=stage,
        precision=check_precision(precision),
        offload=offload or Offload(),
        reach=reach or Reach(),
        clip_norm=clip_norm,
        units=None if units is None else tuple(units),
        max_gathered_units=max_gathered_units,
        bucket_numel=bucket_numel,
        on_nonfinite=on_nonfinite,
    )


def check_precision(precision: str | Precision) -> Precision:
    """Check a precision, or find the one of this name.

    Raises:
        ValueError: there is no such name, or its settings do not go together.
    """
    if isinstance(precision, str):
        named = {"fp32": Precision.fp32, "bf16": Precision.bf16, "fp16": Precision.fp16}
        if precision not in named:
            raise ValueError(f"precision must be one of {sorted(named)} or a Precision, got {precision!r}")
        return named[precision]()
    for field in ("param", "grad", "reduce", "accumulate", "autocast", "state"):
        value = getattr(precision, field)
        if value not in DTYPES and not (value is None and field in ("grad", "autocast")):
            raise ValueError(f"Precision.{field} must be one of {sorted(DTYPES)}, got {value!r}")
    _check_combination(precision)
    if precision.loss_scale is not None:
        _check_loss_scale(precision.loss_scale)
    return precision


def _check_combination(precision: Precision) -> None:
    if precision.grad_dtype is torch.float32 and precision.reduce != "fp32":
        raise ValueError(
            "Precision with fp32 gradients needs reduce='fp32': rounding their sum loses bits for nothing; "
            "to send fewer bytes set grad='bf16'"
        )
    if precision.accumulate not in ("fp32", precision.reduce):
        raise ValueError(
            f"accumulate must be 'fp32' or reduce={precision.reduce!r}, got {precision.accumulate!r}"
        )
    if precision.autocast is not None and (precision.is_mixed or precision.autocast == "fp32"):
        raise ValueError(
            "Precision.autocast needs fp32 parameters and 'bf16' or 'fp16', got "
            f"param={precision.param!r}, autocast={precision.autocast!r}"
        )
    if precision.state not in ("fp32", "bf16"):
        raise ValueError(f"Precision.state must be 'fp32' or 'bf16', got {precision.state!r}")


def _check_loss_scale(scale: LossScale) -> None:
    for field, least in (("window", 1), ("hysteresis", 1)):
        if getattr(scale, field) < least:
            raise ValueError(f"LossScale.{field} must be at least {least}, got {getattr(scale, field)!r}")
    if not 0 < scale.minimum <= scale.initial < float("inf"):
        raise ValueError(
            f"LossScale needs 0 < minimum <= initial, got {scale.minimum!r} and {scale.initial!r}"
        )
