"""Memory and traffic are the ZeRO formulas, to the byte."""

import pytest
import torch

import ds_comm
import ds_zero
from ds_comm.testing import run_ranks
from ds_spec import events
from ds_zero.layout import plan_flat_layout
from ds_zero.testing import OddModel, odd_batches, odd_optimizer
from ds_zero.units import merge_small_units, plan_units

ADAM_STATES = 2


def padded_numels(world_size, stage):
    """Padded elements of every trainable flat, from the formula's own inputs: shapes and units."""
    model = OddModel()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    plans = plan_units(model, names=None)
    if stage < 3:
        numels = {name: p.numel() for name, p in model.named_parameters()}
        plans = merge_small_units(plans, numels, bucket_numel=1 << 22)
    names = [[name for name in plan.parameters if name in shapes] for plan in plans]
    layouts = [plan_flat_layout(n, [shapes[name] for name in n], world_size=world_size) for n in names]
    return [layout.padded_numel for layout in layouts]


def train_one_step(stage, precision):
    world = ds_comm.init()
    torch.manual_seed(0)
    model = OddModel()
    optimizer = odd_optimizer(model)
    planned = ds_zero.plan_bytes(
        model, optimizer, stage=stage, world_size=world.world_size, precision=precision
    )
    model, optimizer = ds_zero.shard(model, optimizer, stage=stage, precision=precision)
    batches = odd_batches(2)
    for batch in batches[:1]:
        model(batch.chunk(world.world_size)[world.rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with events.collect() as seen:
        model(batches[1].chunk(world.world_size)[world.rank]).backward()
        optimizer.step()
    stepped = sum(
        p.numel() for p in optimizer.state
    )  # parameters without a gradient have no state, as in torch
    sent = {}
    for event in seen:
        if hasattr(event, "bytes_sent"):
            sent[event.op] = sent.get(event.op, 0) + event.bytes_sent
    return ds_zero.held_bytes(model), planned, stepped, sent


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_held_and_sent_bytes_are_the_formula(world_size, precision, stage):
    results = run_ranks(train_one_step, world_size, stage, precision)
    flats = padded_numels(world_size, stage)
    full, shard = sum(flats), sum(flats) // world_size
    frozen = 33 if stage < 3 else 256
    item = 4 if precision == "fp32" else 2
    mixed = precision == "bf16"
    for held, planned, stepped, sent in results:
        assert held["parameters"] == ((full + frozen) if stage < 3 else shard + frozen) * item
        if stage >= 2:
            assert held["gradients"] == shard * 4
        else:
            assert held["gradients"] == full * item + (shard * 4 if mixed else 0) + (
                full * 4 if mixed and stage == 0 else 0
            )
        master = (full if stage == 0 else shard) * 4 if mixed else 0
        assert held["optimizer"] == master + stepped * 4 * ADAM_STATES
        assert held["gathered"] == 0
        for component in ("parameters", "gradients", "buffers"):
            assert planned[component] == held[component]
        once = full * (world_size - 1) // world_size
        assert sent["reduce_scatter"] == once * item
        # At stage 3 forward and backward gather every unit, the first block twice as it runs twice.
        again = flats[1] * (world_size - 1) // world_size if stage == 3 else 0
        whole = once + again + 256 * (world_size - 1)
        gathered = {0: once * 4, 1: once * item, 2: once * item, 3: 2 * whole * item}
        assert sent["all_gather"] == gathered[stage]
    if stage:
        total = sum(stepped for _, _, stepped, _ in results)
        named = OddModel().named_parameters()
        assert total == sum(p.numel() for name, p in named if p.requires_grad and "unused" not in name)


def watch_gathered_units(max_gathered_units):
    world = ds_comm.init()
    model = OddModel(depth=5)
    model, optimizer = ds_zero.shard(
        model, odd_optimizer(model), stage=3, max_gathered_units=max_gathered_units
    )
    for batch in odd_batches(3):
        with torch.no_grad():
            model(batch)
        optimizer.zero_grad()
        model(batch.chunk(world.world_size)[world.rank]).backward()
        optimizer.step()
    engine = ds_zero.engine.engine_of(model)
    return engine.gatherer.peak_gathered_units, engine.ledger.peak_by_component["gathered"]


@pytest.mark.parametrize("max_gathered_units", [2, 3])
def test_no_more_units_are_gathered_than_allowed(max_gathered_units):
    root, block, *_ = padded_numels(2, 3)
    for units, gathered_bytes in run_ranks(watch_gathered_units, 2, max_gathered_units):
        assert units == max_gathered_units
        assert gathered_bytes == (root + 512 + block * (max_gathered_units - 1)) * 4
