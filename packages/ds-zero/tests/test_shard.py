"""Shard in one process: settings, refusals, and torch's semantics of gradients."""

import gc

import pytest
import torch
from torch import nn

import ds_zero
from ds_zero.testing import OddModel, odd_batches, odd_optimizer

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def sharded(stage=3, **settings):
    torch.manual_seed(0)
    model = OddModel()
    return ds_zero.shard(model, odd_optimizer(model), stage=stage, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stage": 4}, "stage must be 0, 1, 2 or 3, got 4"),
        ({"precision": "fp8"}, "precision must be one of"),
        ({"precision": ds_zero.Precision(param="fp8", reduce="fp32")}, "Precision.param must be one of"),
        ({"precision": ds_zero.Precision(param="fp32", reduce="bf16")}, "needs reduce='fp32'"),
        ({"clip_norm": 0.0}, "clip_norm must be above 0"),
        ({"max_gathered_units": 0}, "max_gathered_units must be at least 1"),
        ({"bucket_numel": -1}, "bucket_numel must be 0"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be one of"),
        ({"units": ["nowhere"]}, "units must name modules of the model"),
    ],
)
def test_a_wrong_setting_is_refused_and_the_model_is_left_alone(settings, message):
    model = OddModel()
    with pytest.raises(ValueError, match=message):
        ds_zero.shard(model, odd_optimizer(model), **settings)
    model(odd_batches(1)[0]).backward()


def test_sharding_twice_is_refused():
    model, _ = sharded()
    with pytest.raises(ds_zero.ZeroError, match="sharded already"):
        ds_zero.shard(model)


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_optimizers_that_cannot_be_sharded_are_refused_by_name(name):
    model = OddModel()
    with pytest.raises(ds_zero.ZeroError, match=f"{name} cannot be sharded"):
        ds_zero.shard(model, getattr(torch.optim, name)(list(model.parameters())), stage=0)


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(ValueError, match="that is not in the model"):
        ds_zero.shard(OddModel(), odd_optimizer(OddModel()))


def test_an_optimizer_that_has_stepped_is_refused():
    model = OddModel()
    optimizer = odd_optimizer(model)
    model(odd_batches(1)[0]).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="has not stepped"):
        ds_zero.shard(model, optimizer)


def test_a_closure_and_a_group_of_strangers_are_refused():
    _, optimizer = sharded()
    with pytest.raises(ds_zero.ZeroError, match="closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ValueError, match=r"of shape \(1,\) is not of the sharded model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_a_sparse_gradient_is_refused_by_name():
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    model, _ = ds_zero.shard(model, torch.optim.SGD(model.parameters()), stage=1)
    with pytest.raises(TypeError, match=r"0\.weight got a torch\.sparse_coo gradient"):
        model(torch.tensor([1])).sum().backward()


def test_calls_on_a_model_that_is_not_sharded_say_so():
    with pytest.raises(ds_zero.ZeroError, match="this OddModel is not sharded"):
        ds_zero.full_state_dict(OddModel())


@STAGES
def test_a_parameter_without_gradient_is_not_touched_even_by_weight_decay(stage):
    torch.manual_seed(0)
    model = OddModel()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], weight_decay=0.5)
    model, optimizer = ds_zero.shard(model, optimizer, stage=stage)
    model(odd_batches(1)[0]).backward()
    optimizer.step()
    state = ds_zero.full_state_dict(model)
    assert bool((state["blocks.0.unused"] == 1.0).all())
    assert not bool((state["blocks.0.norm.weight"] == 1.0).all())


@STAGES
def test_a_step_leaves_nothing_to_the_garbage_collector(stage):
    model, optimizer = sharded(stage)
    batch = odd_batches(1)[0]

    def step():
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()

    step()
    gc.collect()
    gc.disable()
    try:
        step()
        step()
        assert gc.collect() == 0
    finally:
        gc.enable()


@STAGES
def test_step_without_backward_changes_nothing(stage):
    model, optimizer = sharded(stage)
    before = ds_zero.full_state_dict(model)
    optimizer.step()
    after = ds_zero.full_state_dict(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


@STAGES
def test_the_models_own_zero_grad_forgets_reduced_gradients_too(stage):
    norms = []
    for zero in ("optimizer", "model"):
        model, optimizer = sharded(stage)
        for batch in odd_batches(2):
            {"optimizer": optimizer, "model": model}[zero].zero_grad()
            model(batch).backward()
        optimizer.step()
        norms.append(optimizer.grad_norm)
    assert norms[0] == norms[1]


@STAGES
def test_gradients_accumulate_over_a_step_without_zero_grad_as_in_torch(stage):
    torch.manual_seed(0)
    plain = OddModel()
    plain_optimizer = odd_optimizer(plain)
    model, optimizer = sharded(stage)
    for batch in odd_batches(3):
        for net, opt in ((plain, plain_optimizer), (model, optimizer)):
            net(batch).backward()
            opt.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ds_zero.full_state_dict(model)[name], value, atol=1e-5, rtol=1e-4)


@STAGES
def test_two_backwards_through_one_graph_add_up(stage):
    model, optimizer = sharded(stage)
    loss = model(odd_batches(1)[0])
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    twice = optimizer.grad_norm
    model, optimizer = sharded(stage)
    model(odd_batches(1)[0]).backward()
    optimizer.step()
    assert twice == pytest.approx(2 * optimizer.grad_norm, rel=1e-6)


@STAGES
def test_inference_without_an_optimizer(stage):
    torch.manual_seed(0)
    model = OddModel()
    batch = odd_batches(1)[0]
    with torch.no_grad():
        expected = model(batch)
        model, optimizer = ds_zero.shard(model, stage=stage)
        assert optimizer is None
        assert torch.equal(model(batch), expected)


def test_a_released_parameter_is_empty_and_its_memory_is_gone():
    model, _ = sharded(3)
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    assert ds_zero.held_bytes(model)["gathered"] == 0


def test_the_layout_names_every_element_once():
    model, _ = sharded(3)
    layout = ds_zero.shard_layout(model)
    numels = {tensor.name: 0 for tensor in layout.tensors}
    for piece in layout.pieces:
        numels[piece.tensor] += piece.numel
    assert numels == {name: parameter.numel() for name, parameter in OddModel().named_parameters()}
