"""The batch that fits is found without allocating, and trains to the same weights as any other split."""

import logging

import pytest
import torch

import ds
import ds_zero
from ds.demo.model import GPT, GPTConfig

CONFIG = {
    "train_batch_size": 8,
    "gradient_clipping": 0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2},
}


def build():
    torch.manual_seed(0)
    return GPT(GPTConfig(vocabulary=64, width=32, depth=2, heads=2))


def tokens(count):
    return (torch.zeros(count, 16, dtype=torch.long),)


def loss(logits):
    return logits.float().square().mean()


def test_less_memory_gives_smaller_micro_batches_and_says_so(caplog):
    caplog.set_level(logging.INFO)
    chosen = []
    for budget in (1 << 30, 1_200_000):
        config = ds.fit_batch(CONFIG, build(), tokens, budget_bytes=budget, loss=loss)
        chosen.append((config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]))
        assert config["train_batch_size"] == 8
    assert chosen[0] == (8, 1)
    assert chosen[1][0] * chosen[1][1] == 8
    assert chosen[1][0] < 8
    assert "fit_batch: micro-batch 8, accumulation 1:" in caplog.text
    with pytest.raises(ValueError, match="one sample needs"):
        ds.fit_batch(CONFIG, build(), tokens, budget_bytes=1000, loss=loss)
    with pytest.raises(ds.ConfigError, match="train_batch_size: fit_batch needs it"):
        ds.fit_batch({"train_micro_batch_size_per_gpu": 1}, build(), tokens, budget_bytes=1 << 30)


def reported(config):
    engine, *_ = ds.initialize(model=build(), config=config)
    data = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(1))
    losses = []
    for part in data.split(engine.train_micro_batch_size_per_gpu()):
        value = loss(engine(part))
        losses.append(float(engine.backward(value).detach()))
        engine.step()
    state = ds_zero.full_state_dict(engine.module)
    engine.destroy()
    return sum(losses) / len(losses), state


def test_the_loss_reported_does_not_depend_on_the_accumulation():
    whole, first = reported(CONFIG | {"train_micro_batch_size_per_gpu": 8})
    parts, second = reported(CONFIG | {"train_micro_batch_size_per_gpu": 2})
    assert whole == pytest.approx(parts, rel=1e-5)
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], atol=1e-5, rtol=0)
