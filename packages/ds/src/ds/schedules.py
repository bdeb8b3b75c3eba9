"""DeepSpeed's learning-rate schedules on torch's scheduler interface, each one formula over the step."""

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ds.config import ConfigError, SchedulerConfig

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


def _warm(step: int, num_steps: int, kind: str) -> float:
    """Share of the warm-up after ``step`` steps, 0 to 1; logarithmic or linear."""
    if step >= num_steps:
        return 1.0
    return math.log(step + 1) / math.log(num_steps) if kind == "log" else step / num_steps


class WarmupLR(LRScheduler):
    """From ``warmup_min_lr`` to ``warmup_max_lr`` (default: each group's own rate), then constant."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        warmup_min_lr: float = 0.0,
        warmup_max_lr: float | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_epoch: int = -1,
    ) -> None:
        if warmup_type not in ("log", "linear"):
            raise ConfigError(f"scheduler.params.warmup_type must be log or linear, got {warmup_type!r}")
        self.warmup_min_lr = warmup_min_lr
        self.warmup_max_lr = warmup_max_lr
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.warmup_type = warmup_type
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Rates of the groups at the current step."""
        share = _warm(self.last_epoch, self.warmup_num_steps, self.warmup_type)
        return [
            self._at(share, self.warmup_max_lr if self.warmup_max_lr is not None else base)
            for base in self.base_lrs
        ]

    def _at(self, share: float, highest: float) -> float:
        return (self.warmup_min_lr + (highest - self.warmup_min_lr) * share) * self._decay()

    def _decay(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """:class:`WarmupLR`, then linearly down to 0 at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        total_num_steps: int,
        warmup_max_lr: float = 0.001,
        **warmup: Any,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_max_lr=warmup_max_lr, **warmup)

    def _decay(self) -> float:
        if self.last_epoch < self.warmup_num_steps:
            return 1.0
        left = self.total_num_steps - self.last_epoch
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(LRScheduler):
    """Ratios of each group's own rate: up from ``warmup_min_ratio`` to 1, then a half cosine to ``cos_min_ratio``."""

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
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.cos_min_ratio = cos_min_ratio
        self.warmup_type = warmup_type
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Rates of the groups at the current step."""
        return [base * self._ratio(self.last_epoch) for base in self.base_lrs]

    def _ratio(self, step: int) -> float:
        if step < self.warmup_num_steps:
            share = _warm(step, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * share
        span = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (step - self.warmup_num_steps) / span)
        return self.cos_min_ratio + (1.0 - self.cos_min_ratio) * (1.0 + math.cos(math.pi * progress)) / 2.0


class LRRangeTest(LRScheduler):
    """A rate that only grows, to find the largest that trains."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        lr_range_test_min_lr: float = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_epoch: int = -1,
    ) -> None:
        self.min_lr = lr_range_test_min_lr
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Rates of the groups at the current step."""
        interval = (self.last_epoch + 1) / self.step_size
        interval = math.floor(interval) if self.staircase else interval
        return [self.min_lr * (1.0 + interval * self.step_rate) for _ in self.base_lrs]


class OneCycle(LRScheduler):
    """Up to ``cycle_max_lr``, down to ``cycle_min_lr``, then decay; momentum goes the other way."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        cycle_min_lr: float,
        cycle_max_lr: float,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.lr_range = (cycle_min_lr, cycle_max_lr)
        self.mom_range = (cycle_min_mom, cycle_max_mom) if cycle_momentum else None
        self.first = cycle_first_step_size
        self.second = cycle_second_step_size if cycle_second_step_size is not None else cycle_first_step_size
        self.stairs = (
            cycle_first_stair_count,
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count,
        )
        self.decay = (decay_step_size, decay_lr_rate, decay_mom_rate)
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Rates of the groups at the current step; sets their first beta too."""
        step = max(0, self.last_epoch)
        height = self._height(step)
        if self.mom_range is not None:
            low, high = self.mom_range
            self._set_momentum((high - (high - low) * height) * (1.0 + self.decay[2] * self._decays(step)))
        low, high = self.lr_range
        rate = (low + (high - low) * height) / (1.0 + self.decay[1] * self._decays(step))
        return [rate for _ in self.base_lrs]

    def _height(self, step: int) -> float:
        """0 at the bottom of the cycle, 1 at the top."""
        if step < self.first:
            return _stair(step / self.first, self.stairs[0])
        return _stair(max(0.0, 1.0 - (step - self.first) / max(1, self.second)), self.stairs[1])

    def _decays(self, step: int) -> float:
        past = step - self.first - self.second
        return max(0.0, past / self.decay[0]) if self.decay[0] else 0.0

    def _set_momentum(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            if "betas" in group:
                group["betas"] = (value, *group["betas"][1:])
            elif "momentum" in group:
                group["momentum"] = value


def _stair(value: float, count: int) -> float:
    return math.floor(value * count) / count if count else value


def build_scheduler(config: SchedulerConfig, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """The schedule that a name means: DeepSpeed's, or a class of ``torch.optim.lr_scheduler``.

    Raises:
        ConfigError: the name or an argument is unknown.
    """
    own = {kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)}
    kind = own.get(config.type) or getattr(torch.optim.lr_scheduler, config.type, None)
    if kind is None or kind is LambdaLR:
        raise ConfigError(
            f"scheduler.type {config.type} is not known; DeepSpeed's are {', '.join(VALID_LR_SCHEDULES)}"
        )
    try:
        return kind(optimizer, **config.params)
    except TypeError as error:
        raise ConfigError(f"scheduler.params of {config.type}: {error}") from None
