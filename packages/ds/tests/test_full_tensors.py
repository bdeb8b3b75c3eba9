"""DeepSpeed's names for whole tensors."""

import pytest
import torch

import ds
import ds_zero
from ds import full_tensors


def test_parameters_gradients_and_states_can_be_read_and_set():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    before = model[0].weight.detach().clone()
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
    }
    engine, *_ = ds.initialize(model=model, config=config)
    weight = engine.module[0].weight
    assert torch.equal(full_tensors.safe_get_full_fp32_param(weight), before)
    assert full_tensors.safe_get_full_grad(weight) is None
    assert full_tensors.safe_get_full_optimizer_state(weight, "exp_avg") is None
    engine.backward(engine(torch.ones(3, 4)).sum())
    gradient = full_tensors.safe_get_full_grad(weight)
    assert gradient.shape == (4, 4)
    full_tensors.safe_set_full_grad(weight, torch.zeros(4, 4))
    engine.step()
    assert not full_tensors.safe_get_full_optimizer_state(weight, "exp_avg").any()
    full_tensors.safe_set_full_optimizer_state(weight, torch.ones(4, 4), "exp_avg")
    assert full_tensors.safe_get_full_optimizer_state(weight, "exp_avg").all()
    full_tensors.safe_set_full_fp32_param(weight, torch.full((4, 4), 0.1))
    assert torch.equal(full_tensors.safe_get_full_fp32_param(weight), torch.full((4, 4), 0.1))
    with pytest.raises(ds_zero.ZeroError, match="not in a sharded model"):
        full_tensors.safe_get_full_fp32_param(torch.nn.Parameter(torch.zeros(2)))
    engine.destroy()
