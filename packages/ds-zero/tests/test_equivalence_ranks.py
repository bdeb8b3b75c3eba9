"""Sharding never changes the maths: every stage and setting gives the same bits."""

import pytest
import torch

import ds_comm
import ds_zero
from ds_comm.testing import run_ranks
from ds_zero.testing import OddModel, odd_batches, odd_optimizer

STEPS = 3
VARIANTS = [
    {"stage": 1},
    {"stage": 2},
    {"stage": 3},
    {"stage": 1, "bucket_numel": 0},
    {"stage": 2, "bucket_numel": 10**9},
    {"stage": 3, "max_gathered_units": 1},
    {"stage": 3, "max_gathered_units": 4},
    {"stage": 3, "units": ["blocks.0", "blocks.2", "norm"]},
    {"stage": 3, "recompute": True},
    {"stage": 0, "recompute": True},
]


def train(rank, world_size, *, accumulation=1, recompute=False, clip_norm=None, **settings):
    torch.manual_seed(rank)  # rank 0's initial values count
    model = OddModel(recompute=recompute)
    optimizer = odd_optimizer(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    model, optimizer = ds_zero.shard(model, optimizer, clip_norm=clip_norm, **settings)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for batch in odd_batches(accumulation, seed=step):
            loss = model(batch.chunk(world_size)[rank]) / accumulation
            loss.backward()
        optimizer.step()
        schedule.step()
        norms.append((optimizer.grad_norm, optimizer.clipped_grad_norm))
    state = ds_zero.full_state_dict(model)
    ds_zero.close(model)
    return state, norms


def train_plain(*, accumulation, clip_norm):
    torch.manual_seed(0)
    model = OddModel()
    optimizer = odd_optimizer(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for batch in odd_batches(accumulation, seed=step):
            (model(batch) / accumulation).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm or float("inf"))))
        optimizer.step()
        schedule.step()
    return model.state_dict(), norms


def compare_variants(precision, accumulation, clip_norm):
    """On every rank: names of variants whose bits differ from stage 0, and stage 0's own result."""
    world = ds_comm.init()
    common = {"precision": precision, "accumulation": accumulation, "clip_norm": clip_norm}
    base, norms = train(world.rank, world.world_size, stage=0, **common)
    wrong = []
    for variant in VARIANTS:
        state, other_norms = train(world.rank, world.world_size, **common, **variant)
        if other_norms != norms or any(not torch.equal(base[name], state[name]) for name in base):
            wrong.append(variant)
    return wrong, {name: value.tolist() for name, value in base.items()}, norms


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("precision", "accumulation", "clip_norm"),
    [("fp32", 1, None), ("fp32", 4, 0.05), ("bf16", 1, 0.05), ("bf16", 4, None)],
)
def test_every_stage_and_setting_gives_the_same_bits(world_size, precision, accumulation, clip_norm):
    results = run_ranks(compare_variants, world_size, precision, accumulation, clip_norm)
    for wrong, base, norms in results:
        assert wrong == []
        assert (base, norms) == results[0][1:]
    if precision == "fp32":
        plain, plain_norms = train_plain(accumulation=accumulation, clip_norm=clip_norm)
        # The sum over the batch is split over ranks, so rounding differs; AdamW magnifies it.
        for name, value in plain.items():
            torch.testing.assert_close(
                torch.tensor(results[0][1][name]).reshape(value.shape), value, atol=2e-4, rtol=1e-3
            )
        assert [before for before, _ in results[0][2]] == pytest.approx(plain_norms, rel=1e-3)
    if clip_norm is not None:
        assert all(after <= clip_norm for _, after in results[0][2])
        assert any(before > clip_norm for before, _ in results[0][2])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "RMSprop", "NAdam"])
def test_any_elementwise_optimizer_gives_the_plain_numbers(stage, name):
    def build(model):
        return getattr(torch.optim, name)([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def run(sharded):
        torch.manual_seed(0)
        model = OddModel()
        optimizer = build(model)
        if sharded:
            model, optimizer = ds_zero.shard(model, optimizer, stage=stage)
        for batch in odd_batches(3):
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
        return ds_zero.full_state_dict(model) if sharded else model.state_dict()

    plain, sharded = run(False), run(True)
    for key, value in plain.items():
        torch.testing.assert_close(sharded[key], value, atol=1e-5, rtol=1e-4)
