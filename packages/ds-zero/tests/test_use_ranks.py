"""What users do with a sharded model on several ranks, and what they get wrong."""

import copy

import pytest
import torch

import ds_comm
import ds_zero
from ds_comm.testing import RankFailedError, run_ranks
from ds_zero.testing import OddModel, odd_batches, odd_optimizer

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def sharded(stage, **settings):
    torch.manual_seed(0)
    model = OddModel()
    return ds_zero.shard(model, odd_optimizer(model), stage=stage, **settings)


def my_part(batch):
    world = ds_comm.init()
    return batch.chunk(world.world_size)[world.rank]


def step(model, optimizer, batch):
    optimizer.zero_grad()
    model(my_part(batch)).backward()
    optimizer.step()


def same(states):
    first = states[0]
    return all(torch.equal(first[name], state[name]) for state in states for name in first)


def accumulate(stage, syncs_every_time):
    model, optimizer = sharded(stage)
    *first, last = odd_batches(3)
    for batch in first:
        if syncs_every_time:
            model(my_part(batch)).backward()
        else:
            with ds_zero.no_sync(model):
                model(my_part(batch)).backward()
    model(my_part(last)).backward()
    optimizer.step()
    return optimizer.grad_norm


@STAGES
def test_no_sync_sums_the_same_gradients_as_reducing_every_time(stage):
    every = run_ranks(accumulate, 2, stage, True)
    once = run_ranks(accumulate, 2, stage, False)
    assert once == pytest.approx(every, rel=1e-5)


def step_inside_no_sync(stage):
    model, optimizer = sharded(stage)
    with ds_zero.no_sync(model):
        model(my_part(odd_batches(1)[0])).backward()
    with pytest.raises(ds_zero.ZeroError, match=r"outside no_sync"):
        optimizer.step()


@STAGES
def test_a_step_with_unreduced_gradients_is_refused(stage):
    run_ranks(step_inside_no_sync, 2, stage)


def skip_a_block(stage, skipping_rank):
    model, optimizer = sharded(stage)
    for batch in odd_batches(2):
        model.skip = 1 if ds_comm.init().rank == skipping_rank else None
        step(model, optimizer, batch)
    return ds_zero.full_state_dict(model)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_block_one_rank_skips_counts_as_zero_there(stage):
    states = run_ranks(skip_a_block, 2, stage, 1)
    assert same(states)
    everyone = run_ranks(skip_a_block, 2, stage, None)
    assert not torch.equal(states[0]["blocks.1.up.weight"], everyone[0]["blocks.1.up.weight"])


def test_a_block_one_rank_skips_is_an_error_by_name_at_stage_3():
    with pytest.raises(RankFailedError) as failure:
        run_ranks(skip_a_block, 2, 3, 1)
    assert set(failure.value.errors) == {0, 1}
    for text in failure.value.errors.values():
        assert "blocks.1 parameters" in text
        assert "blocks.2 parameters" in text
        assert "test_use_ranks.py" in text


def one_batch_more(stage):
    model, optimizer = sharded(stage)
    for batch in odd_batches(2 + ds_comm.init().rank):
        step(model, optimizer, batch)
    ds_comm.shutdown()


@STAGES
def test_one_batch_more_on_one_rank_is_an_error_on_all(stage):
    with pytest.raises(RankFailedError) as failure:
        run_ranks(one_batch_more, 2, stage)
    assert set(failure.value.errors) == {0, 1}
    assert "rank 0" in failure.value.errors[1]


def poison(stage, on_nonfinite):
    model, optimizer = sharded(stage, on_nonfinite=on_nonfinite)
    before = ds_zero.full_state_dict(model)
    loss = model(my_part(odd_batches(1)[0]))
    (loss * float("nan") if ds_comm.init().rank == 1 else loss).backward()
    if on_nonfinite == "raise":
        with pytest.raises(
            ds_zero.NonFiniteGradientError, match="gradient norm is nan at step 1; first non-finite"
        ):
            optimizer.step()
    else:
        optimizer.step()
    assert optimizer.step_skipped
    assert same([before, ds_zero.full_state_dict(model)])
    step(model, optimizer, odd_batches(1)[0])
    assert not optimizer.step_skipped
    assert not same([before, ds_zero.full_state_dict(model)])


@STAGES
@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_nan_on_one_rank_changes_no_weight_on_any(stage, on_nonfinite):
    run_ranks(poison, 2, stage, on_nonfinite)


def edit(stage, precision):
    rank = ds_comm.init().rank
    model, optimizer = sharded(stage, precision=precision)
    step(model, optimizer, odd_batches(1)[0])
    masters = [
        flat.master.clone() for flat in ds_zero.engine.engine_of(model).flats if flat.master is not None
    ]
    with ds_zero.gathered(model.parameters()):
        assert model.blocks[1].up.weight.shape == (99, 33)
    for flat, master in zip(
        [f for f in ds_zero.engine.engine_of(model).flats if f.master is not None], masters, strict=True
    ):
        assert torch.equal(flat.master, master)  # a look loses no digits
    weight = model.blocks[1].up.weight
    with ds_zero.gathered(weight, src=1), torch.no_grad():
        weight.fill_(7.0 if rank == 1 else -1.0)
    state = ds_zero.full_state_dict(model)
    assert bool((state["blocks.1.up.weight"] == 7.0).all())
    step(model, optimizer, odd_batches(1)[0])
    after = ds_zero.full_state_dict(model)
    assert bool((after["blocks.1.up.weight"].float() - 7.0).abs().max() < 0.1)
    return after


@STAGES
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_whole_parameters_can_be_read_and_edited(stage, precision):
    assert same(run_ranks(edit, 2, stage, precision))


def evaluate_between_steps(stage):
    results = []
    for evaluates in (False, True):
        model, optimizer = sharded(stage)
        for batch in odd_batches(3):
            step(model, optimizer, batch)
            if evaluates:
                with torch.no_grad():
                    model(my_part(batch))
                    model.blocks[1](torch.ones(2, 33))
                    model.embed(torch.tensor([1, 2]))
        results.append(ds_zero.full_state_dict(model))
    return same(results)


@STAGES
def test_evaluation_and_calls_of_parts_between_steps_change_nothing(stage):
    assert run_ranks(evaluate_between_steps, 2, stage) == [True, True]


def train_a_part_called_alone(stage):
    model, optimizer = sharded(stage)
    x = torch.ones(2, 33)
    (model.blocks[1](x).sum() + model.head(x).sum()).backward()
    optimizer.step()
    return ds_zero.full_state_dict(model)


def test_a_loss_of_parts_called_alone_gives_the_same_bits_at_every_stage():
    states = [state for stage in (0, 1, 2, 3) for state in run_ranks(train_a_part_called_alone, 2, stage)]
    assert same(states)


def two_models(stage):
    torch.manual_seed(0)
    first, second = OddModel(), OddModel(width=21)
    first, first_optimizer = ds_zero.shard(first, odd_optimizer(first), stage=stage)
    second, second_optimizer = ds_zero.shard(second, odd_optimizer(second), stage=3)
    for batch in odd_batches(2):
        first_optimizer.zero_grad()
        second_optimizer.zero_grad()
        (first(my_part(batch)) + second(my_part(batch))).backward()
        first_optimizer.step()
        second_optimizer.step()
    return ds_zero.full_state_dict(first)


@STAGES
def test_two_models_with_one_loss_in_one_process(stage):
    alone = run_ranks(train_alone, 2, stage)
    assert same([*run_ranks(two_models, 2, stage), *alone])


def train_alone(stage):
    torch.manual_seed(0)
    model = OddModel()
    model, optimizer = ds_zero.shard(model, odd_optimizer(model), stage=stage)
    for batch in odd_batches(2):
        step(model, optimizer, batch)
    return ds_zero.full_state_dict(model)


def save_and_load(stage, precision):
    model, optimizer = sharded(stage, precision=precision)
    step(model, optimizer, odd_batches(1)[0])
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    shapes = {name: value.shape for name, value in OddModel().state_dict().items()}
    assert {name: value.shape for name, value in saved.items()} == shapes
    assert same([ds_zero.full_state_dict(model), saved])
    moments = copy.deepcopy(optimizer.state_dict())
    step(model, optimizer, odd_batches(2)[1])
    continued = ds_zero.full_state_dict(model)
    if precision == "fp32":
        torch.manual_seed(3)
        other = OddModel()
        other, other_optimizer = ds_zero.shard(other, odd_optimizer(other), stage=stage)
        other.load_state_dict(saved)
        other_optimizer.load_state_dict(moments)
        step(other, other_optimizer, odd_batches(2)[1])
        assert same([continued, ds_zero.full_state_dict(other)])
    ds_zero.close(model)
    assert same([continued, model.state_dict()])
    model(odd_batches(1)[0]).backward()
    assert model.embed.weight.grad is not None


@STAGES
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_dicts_are_whole_and_resume_exactly(stage, precision):
    run_ranks(save_and_load, 2, stage, precision)


def build_deferred(stage):
    torch.manual_seed(0)
    with ds_zero.sharded_init():
        model = OddModel()
    assert all(parameter.is_meta for parameter in model.parameters())
    model, optimizer = ds_zero.shard(model, odd_optimizer(model), stage=stage)
    for batch in odd_batches(2):
        step(model, optimizer, batch)
    return ds_zero.full_state_dict(model)


@STAGES
def test_a_model_built_in_sharded_init_trains_to_the_same_bits(stage):
    assert same([*run_ranks(build_deferred, 2, stage), *run_ranks(train_alone, 2, stage)])
