"""The engine in one process: the same numbers as plain torch, and what it counts and tells."""

import copy
import json
import logging

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ds
import ds_zero
from ds.engine import NotYetError

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.flavour = "plain"

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))


def model():
    torch.manual_seed(0)
    return Tied()


def loss_of(module, tokens):
    return nn.functional.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batches(count, size=4):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 16, (size, 6), generator=generator) for _ in range(count)]


def engine_with(**changes):
    engine, *_ = ds.initialize(model=model(), config={**CONFIG, **changes})
    return engine


def train(engine, tokens, **options):
    for batch in tokens:
        engine.backward(loss_of(engine, batch), **options)
        engine.step()


def plain_run(tokens, accumulation=2):
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = ds.schedules.WarmupLR(optimizer, warmup_num_steps=4)
    for index, batch in enumerate(tokens, start=1):
        (loss_of(module, batch) / accumulation).backward()
        if index % accumulation == 0:
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return module.state_dict()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_weights_are_those_of_a_plain_loop(stage):
    tokens = batches(8)
    engine = engine_with(zero_optimization={"stage": stage})
    train(engine, tokens)
    expected = plain_run(tokens)
    got = engine.module_state_dict()
    assert list(got) == list(expected)
    for name, value in expected.items():
        # The norm is summed in another order: the clipping factor may differ in its last bits.
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6, msg=name)
    engine.destroy()
    torch.testing.assert_close(engine.module.embed.weight, expected["embed.weight"], rtol=1e-5, atol=1e-6)
    engine.destroy()


def test_all_stages_give_the_same_bits():
    states = []
    for stage in (0, 1, 2, 3):
        engine = engine_with(zero_optimization={"stage": stage}, bf16={"enabled": True})
        train(engine, batches(4))
        states.append(engine.module_state_dict())
    for state in states[1:]:
        assert all(torch.equal(state[name], value) for name, value in states[0].items())


def test_steps_are_counted():
    engine = engine_with()
    assert engine.get_global_grad_norm() is None
    seen = []
    for batch in batches(5):
        engine.backward(loss_of(engine, batch))
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        seen.append((boundary, engine.was_step_applied(), engine.global_steps, engine.global_samples))
    assert seen == [
        (False, False, 0, 0),
        (True, True, 1, 8),
        (False, False, 1, 8),
        (True, True, 2, 16),
        (False, False, 2, 16),
    ]
    assert (engine.micro_steps, engine.skipped_steps) == (5, 0)
    assert engine.get_global_grad_norm() > 0
    assert engine.lr_scheduler.last_epoch == 2


def test_forced_boundaries_go_before_the_count():
    engine = engine_with()
    applied = []
    for batch, boundary in zip(batches(4), [True, False, False, True], strict=True):
        engine.set_gradient_accumulation_boundary(is_boundary=boundary)
        engine.backward(loss_of(engine, batch))
        engine.step()
        applied.append(engine.was_step_applied())
    assert applied == [True, False, False, True]
    assert engine.global_steps == 2


def test_the_loss_is_divided_unless_told_not_to():
    first, second, third = engine_with(), engine_with(), engine_with()
    train(first, batches(2))
    for batch in batches(2):
        second.backward(loss_of(second, batch) / 2, scale_wrt_gas=False)
        second.step()
        second.scale(loss_of(third, batch)).backward()
        third.step()
    assert first.get_global_grad_norm() == second.get_global_grad_norm() == third.get_global_grad_norm()


def test_backward_gives_the_loss_back_and_can_keep_the_graph():
    engine = engine_with()
    loss = loss_of(engine, batches(1)[0])
    assert engine.backward(loss, retain_graph=True) is loss
    engine.backward(loss)
    engine.step()


def test_no_sync_keeps_the_sum():
    engine, other = engine_with(), engine_with()
    first, second = batches(2)
    with engine.no_sync():
        engine.backward(loss_of(engine, first))
    engine.step()
    engine.backward(loss_of(engine, second))
    engine.step()
    train(other, [first, second])
    assert engine.get_global_grad_norm() == pytest.approx(other.get_global_grad_norm(), rel=1e-5)


def test_a_gradient_that_is_not_finite_is_skipped_with_bf16_and_an_error_without():
    engine = engine_with(bf16={"enabled": True}, gradient_accumulation_steps=1)
    before = engine.module_state_dict()
    engine.backward(loss_of(engine, batches(1)[0]) * float("nan"))
    engine.step()
    assert (engine.global_steps, engine.skipped_steps, engine.was_step_applied()) == (1, 1, False)
    assert engine.lr_scheduler.last_epoch == 0
    assert all(torch.equal(value, before[name]) for name, value in engine.module_state_dict().items())
    for changes in ({}, {"bf16": {"enabled": True, "check_grad_overflow": False}}):
        strict = engine_with(gradient_accumulation_steps=1, **changes)
        strict.backward(loss_of(strict, batches(1)[0]) * float("inf"))
        with pytest.raises(ds_zero.NonFiniteGradientError):
            strict.step()


def test_what_the_engine_lacks_is_the_models():
    engine = engine_with()
    assert engine.flavour == "plain"
    assert engine.body is engine.module.body
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = engine.nothing_of_the_kind
    assert not engine.eval().module.training
    assert engine.train().module.training


def test_the_names_of_deepspeed_answer():
    engine = engine_with(zero_optimization={"stage": 2}, bf16={"enabled": True}, steps_per_print=5)
    assert engine.get_batch_info() == (8, 4, 2)
    assert (engine.zero_optimization_stage(), engine.zero_optimization_partition_weights()) == (2, False)
    assert engine.get_data_types() == (torch.bfloat16, torch.float32)
    assert (engine.world_size, engine.global_rank, engine.mp_world_size) == (1, 0, 1)
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("AdamW", "WarmupLR")
    assert engine.config["zero_optimization"]["stage"] == 2
    assert engine.get_mom() == [(0.9, 0.999)]
    assert json.loads(json.dumps(engine.config)) == engine.config


def test_progress_is_logged_every_so_many_steps(caplog):
    caplog.set_level(logging.INFO)
    train(engine_with(steps_per_print=2, gradient_accumulation_steps=1), batches(5))
    lines = [record.message for record in caplog.records if record.name == "ds.engine"]
    assert [line.partition(",")[0] for line in lines] == ["step 2", "step 4"]
    caplog.clear()
    train(engine_with(steps_per_print=float("inf"), gradient_accumulation_steps=1), batches(2))
    assert [record for record in caplog.records if record.name == "ds.engine"] == []


@pytest.mark.parametrize("enabled", [False, True])
def test_the_saved_model_loads_without_ds(tmp_path, enabled):
    engine = engine_with(zero_optimization={"stage": 3}, bf16={"enabled": enabled})
    train(engine, batches(2))
    assert engine.save_16bit_model(str(tmp_path / "out"))
    state = load_file(tmp_path / "out" / "model.safetensors")
    fresh = Tied()
    missing, unexpected = fresh.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["head.weight"], [])
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16 if enabled else torch.float32}
    assert torch.equal(fresh.head.weight, engine.module_state_dict()["embed.weight"].float())


def test_frozen_parameters_can_be_left_out(tmp_path):
    module = model()
    module.body.requires_grad_(False)
    engine, *_ = ds.initialize(model=module, config=CONFIG)
    engine.save_16bit_model(str(tmp_path), exclude_frozen_parameters=True)
    assert sorted(load_file(tmp_path / "model.safetensors")) == ["embed.weight"]


def test_a_model_that_cannot_be_saved_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="rank 0 could not write"):
        engine_with().save_16bit_model(str(tmp_path / "file"))


def test_checkpoints_are_not_there_yet(tmp_path):
    engine = engine_with()
    with pytest.raises(NotYetError, match="arrives with ds-ckpt"):
        engine.save_checkpoint(str(tmp_path), tag="a")
    with pytest.raises(NotYetError, match="arrives with ds-ckpt"):
        engine.load_checkpoint(str(tmp_path))


def test_two_engines_do_not_mind_each_other():
    training, judging = engine_with(zero_optimization={"stage": 3}), copy.deepcopy(model())
    judge, optimizer, *_ = ds.initialize(
        model=judging, config={"train_batch_size": 8, "zero_optimization": {"stage": 3}}
    )
    assert optimizer is None
    with torch.no_grad():
        before = judge(batches(1)[0])
    train(training, batches(4))
    with torch.no_grad():
        assert torch.equal(judge(batches(1)[0]), before)
    with pytest.raises(RuntimeError, match="step needs an optimizer, and this engine has none"):
        judge.step()
