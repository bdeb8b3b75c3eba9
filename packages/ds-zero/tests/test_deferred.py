"""A model built in sharded_init has the values of a plain construction, and none of its memory before."""

import pytest
import torch
from torch import nn

from ds_zero.deferred import DeferredInitError, is_deferred, materialize, sharded_init
from ds_zero.testing import OddModel


class Normal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.apply(self._init)

    def _init(self, module):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


class Copied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 7))
        self.scale = nn.Parameter(torch.ones(7) * 3)
        with torch.no_grad():
            self.weight.copy_(torch.randn(5, 7))
            self.weight[2, 1:4].fill_(9.0)
            self.weight.data.mul_(0.5)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))
        self.register_buffer("table", torch.outer(torch.arange(3.0), torch.tensor([1.0, 2.0])))


class Orthogonal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(9, 5)
        nn.init.orthogonal_(self.linear.weight)
        with torch.no_grad():
            self.linear.weight.add_(torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8, 9]))
        self.conv = nn.Conv2d(3, 4, 3)
        self.half = nn.Linear(4, 4).to(torch.bfloat16)
        self.rnn = nn.LSTM(3, 4)


BUILDERS = pytest.mark.parametrize("build", [OddModel, Normal, Copied, Orthogonal])


@BUILDERS
def test_values_are_those_of_a_plain_construction(build):
    torch.manual_seed(0)
    plain = build()
    after_plain = torch.get_rng_state()
    torch.manual_seed(0)
    with sharded_init():
        deferred = build()
    assert torch.equal(torch.get_rng_state(), after_plain)
    assert all(is_deferred(parameter) for parameter in deferred.parameters())
    torch.manual_seed(77)
    before = torch.get_rng_state()
    for (name, expected), (_, tensor) in zip(
        plain.state_dict(keep_vars=True).items(), deferred.state_dict(keep_vars=True).items(), strict=True
    ):
        (value,) = materialize([tensor])  # one by one: each needs only its own history
        assert torch.equal(value, expected), name
        assert value.dtype is expected.dtype
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_takes_no_memory_before_it_is_made():
    with sharded_init():
        model = nn.Linear(1 << 12, 1 << 12)
        assert all(parameter.is_meta for parameter in model.parameters())
        model.weight.detach().view(-1)[:10].zero_()


def test_a_construction_that_looks_at_values_is_refused_with_advice():
    def construct():
        return nn.Identity() if nn.Linear(2, 2).weight.sum() > 0 else nn.Linear(2, 2)

    with sharded_init(), pytest.raises(DeferredInitError, match=r"move that part after shard\(\)"):
        construct()


def test_tensors_that_are_not_deferred_come_back_as_they_are():
    tensor = torch.ones(2)
    assert materialize([tensor])[0] is tensor
    assert not is_deferred(torch.empty(2, device="meta"))


def test_a_transformers_model_gets_the_same_values():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50
    )
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config)
    torch.manual_seed(0)
    with sharded_init():
        deferred = transformers.LlamaForCausalLM(config)
    values = materialize(list(deferred.parameters()))
    for (name, expected), value in zip(plain.named_parameters(), values, strict=True):
        assert torch.equal(value, expected), name
