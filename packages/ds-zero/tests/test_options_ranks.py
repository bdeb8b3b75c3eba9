"""Precision, offload and optimizers: every option gives the same bits at every stage, and the right ones."""

import os
import subprocess

import pytest
import torch

import ds_zero
from ds_comm.testing import RankFailedError, run_ranks
from ds_zero import LossScale, Offload, Precision
from ds_zero.optimizers import Lamb, Lion, Muon, mark_hidden_matrices
from ds_zero.swap_folder import remove_stale
from ds_zero.testing import OddModel, odd_batches, odd_optimizer

STEPS = 3
FP16 = Precision(param="fp16", loss_scale=LossScale(initial=1024.0))


def _trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.numel()]


def muon(model):
    mark_hidden_matrices(model)
    return Muon(_trained(model), lr=1e-2, weight_decay=0.1)


OPTIMIZERS = {
    "adamw": odd_optimizer,
    "adagrad": lambda model: torch.optim.Adagrad(_trained(model), initial_accumulator_value=0.1),
    "lion": lambda model: Lion(_trained(model), lr=1e-3, weight_decay=0.1),
    "lamb": lambda model: Lamb(_trained(model), lr=1e-2, weight_decay=0.1),
    "muon": muon,
    "adafactor": lambda model: torch.optim.Adafactor(_trained(model), lr=1e-2),
}


def train(rank, world_size, *, optimizer="adamw", accumulation=1, folder=None, offload=None, **settings):
    torch.manual_seed(0)
    model = OddModel()
    if offload is not None:
        settings["offload"] = Offload(path=str(folder) if folder else None, **offload)
    model, sharded = ds_zero.shard(model, OPTIMIZERS[optimizer](model), clip_norm=0.5, **settings)
    norms = []
    for step in range(STEPS):
        sharded.zero_grad()
        for batch in odd_batches(accumulation, seed=step):
            (model(batch.chunk(world_size)[rank]) / accumulation).backward()
        sharded.step()
        norms.append(sharded.grad_norm)
    state = ds_zero.full_state_dict(model)
    ds_zero.close(model)
    return {name: value.float() for name, value in state.items()}, norms


def train_plain(optimizer="adamw", accumulation=1):
    torch.manual_seed(0)
    model = OddModel()
    stepped = OPTIMIZERS[optimizer](model)
    for step in range(STEPS):
        stepped.zero_grad()
        for batch in odd_batches(accumulation, seed=step):
            (model(batch) / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        stepped.step()
    return model.state_dict()


def outcomes(**settings):
    """Rank 0's weights and norms; all ranks agree."""
    found = run_ranks(run_one, 2, settings)
    for state, norms in found[1:]:
        assert norms == found[0][1]
        assert_equal(state, found[0][0])
    return found[0]


def run_one(settings):
    import ds_comm

    world = ds_comm.init()
    return train(world.rank, world.world_size, **settings)


def assert_equal(state, other):
    assert state.keys() == other.keys()
    for name, value in state.items():
        assert torch.equal(value, other[name]), f"{name} differs by {(value - other[name]).abs().max()}"


def assert_close(state, other, *, tolerance):
    for name, value in state.items():
        worst = float((value - other[name].float()).abs().max()) if value.numel() else 0.0
        assert worst <= tolerance, f"{name} is off by {worst}"


PRECISIONS = {
    "fp16": FP16,
    "fp32 norms": Precision(param="bf16", keep_fp32=("norm",)),
    "bf16 gradients": Precision(grad="bf16"),
    "bf16 sums": Precision(param="bf16", reduce="bf16", accumulate="bf16"),
    "bf16 moments": Precision(state="bf16"),
    "autocast": Precision(autocast="bf16"),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_precision_gives_the_same_bits_at_every_stage(name):
    runs = [outcomes(stage=stage, precision=PRECISIONS[name], accumulation=2) for stage in (0, 1, 2, 3)]
    for state, norms in runs[1:]:
        assert norms == runs[0][1]
        assert_equal(state, runs[0][0])
    # Three steps of at most 1e-2 each; what is rounded to 8 bits may turn an element's step around.
    assert_close(runs[0][0], train_plain(accumulation=2), tolerance=7e-2)


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "adamw"])
def test_an_optimizer_gives_the_same_bits_at_every_stage_and_the_same_as_alone(optimizer):
    runs = [outcomes(stage=stage, optimizer=optimizer) for stage in (0, 1, 2, 3)]
    for state, norms in runs[1:]:
        assert norms == runs[0][1]
        assert_equal(state, runs[0][0])
    # Lion steps by the sign and Muon in bf16, so a rounding of the gradient's sum can show whole.
    tolerance = 6e-3 if optimizer in ("lion", "muon") else 1e-5
    assert_close(runs[0][0], train_plain(optimizer), tolerance=tolerance)


OFFLOADS = {
    "cpu optimizer": {"optimizer": "cpu"},
    "half of it": {"optimizer": "cpu", "ratio": 0.5},
    "cpu gradients": {"gradients": "cpu"},
    "all on the cpu": {"optimizer": "cpu", "gradients": "cpu", "parameters": "cpu"},
    "cpu parameters": {"parameters": "cpu"},
    "optimizer in files": {"optimizer": "file"},
    "all in files": {"optimizer": "file", "gradients": "file", "parameters": "file"},
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", OFFLOADS)
def test_offload_changes_nothing(name, precision, tmp_path):
    offload = OFFLOADS[name]
    plain = outcomes(stage=3, precision=precision, accumulation=2)
    least = 3 if "parameters" in offload else 2 if "gradients" in offload else 0
    for stage in range(least, 4):
        state, norms = outcomes(
            stage=stage, precision=precision, accumulation=2, offload=offload, folder=tmp_path
        )
        assert norms == plain[1]
        assert_equal(state, plain[0])
    assert not list(tmp_path.iterdir())


def test_offload_goes_with_adagrad_and_with_narrow_moments(tmp_path):
    precision = Precision(state="bf16")
    plain = outcomes(stage=2, precision=precision)
    moved = outcomes(stage=2, precision=precision, offload={"optimizer": "cpu"})
    assert_equal(moved[0], plain[0])
    plain = outcomes(stage=1, optimizer="adagrad")
    moved = outcomes(stage=1, optimizer="adagrad", offload={"optimizer": "cpu"})
    assert_equal(moved[0], plain[0])


def overflow(rank_of_nan, settings):
    import ds_comm

    world = ds_comm.init()
    torch.manual_seed(0)
    model = OddModel()
    model, optimizer = ds_zero.shard(model, odd_optimizer(model), **settings)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        loss = model(odd_batches(1, seed=step)[0].chunk(world.world_size)[world.rank])
        if step == 2 and world.rank == rank_of_nan:
            loss = loss * float("nan")
        loss.backward()
        before = ds_zero.full_state_dict(model)
        optimizer.step()
        after = ds_zero.full_state_dict(model)
        if not optimizer.step_skipped:
            schedule.step()
        seen.append((optimizer.step_skipped, optimizer.loss_scale, optimizer.num_steps))
        moved = any(not torch.equal(before[name], after[name]) for name in before)
        assert moved != optimizer.step_skipped
    return seen, schedule.last_epoch


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nan_on_one_rank_makes_every_rank_skip_the_same_step(stage):
    scale = LossScale(initial=64.0, hysteresis=1)
    settings = {"stage": stage, "precision": Precision(param="fp16", loss_scale=scale)}
    for seen, epoch in run_ranks(overflow, 2, 1, settings):
        assert [skipped for skipped, *_ in seen] == [False, False, True, False]
        assert [scale for _, scale, _ in seen] == [64, 64, 32, 32]
        assert [count for *_, count in seen] == [1, 2, 2, 3]
        assert epoch == 3


def whole_tensors(settings):
    import ds_comm

    world = ds_comm.init()
    torch.manual_seed(0)
    model = OddModel()
    names = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.numel()
    ]
    model, optimizer = ds_zero.shard(model, odd_optimizer(model), **settings)
    model(odd_batches(1)[0].chunk(world.world_size)[world.rank]).backward()
    gradients = {name: ds_zero.read_whole(model, name, "gradient") for name in names}
    square = sum(float(gradient.double().square().sum()) for gradient in gradients.values())
    ds_zero.write_whole(model, "blocks.0.up.bias", torch.zeros(99), "gradient")
    assert not ds_zero.read_whole(model, "blocks.0.up.bias", "gradient").any()
    optimizer.step()
    moments = {name: ds_zero.read_whole(model, name, "exp_avg") for name in names if "unused" not in name}
    weights = {name: ds_zero.read_whole(model, name) for name in names}
    ds_zero.write_whole(model, "blocks.1.down.weight", torch.full((33, 99), 0.25))
    ds_zero.write_whole(model, "norm.bias", torch.full((33,), 3.0), "exp_avg")
    assert torch.equal(ds_zero.read_whole(model, "norm.bias", "exp_avg"), torch.full((33,), 3.0))
    state = ds_zero.full_state_dict(model)
    assert torch.equal(state["blocks.1.down.weight"].float(), torch.full((33, 99), 0.25))
    return square**0.5, gradients, moments, weights


@pytest.mark.parametrize(
    "settings",
    [
        {"stage": 0},
        {"stage": 1},
        {"stage": 3},
        {"stage": 2, "precision": FP16},
        {"stage": 3, "offload": Offload(optimizer="cpu", gradients="cpu", parameters="cpu")},
    ],
)
def test_whole_tensors_can_be_read_and_set_however_they_are_sharded(settings):
    first, second = run_ranks(whole_tensors, 2, settings)
    _, gradients, moments, _ = first
    torch.manual_seed(0)
    model = OddModel()
    model(odd_batches(1)[0]).backward()
    narrow = "precision" in settings
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            tolerance = 5e-3 if narrow else 1e-6
            torch.testing.assert_close(gradients[name], parameter.grad, atol=tolerance, rtol=tolerance)
    for mine, theirs in zip(first[1:], second[1:], strict=True):
        for name, value in mine.items():
            assert torch.equal(value, theirs[name])
    assert not moments["blocks.0.up.bias"].any()


def cut_short(folder):
    import ds_comm

    world = ds_comm.init()
    torch.manual_seed(0)
    model = OddModel()
    offload = Offload(optimizer="file", path=str(folder))
    model, optimizer = ds_zero.shard(model, odd_optimizer(model), stage=3, offload=offload)
    for step in range(2):
        optimizer.zero_grad()
        model(odd_batches(1, seed=step)[0].chunk(world.world_size)[world.rank]).backward()
        if step == 1 and world.rank == 1:
            for path in folder.glob("ds-zero-swap-*-1-*/*states*"):
                os.truncate(path, 4096)
        optimizer.step()


def test_a_truncated_swap_file_is_an_error_on_all_ranks_with_the_path(tmp_path):
    with pytest.raises(RankFailedError) as failure:
        run_ranks(cut_short, 2, tmp_path)
    assert set(failure.value.errors) == {0, 1}
    for text in failure.value.errors.values():
        assert "is cut short" in text
        assert str(tmp_path) in text
    assert len(remove_stale(tmp_path)) == 2  # processes of a failed job are not there to clean up
    assert not list(tmp_path.iterdir())


def unfreeze(settings):
    import ds_comm

    world = ds_comm.init()
    torch.manual_seed(0)
    model = OddModel()
    late = ["blocks.1.up.weight", "blocks.1.down.bias", "frozen", "norm.weight"]
    named = dict(model.named_parameters())
    for name in late:
        named[name].requires_grad_(False)
    model, optimizer = ds_zero.shard(model, odd_optimizer(model), **settings)
    states = []
    for step in range(4):
        if step == 1:
            for name in late:
                named[name].requires_grad_(True)
            optimizer.add_param_group(
                {"params": [named[name] for name in late], "lr": 5e-3, "weight_decay": 0.0}
            )
            assert len(optimizer.param_groups) == 3
        if step == 2:
            named["blocks.0.up.weight"].requires_grad_(False)
        if step == 3:
            named["blocks.0.up.weight"].requires_grad_(True)
        optimizer.zero_grad()
        model(odd_batches(1, seed=step)[0].chunk(world.world_size)[world.rank]).backward()
        optimizer.step()
        states.append(ds_zero.full_state_dict(model))
    ds_zero.close(model)
    return states


def unfreeze_alone():
    torch.manual_seed(0)
    model = OddModel()
    late = ["blocks.1.up.weight", "blocks.1.down.bias", "frozen", "norm.weight"]
    named = dict(model.named_parameters())
    for name in late:
        named[name].requires_grad_(False)
    optimizer = odd_optimizer(model)
    for step in range(4):
        if step == 1:
            for name in late:
                named[name].requires_grad_(True)
            optimizer.add_param_group(
                {"params": [named[name] for name in late], "lr": 5e-3, "weight_decay": 0.0}
            )
        named["blocks.0.up.weight"].requires_grad_(step != 2)
        optimizer.zero_grad()
        model(odd_batches(1, seed=step)[0]).backward()
        optimizer.step()
    return model.state_dict()


def test_parameters_can_be_frozen_and_unfrozen_in_mid_run():
    alone = unfreeze_alone()
    whole = Offload(optimizer="cpu", gradients="cpu", parameters="cpu")
    runs = [run_ranks(unfreeze, 2, settings)[0] for settings in ({"stage": 0}, {"stage": 1}, {"stage": 3})]
    runs.append(run_ranks(unfreeze, 2, {"stage": 3, "offload": whole})[0])
    for states in runs:
        assert torch.equal(states[1]["blocks.0.up.weight"], states[2]["blocks.0.up.weight"])
        assert not torch.equal(states[2]["blocks.0.up.weight"], states[3]["blocks.0.up.weight"])
        assert not torch.equal(states[0]["frozen"], states[1]["frozen"])
        for state, first in zip(states, runs[0], strict=True):
            assert_equal(state, first)
        assert_close(states[-1], alone, tolerance=1e-5)


def forget_the_group():
    model = OddModel()
    model, optimizer = ds_zero.shard(model, odd_optimizer(model), stage=3)
    model.frozen.requires_grad_(True)
    model(odd_batches(1)[0]).backward()
    optimizer.step()


def test_a_frozen_parameter_that_gets_a_gradient_is_named():
    with pytest.raises(ds_zero.ZeroError, match="frozen was frozen when the model was sharded"):
        forget_the_group()


def train_reach(settings, steps):
    import ds_comm
    from ds_spec import events

    world = ds_comm.init()
    torch.manual_seed(world.rank)
    model = OddModel()
    model, optimizer = ds_zero.shard(model, odd_optimizer(model), clip_norm=0.5, **settings)
    sent = []
    for step in range(steps):
        optimizer.zero_grad()
        with events.collect() as seen:
            model(odd_batches(1, seed=step)[0].chunk(world.world_size)[world.rank]).backward()
        optimizer.step()
        sent.append([(e.group, e.tag, e.op, e.bytes_sent) for e in seen if hasattr(e, "bytes_sent")])
    shards = [flat.layout.shard_numel for flat in ds_zero.engine.engine_of(model).flats if flat.trainable]
    return ds_zero.full_state_dict(model), optimizer.grad_norm, sent[-1], sum(shards)


REACHES = {
    "weights": ({"weight_bits": 8}, 3),
    "weights of 4 bits": ({"weight_bits": 4}, 3),
    "gradients": ({"gradient_bits": 8}, 2),
    "gradients in two hops": ({"gradient_bits": 8, "node_size": 2}, 3),
    "all": ({"weight_bits": 8, "gradient_bits": 8, "node_size": 2, "secondary": True}, 3),
    "within the node, quantized": ({"gradient_bits": 8, "node_size": 2, "within_node": True}, 3),
}


@pytest.mark.parametrize("name", REACHES)
def test_quantized_communication_stays_near_the_exact_result(name):
    reach, stage = REACHES[name]
    world_size = 4 if "node_size" in reach else 2
    exact, norm, *_ = run_ranks(train_reach, world_size, {"stage": stage}, 2)[0]
    found = run_ranks(train_reach, world_size, {"stage": stage, "reach": ds_zero.Reach(**reach)}, 2)
    for state, found_norm, *_ in found:
        assert_equal(state, found[0][0])
        assert 0.5 < found_norm / norm < 2
        # AdamW moves an element by at most 1e-2 a step, and can turn where its gradient is near zero. Decoded
        # weights, all below 4.5, are off by half a scale on top.
        codes = {None: float("inf"), 8: 127, 4: 7}[reach.get("weight_bits")]
        assert_close(state, exact, tolerance=4e-2 + 4.5 / codes / 2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharding_within_a_node_gives_what_sharding_over_all_gives(stage):
    reach = ds_zero.Reach(node_size=2, within_node=True)
    exact, norm, *_ = run_ranks(train_reach, 4, {"stage": stage}, 3)[0]
    for state, found_norm, sent, numel in run_ranks(train_reach, 4, {"stage": stage, "reach": reach}, 3):
        assert found_norm == pytest.approx(norm, rel=1e-5)
        assert_close(state, exact, tolerance=1e-5)
        between = [bytes_sent for group, tag, _, bytes_sent in sent if group == "node"]
        assert sum(between) == numel * 4  # an all-reduce of the slice over two nodes: 2 * 1/2 of it


def test_secondary_shards_change_no_bit_and_keep_backward_within_the_node():
    reach = ds_zero.Reach(node_size=2, secondary=True)
    exact, norm, plain, _ = run_ranks(train_reach, 4, {"stage": 3}, 3)[0]
    for state, found_norm, sent, _ in run_ranks(train_reach, 4, {"stage": 3, "reach": reach}, 3):
        assert found_norm == norm
        assert_equal(state, exact)
        gathers = [bytes_sent for *_, op, bytes_sent in sent if op == "all_gather"]
        before = [bytes_sent for *_, op, bytes_sent in plain if op == "all_gather"]
        # 3/4 of a flat over all ranks, 1/2 within the node; every gather after the first of a step is within.
        assert len(gathers) == len(before)
        assert sum(gathers) < sum(before)


@pytest.mark.parametrize(
    ("stage", "reach", "text"),
    [
        (2, {"weight_bits": 8}, "weight_bits needs stage 3, got 2"),
        (3, {"weight_bits": 5}, "weight_bits must be 8, 4 or None, got 5"),
        (3, {"secondary": True}, "secondary needs stage 3 and node_size"),
        (3, {"within_node": True}, "within_node needs node_size"),
        (3, {"node_size": 0}, "node_size must be at least 1"),
    ],
)
def test_reaches_without_sense_are_refused(stage, reach, text):
    with pytest.raises(ValueError, match=text):
        ds_zero.shard(OddModel(), stage=stage, reach=ds_zero.Reach(**reach))


def fill_the_disk(folder):
    import ds_comm

    ds_comm.init()
    model = OddModel()
    offload = Offload(optimizer="file", path=str(folder))
    ds_zero.shard(model, odd_optimizer(model), stage=3, offload=offload)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_full_disk_is_an_error_on_all_ranks_before_the_first_step(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(tmp_path)]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        with pytest.raises(RankFailedError) as failure:
            run_ranks(fill_the_disk, 2, tmp_path)
        assert set(failure.value.errors) == {0, 1}
        for text in failure.value.errors.values():
            assert "bytes needed" in text
            assert str(tmp_path) in text
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
