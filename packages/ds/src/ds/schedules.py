"""DeepSpeed's learning-rate schedules on torch's scheduler interface: formulas over the steps taken.

DeepSpeed counts from -1, so that its step ``k`` (from 0) has the rate of batch ``k - 1``: a warm-up begins
with two steps at its lowest rate. That is kept, so that a run gives the same rates here.
"""

import difflib
import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ds.config import ConfigError, SchedulerConfig

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]

Rate = float | Sequence[float]


def per_group(value: Rate, optimizer: torch.optim.Optimizer, name: str) -> list[float]:
    """One number for every parameter group, from one for all or a list.

    Raises:
        ValueError: the list has another length.
    """
    count = len(optimizer.param_groups)
    if isinstance(value, (int, float)):
        return [float(value)] * count
    if len(value) != count:
        raise ValueError(
            f"{name} must have one value for each of the {count} parameter groups, got {len(value)}"
        )
    return [float(item) for item in value]


def warm_up(batch: int, *, num_steps: int, kind: str) -> float:
    """Share of a warm-up after ``batch`` batches: 0 at 0, 1 from ``num_steps`` on; ``log`` or ``linear``."""
    if batch >= num_steps:
        return 1.0
    return math.log(batch + 1) / math.log(num_steps) if kind == "log" else batch / num_steps


def _check_warm_up(num_steps: int, kind: str) -> int:
    if kind not in ("log", "linear"):
        raise ValueError(f"warmup_type must be log or linear, got {kind!r}")
    if num_steps < 1:
        raise ValueError(f"warmup_num_steps must be at least 1, got {num_steps}")
    return max(2, num_steps)


class WarmupLR(LRScheduler):
    """From ``warmup_min_lr`` to ``warmup_max_lr`` (default: each group's own rate), then constant."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_epoch: int = -1,
    ) -> None:
        self.warmup_num_steps = _check_warm_up(warmup_num_steps, warmup_type)
        self.warmup_type = warmup_type
        self.min_lrs = per_group(warmup_min_lr, optimizer, "warmup_min_lr")
        own = [float(group["lr"]) for group in optimizer.param_groups]
        self.max_lrs = own if warmup_max_lr is None else per_group(warmup_max_lr, optimizer, "warmup_max_lr")
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Rates of the groups at the current step."""
        share = self.share(max(0, self.last_epoch - 1))
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def share(self, batch: int) -> float:
        """Where between the lowest and the highest rate, 0 to 1."""
        return warm_up(batch, num_steps=self.warmup_num_steps, kind=self.warmup_type)


class WarmupDecayLR(WarmupLR):
    """:class:`WarmupLR`, then linearly back to ``warmup_min_lr`` at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        total_num_steps: int,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_epoch: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer,
            warmup_min_lr=warmup_min_lr,
            warmup_max_lr=warmup_max_lr,
            warmup_num_steps=warmup_num_steps,
            warmup_type=warmup_type,
            last_epoch=last_epoch,
        )

    def share(self, batch: int) -> float:
        """Where between the lowest and the highest rate, 0 to 1."""
        if batch < self.warmup_num_steps:
            return super().share(batch)
        left = self.total_num_steps - batch
        return max(0.0, left / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(LRScheduler):
    """Ratios of each group's own rate: ``warmup_min_ratio`` to 1, then a half cosine to ``cos_min_ratio``.

    The very first step has rate 0, as in DeepSpeed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 1e-4,
        warmup_type: str = "log",
        last_epoch: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.warmup_num_steps = _check_warm_up(warmup_num_steps, warmup_type)
        self.cos_min_ratio = cos_min_ratio
        self.warmup_type = warmup_type
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Rates of the groups at the current step."""
        ratio = self.ratio(self.last_epoch - 1)
        return [base * ratio for base in self.base_lrs]

    def ratio(self, batch: int) -> float:
        """What the rates are multiplied with after ``batch`` batches, -1 at first."""
        if batch < 0:
            return 0.0
        if batch < self.warmup_num_steps:
            share = warm_up(batch, num_steps=self.warmup_num_steps, kind=self.warmup_type)
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * share
        span = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (batch + 1 - self.warmup_num_steps) / span)
        return self.cos_min_ratio + (1.0 - self.cos_min_ratio) * (1.0 + math.cos(math.pi * progress)) / 2.0


class LRRangeTest(LRScheduler):
    """A rate that only grows, to find the largest that trains.

    Source: Smith, arXiv:1803.09820.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        lr_range_test_min_lr: Rate = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_epoch: int = -1,
    ) -> None:
        if lr_range_test_step_size < 1:
            raise ValueError(f"lr_range_test_step_size must be at least 1, got {lr_range_test_step_size}")
        self.min_lrs = per_group(lr_range_test_min_lr, optimizer, "lr_range_test_min_lr")
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Rates of the groups at the current step."""
        step = self.last_epoch
        intervals = step // self.step_size if self.staircase else step / self.step_size
        return [low * (1.0 + self.step_rate * intervals) for low in self.min_lrs]


class OneCycle(LRScheduler):
    """Up to ``cycle_max_lr``, down to ``cycle_min_lr``, then decay; the first beta goes the other way.

    Optimizers without betas keep their momentum, as in DeepSpeed. The second beta is kept, too (DeepSpeed
    sets it to 0.99). Stairs divide each half of the cycle into that many flat pieces.

    Source: Smith, arXiv:1803.09820.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        cycle_min_lr: Rate,
        cycle_max_lr: Rate,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rate = 0.8,
        cycle_max_mom: Rate = 0.9,
        decay_mom_rate: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.first = cycle_first_step_size
        self.second = cycle_second_step_size if cycle_second_step_size is not None else cycle_first_step_size
        if self.first < 1 or self.second < 0:
            raise ValueError(
                f"cycle_first_step_size must be at least 1 and cycle_second_step_size at least 0, "
                f"got {self.first} and {self.second}"
            )
        stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.stairs = (cycle_first_stair_count, stairs)
        self.min_lrs = per_group(cycle_min_lr, optimizer, "cycle_min_lr")
        self.max_lrs = per_group(cycle_max_lr, optimizer, "cycle_max_lr")
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        self.min_moms = per_group(cycle_min_mom, optimizer, "cycle_min_mom")
        self.max_moms = per_group(cycle_max_mom, optimizer, "cycle_max_mom")
        self.decay_step_size = decay_step_size
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Rates of the groups at the current step; sets their first beta too."""
        height, decays = self.height(self.last_epoch), self.decays(self.last_epoch)
        if self.cycle_momentum:
            growth = 1.0 + self.decay_mom_rate * decays
            momenta = zip(self.optimizer.param_groups, self.min_moms, self.max_moms, strict=True)
            for group, low, high in momenta:
                group["betas"] = ((high - (high - low) * height) * growth, *group["betas"][1:])
        shrink = 1.0 + self.decay_lr_rate * decays
        return [
            (low + (high - low) * height) / shrink
            for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
        ]

    def height(self, step: int) -> float:
        """0 at the bottom of the cycle, 1 at the top, 0 after it."""
        if step <= self.first:
            return _stair(step, self.first, self.stairs[0])
        left = self.first + self.second - step
        return _stair(left, self.second, self.stairs[1]) if left > 0 else 0.0

    def decays(self, step: int) -> float:
        """Lengths of ``decay_step_size`` since the end of the cycle."""
        past = step - self.first - self.second
        return max(0.0, past / self.decay_step_size) if self.decay_step_size else 0.0


def _stair(part: int, whole: int, count: int) -> float:
    return part * count // whole / count if count else part / whole


OWN = {kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}


def _class_of(name: str) -> type[LRScheduler] | None:
    found = OWN.get(name) or getattr(torch.optim.lr_scheduler, name, None)
    is_scheduler = isinstance(found, type) and issubclass(found, LRScheduler) and found is not LRScheduler
    return found if is_scheduler else None


def check_scheduler(config: SchedulerConfig) -> Iterator[str]:
    """What is wrong with a name and its arguments, one line each."""
    kind = _class_of(config.type)
    if kind is None:
        names = [*OWN, *(name for name in vars(torch.optim.lr_scheduler) if _class_of(name) is not None)]
        close = difflib.get_close_matches(config.type, names, n=1)
        hint = (
            f"did you mean {close[0]}?" if close else f"use {', '.join(VALID_LR_SCHEDULES)} or one of torch's"
        )
        yield f"scheduler.type: {config.type} is not known; {hint}"
        return
    arguments = {key: item for key, item in inspect.signature(kind).parameters.items() if key != "optimizer"}
    for key in config.params:
        if key not in arguments:
            close = difflib.get_close_matches(key, arguments, n=1)
            hint = (
                f"did you mean scheduler.params.{close[0]}?"
                if close
                else f"known here: {', '.join(arguments)}"
            )
            yield f"scheduler.params.{key}: unknown key; {hint}"
    for key, item in arguments.items():
        if item.default is item.empty and key not in config.params:
            yield f"scheduler.params.{key}: missing; {config.type} needs it"


def build_scheduler(config: SchedulerConfig, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """The schedule that a name means: DeepSpeed's, or a class of ``torch.optim.lr_scheduler``.

    Raises:
        ConfigError: the name or an argument is unknown, or the class refuses a value.
    """
    mistakes = list(check_scheduler(config))
    kind: Any = _class_of(config.type)
    if mistakes or kind is None:
        raise ConfigError(*mistakes)
    try:
        return kind(optimizer, **config.params)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scheduler.params: {config.type} refuses them: {error}") from None
