"""Optimizers by name: DeepSpeed's rules for Adam, torch's classes for the rest."""

import logging

import pytest
import torch

from ds.config import ConfigError, OptimizerConfig
from ds.optimizers import build_optimizer


def build(name, **params):
    return build_optimizer(OptimizerConfig(type=name, params=params), [torch.nn.Parameter(torch.zeros(2))])


@pytest.mark.parametrize(
    ("name", "params", "kind", "weight_decay"),
    [
        ("Adam", {}, torch.optim.AdamW, 0.0),
        ("adam", {"adam_w_mode": False}, torch.optim.Adam, 0.0),
        ("AdamW", {}, torch.optim.AdamW, 0.0),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW, 0.01),
        ("AdamW", {"weight_decay": 0.1, "adam_w_mode": False}, torch.optim.AdamW, 0.1),
        ("SGD", {"momentum": 0.9}, torch.optim.SGD, 0),
        ("adagrad", {}, torch.optim.Adagrad, 0),
        ("NAdam", {}, torch.optim.NAdam, 0),
    ],
)
def test_names_mean_what_they_mean_in_deepspeed(name, params, kind, weight_decay):
    optimizer = build(name, lr=0.5, **params)
    assert type(optimizer) is kind
    assert optimizer.defaults["lr"] == 0.5
    assert optimizer.defaults["weight_decay"] == weight_decay


def test_adam_says_that_it_is_adamw(caplog):
    caplog.set_level(logging.INFO)
    build("Adam", betas=[0.8, 0.9])
    assert [record.message for record in caplog.records] == [
        'optimizer "Adam" is AdamW, as in DeepSpeed; set params.adam_w_mode to false for Adam'
    ]
    caplog.clear()
    build("AdamW")
    assert "weight_decay is not set" in caplog.text


@pytest.mark.parametrize("name", ["OneBitAdam", "MuAdam"])
def test_optimizers_that_come_later_are_named(name):
    with pytest.raises(ConfigError, match=f"{name} is not yet supported by ds 0.1"):
        build(name)


def test_values_that_torch_refuses():
    with pytest.raises(
        ConfigError, match=r"optimizer\.params: AdamW refuses them: Invalid learning rate: -1"
    ):
        build("AdamW", lr=-1)


def test_groups_keep_their_own_rates():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.1, 0.2)]
    optimizer = build_optimizer(OptimizerConfig(type="AdamW", params={"lr": 0.5}), groups)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
