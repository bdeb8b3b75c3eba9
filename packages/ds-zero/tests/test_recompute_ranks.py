"""Recomputation changes what is held, and no bit of the result."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ds_comm
import ds_zero
from ds_comm.testing import run_ranks
from ds_zero.live_storages import LiveStorages
from ds_zero.testing import OddModel, odd_batches, odd_optimizer

POLICIES = ["full", "selective", "matmuls", "attention"]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x, *, scale=1.0):
        shape = (*x.shape[:2], 2, -1)
        q, k, v = (t.reshape(shape).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.dropout(
            self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        )
        return x + scale * self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 50)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def held_and_gradients(policy, **options):
    torch.manual_seed(0)
    model = Model()
    handle = ds_zero.recompute(model, policy, **options) if policy else None
    tokens = odd_batches(1, batch_size=8, length=32)[0]
    torch.manual_seed(7)
    with LiveStorages(ignored=model.parameters()) as live:
        loss = model(tokens)
        gc.collect()
        held = live.held_bytes()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    names = list(model.state_dict())
    if handle is not None:
        handle.remove()
        assert all("forward" not in block.__dict__ for block in model.blocks)
    return held, gradients, names


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_keep_their_bits_under_dropout_and_less_is_held(policy):
    held, gradients, names = held_and_gradients(None)
    less, same, same_names = held_and_gradients(policy)
    assert less < 0.85 * held
    assert names == same_names
    for name, gradient in gradients.items():
        assert torch.equal(gradient, same[name]), name


def test_policies_hold_less_in_their_order():
    held = {policy: held_and_gradients(policy)[0] for policy in POLICIES}
    assert held["full"] < held["attention"] < held["selective"] < held["matmuls"]


def test_offload_keeps_the_bits():
    _, gradients, _ = held_and_gradients(None)
    _, same, _ = held_and_gradients("full", offload=True)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, same[name]), name


def test_a_budget_is_kept_and_the_plan_says_what_it_costs():
    torch.manual_seed(0)
    model = Model()
    tokens = odd_batches(1, batch_size=8, length=32)[0]
    everything = ds_zero.recompute(model, "budget", budget_bytes=10**9, sample=lambda: model(tokens))
    assert set(everything.plan.policies.values()) <= {"none", "matmuls", "selective", "attention", "full"}
    everything.remove()
    budget = everything.plan.saved_bytes // 2
    half = ds_zero.recompute(model, "budget", budget_bytes=budget, sample=lambda: model(tokens))
    assert half.plan.saved_bytes <= budget
    assert set(half.plan.policies.values()) - {"none"}
    with LiveStorages(ignored=model.parameters()) as live:
        model(tokens)
    assert live.held_bytes() <= budget * 2
    half.remove()
    with pytest.raises(ValueError, match="the blocks need at least"):
        ds_zero.recompute(model, "budget", budget_bytes=10, sample=lambda: model(tokens))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"policy": "budget"}, "needs budget_bytes= and sample="),
        ({"policy": "most"}, "policy must be one of"),
        ({"layers": ["block.0"]}, "no module 'block.0'; did you mean 'blocks.0'"),
        ({"offload": True, "partition": object()}, "choose offload or partition"),
    ],
)
def test_wrong_settings_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        ds_zero.recompute(Model(), **options)


def test_a_block_is_wrapped_once():
    model = Model()
    ds_zero.recompute(model)
    with pytest.raises(ValueError, match="has a forward of its own already"):
        ds_zero.recompute(model)


def train(settings, policy):
    world = ds_comm.init()
    torch.manual_seed(0)
    model = OddModel()
    if policy and "budget" not in policy:
        ds_zero.recompute(model, **policy)
    model, optimizer = ds_zero.shard(model, odd_optimizer(model), **settings)
    batch = odd_batches(1)[0].chunk(world.world_size)[world.rank]
    if policy and "budget" in policy:
        handle = ds_zero.recompute(
            model, "budget", budget_bytes=policy["budget"], sample=lambda: model(batch)
        )
        plans = ds_comm.Mesh.world().axis("dp").all_gather_object(handle.plan.policies, tag="plans")
        assert plans[0] == plans[1]
    for step in range(2):
        optimizer.zero_grad()
        model(odd_batches(1, seed=step)[0].chunk(world.world_size)[world.rank]).backward()
        optimizer.step()
    return ds_zero.full_state_dict(model)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("policy", [{"policy": "full"}, {"policy": "selective"}, {"budget": 200_000}])
def test_recomputation_and_sharding_go_together(stage, policy):
    plain = run_ranks(train, 2, {"stage": stage}, None)[0]
    state = run_ranks(train, 2, {"stage": stage}, policy)[0]
    for name, value in plain.items():
        assert torch.equal(value, state[name]), name


def train_partitioned(partition):
    comm = ds_comm.Mesh.world().axis("dp") if ds_comm.init() else None
    torch.manual_seed(0)
    model = Model()
    ds_zero.recompute(model, "full", partition=comm if partition else None)
    torch.manual_seed(7)
    model(odd_batches(1, batch_size=3, length=9)[0]).backward()  # the same batch on all ranks, of an odd size
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_inputs_cut_up_over_ranks_give_the_same_gradients():
    plain, cut = run_ranks(train_partitioned, 2, False)[0], run_ranks(train_partitioned, 2, True)
    for gradients in cut:
        for name, gradient in plain.items():
            assert torch.equal(gradient, gradients[name]), name
