"""DeepSpeed's names for recomputation: the same gradients as without."""

import pytest
import torch
from torch import nn

import ds


@pytest.fixture(autouse=True)
def forget():
    yield
    ds.checkpointing._state["settings"] = None
    ds.checkpointing.reset()


def gradients(call):
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(3))
    x = torch.randn(4, 8, requires_grad=True)
    torch.manual_seed(1)
    hidden = x
    for layer in layers:
        hidden = call(layer, hidden)
    hidden.square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in layers.parameters())]


@pytest.mark.parametrize("in_cpu", [None, False, True])
def test_recomputed_gradients_are_the_same_under_dropout(in_cpu):
    plain = gradients(lambda layer, x: layer(x))
    if in_cpu is not None:
        ds.checkpointing.configure(None, checkpoint_in_cpu=in_cpu)
        assert ds.checkpointing.is_configured()
    for mine, theirs in zip(gradients(ds.checkpointing.checkpoint), plain, strict=True):
        assert torch.equal(mine, theirs)


def test_the_configuration_can_set_it():
    assert not ds.checkpointing.is_configured()
    config = {
        "train_batch_size": 1,
        "activation_checkpointing": {"cpu_checkpointing": True, "profile": False},
    }
    ds.checkpointing.configure(None, config)
    assert ds.checkpointing._state["settings"].in_cpu
    with pytest.raises(ds.ConfigError, match="partition_activations: not yet supported"):
        ds.checkpointing.configure(None, partition_activations=True)
