"""Quantized collectives: the same bits on all ranks, within the bound of the exact result and of bytes."""

import pytest
import torch

import ds_comm
from ds_comm.blocks import BlockCodec
from ds_comm.quantized_moves import QuantizedMoves
from ds_comm.testing import run_ranks
from ds_spec import events

S = 768


def values_of(rank, numel, dtype):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def gather(bits, dtype):
    ds_comm.init()
    comm = ds_comm.Mesh.world().axis("dp")
    moves = QuantizedMoves(comm, BlockCodec(bits=bits))
    flat = torch.empty(S * comm.world_size, dtype=dtype)
    own = flat.chunk(comm.world_size)[comm.rank]
    for _ in range(2):  # the second time from reused buffers
        own.copy_(values_of(comm.rank, S, dtype))
        moves.all_gather_async(flat, own, tag="weights").wait()
    return flat


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("bits", "dtype"), [(8, torch.float32), (4, torch.float32), (8, torch.bfloat16)])
def test_a_gather_gives_all_ranks_the_same_values_within_the_bound(world_size, bits, dtype):
    found = run_ranks(gather, world_size, bits, dtype)
    exact = torch.cat([values_of(rank, S, dtype) for rank in range(world_size)])
    bound = exact.view(-1, 256).abs().amax(1, keepdim=True).float() / (127 if bits == 8 else 7) / 2
    rounding = 2.0**-8 * exact.abs().max() if dtype is torch.bfloat16 else 1e-6
    for flat in found:
        assert torch.equal(flat, found[0])
        assert bool(((flat - exact).view(-1, 256).abs().float() <= bound + rounding).all())


def reduce(node_size, bits, mean):
    ds_comm.init()
    mesh = ds_comm.Mesh.world()
    inner, outer = mesh.split("dp", node_size)
    moves = QuantizedMoves(inner, BlockCodec(bits=bits), outer=outer if outer.world_size > 1 else None)
    rank = mesh.coordinate["dp"]
    flat = values_of(rank, S * moves.world_size, torch.float32)
    before = flat.clone()
    shard = torch.empty(S)
    seen = []
    with events.subscribe(seen.append):
        moves.reduce_scatter_async(shard, flat, mean=mean, tag="gradients").wait()
    assert torch.equal(flat, before)
    return rank, shard, {event.group: event.bytes_sent for event in seen}


@pytest.mark.parametrize(("world_size", "node_size"), [(1, 1), (2, 2), (3, 3), (4, 2), (2, 1)])
@pytest.mark.parametrize(("bits", "mean"), [(8, True), (4, False)])
def test_a_reduction_gives_each_rank_its_slice_within_the_bound(world_size, node_size, bits, mean):
    found = run_ranks(reduce, world_size, node_size, bits, mean)
    exact = sum(values_of(rank, S * world_size, torch.float32) for rank in range(world_size))
    largest = 127 if bits == 8 else 7
    payload = BlockCodec(bits=bits).payload_bytes(S)
    nodes = world_size // node_size
    for rank, shard, sent in found:
        error = (shard * (world_size if mean else 1) - exact.chunk(world_size)[rank]).abs().max()
        # Every value lies below 5, so a code is wrong by at most 2.5 / largest; the second hop sends sums.
        assert error <= world_size * 2.5 / largest + (node_size * nodes * 2.5 / largest if nodes > 1 else 0)
        assert sent.get("dp", 0) == (node_size - 1) * nodes * payload
        assert sent.get("node", 0) == (nodes - 1) * payload


def split_wrongly():
    ds_comm.init()
    ds_comm.Mesh.world().split("dp", 2)


def test_nodes_must_divide_the_axis():
    with pytest.raises(Exception, match="axis dp has 3 ranks, which do not divide into nodes of 2"):
        run_ranks(split_wrongly, 3)
