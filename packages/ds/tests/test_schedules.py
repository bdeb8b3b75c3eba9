"""Schedules against closed formulas, step by step."""

import math

import pytest
import torch

from ds.config import ConfigError, SchedulerConfig
from ds.schedules import VALID_LR_SCHEDULES, build_scheduler, check_scheduler


def optimizer(kind=torch.optim.AdamW, groups=1, lr=0.1):
    return kind([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr * (i + 1)} for i in range(groups)])


def rates(name, params, *, steps, groups=1, kind=torch.optim.AdamW):
    """Rates in use at steps 0, 1, ...: per step a list over groups."""
    inner = optimizer(kind, groups)
    scheduler = build_scheduler(SchedulerConfig(type=name, params=params), inner)
    used = []
    for _ in range(steps):
        used.append([group["lr"] for group in inner.param_groups])
        inner.step()
        scheduler.step()
    return used


def first(name, params, steps):
    return [row[0] for row in rates(name, params, steps=steps)]


def test_deepspeeds_names_are_there():
    assert sorted(VALID_LR_SCHEDULES) == [
        "LRRangeTest",
        "OneCycle",
        "WarmupCosineLR",
        "WarmupDecayLR",
        "WarmupLR",
    ]
    needed = {"OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}
    for name in VALID_LR_SCHEDULES:
        params = needed.get(
            name, {"total_num_steps": 9} if name in ("WarmupDecayLR", "WarmupCosineLR") else {}
        )
        assert len(first(name, params, 3)) == 3


def test_warm_up_grows_with_the_logarithm():
    got = first("WarmupLR", {"warmup_min_lr": 0.2, "warmup_max_lr": 1.0, "warmup_num_steps": 4}, 8)
    batches = [0, 0, 1, 2, 3]
    assert got[:5] == pytest.approx([0.2 + 0.8 * math.log(b + 1) / math.log(4) for b in batches])
    assert got[5:] == [1.0, 1.0, 1.0]


def test_warm_up_grows_on_a_line_to_each_groups_own_rate():
    got = rates("WarmupLR", {"warmup_num_steps": 5, "warmup_type": "linear"}, steps=8, groups=2)
    shares = [0, 0, 0.2, 0.4, 0.6, 0.8, 1, 1]
    assert got == [pytest.approx([0.1 * share, 0.2 * share]) for share in shares]


def test_a_list_gives_every_group_its_own_rate():
    params = {
        "warmup_min_lr": [0.0, 1.0],
        "warmup_max_lr": [2.0, 3.0],
        "warmup_num_steps": 2,
        "warmup_type": "linear",
    }
    assert rates("WarmupLR", params, steps=4, groups=2) == [[0.0, 1.0], [0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]
    with pytest.raises(ConfigError, match="one value for each of the 1 parameter groups, got 2"):
        rates("WarmupLR", params, steps=1)


def test_decay_goes_down_on_a_line_to_the_end():
    params = {"total_num_steps": 10, "warmup_num_steps": 4, "warmup_max_lr": 1.0, "warmup_type": "linear"}
    shares = [0, 0, 0.25, 0.5, 0.75, *((10 - batch) / 6 for batch in range(4, 11)), 0, 0]
    assert first("WarmupDecayLR", params, 14) == pytest.approx(shares)


def test_cosine_is_half_a_wave_of_the_optimizers_rate():
    params = {
        "total_num_steps": 10, "warmup_num_steps": 4, "warmup_min_ratio": 0.2, "cos_min_ratio": 0.1,
        "warmup_type": "linear",
    }  # fmt: skip
    ratios = [0.0, 0.2, 0.4, 0.6, 0.8]
    ratios += [0.1 + 0.9 * (1 + math.cos(math.pi * min(1, (batch - 3) / 6))) / 2 for batch in range(4, 13)]
    assert first("WarmupCosineLR", params, 14) == pytest.approx([0.1 * ratio for ratio in ratios])


@pytest.mark.parametrize("staircase", [False, True])
def test_the_range_test_only_grows(staircase):
    params = {
        "lr_range_test_min_lr": 0.5, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0,
        "lr_range_test_staircase": staircase,
    }  # fmt: skip
    intervals = [step // 4 if staircase else step / 4 for step in range(10)]
    assert first("LRRangeTest", params, 10) == pytest.approx([0.5 * (1 + 2 * part) for part in intervals])


def test_one_cycle_goes_up_and_down_and_decays():
    params = {
        "cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 2, "cycle_second_step_size": 4,
        "decay_step_size": 2, "decay_lr_rate": 1.0,
    }  # fmt: skip
    assert first("OneCycle", params, 10) == pytest.approx([1, 2, 3, 2.5, 2, 1.5, 1, 1 / 1.5, 1 / 2, 1 / 2.5])


def test_one_cycle_moves_the_first_beta_the_other_way():
    params = {
        "cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 2, "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9, "decay_step_size": 1, "decay_mom_rate": 0.01,
    }  # fmt: skip
    inner = optimizer()
    scheduler = build_scheduler(SchedulerConfig(type="OneCycle", params=params), inner)
    betas = []
    for _ in range(6):
        betas.append(inner.param_groups[0]["betas"])
        inner.step()
        scheduler.step()
    assert [beta for beta, _ in betas] == pytest.approx([0.9, 0.85, 0.8, 0.85, 0.9, 0.9 * 1.01])
    assert {second for _, second in betas} == {0.999}


def test_one_cycle_leaves_momentum_alone_without_betas():
    params = {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 2}
    assert rates("OneCycle", params, steps=3, kind=torch.optim.SGD) == [[1.0], [2.0], [3.0]]


def test_one_cycle_climbs_stairs():
    params = {
        "cycle_min_lr": 0.0,
        "cycle_max_lr": 1.0,
        "cycle_first_step_size": 4,
        "cycle_first_stair_count": 2,
    }
    assert first("OneCycle", params, 9) == [0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0]


def test_a_saved_schedule_goes_on():
    params = {"total_num_steps": 10, "warmup_num_steps": 4}
    whole = first("WarmupDecayLR", params, 9)
    inner = optimizer()
    scheduler = build_scheduler(SchedulerConfig(type="WarmupDecayLR", params=params), inner)
    for _ in range(5):
        inner.step()
        scheduler.step()
    other = optimizer()
    resumed = build_scheduler(SchedulerConfig(type="WarmupDecayLR", params=params), other)
    resumed.load_state_dict(scheduler.state_dict())
    other.step()
    resumed.step()
    assert other.param_groups[0]["lr"] == whole[6]


def test_torchs_schedules_go_by_name():
    assert first("StepLR", {"step_size": 1, "gamma": 0.5}, 3) == pytest.approx([0.1, 0.05, 0.025])


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("WarmupLR", {"warmup_type": "cubic"}, "warmup_type must be log or linear, got 'cubic'"),
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps must be at least 1, got 0"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "must be at least 1, got 0"),
        ("OneCycle", {"cycle_min_lr": 1, "cycle_max_lr": 2, "cycle_first_step_size": 0}, "at least 1"),
        ("LRScheduler", {}, "scheduler.type: LRScheduler is not known"),
    ],
)
def test_values_out_of_range_are_refused(name, params, said):
    with pytest.raises(ConfigError, match=said):
        first(name, params, 1)


def test_what_is_missing_and_what_is_unknown_is_told_together():
    config = SchedulerConfig(type="OneCycle", params={"cycle_min_rl": 1})
    assert list(check_scheduler(config)) == [
        "scheduler.params.cycle_min_rl: unknown key; did you mean scheduler.params.cycle_min_lr?",
        "scheduler.params.cycle_min_lr: missing; OneCycle needs it",
        "scheduler.params.cycle_max_lr: missing; OneCycle needs it",
    ]
