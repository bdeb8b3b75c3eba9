"""Two levels give what one group gives, in its layout, with the bytes of each level as the formulas say."""

import pytest
import torch

import ds_comm
from ds_comm.hierarchical import Hierarchy
from ds_comm.testing import run_ranks
from ds_spec import MeshSpec, events

# Inner and outer ranks.
SHAPES = [(1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (1, 4), (4, 1)]
shapes = pytest.mark.parametrize(("inner", "outer"), SHAPES)


def make(inner, outer):
    ds_comm.init()
    # Row-major: neighbours along the last axis, which stands for the ranks of a node here.
    mesh = ds_comm.Mesh(MeshSpec(axes=("dp", "tp"), sizes=(outer, inner)))
    hierarchy = Hierarchy(mesh.axis("tp"), mesh.axis("dp"))
    world_rank = ds_comm.current().rank
    assert (hierarchy.rank, hierarchy.world_size) == (world_rank, inner * outer)
    return hierarchy


def sent_by_level(seen):
    return {level: sum(e.bytes_sent for e in seen if e.group == level) for level in ("tp", "dp")}


def whole_of(rank, numel, dtype):
    """Small whole numbers: every order of summation is exact."""
    return torch.arange(numel).mul(rank + 1).remainder(13).sub(5).to(getattr(torch, dtype))


CASES = [(0, "float32"), (7, "float32"), (129, "bfloat16")]


def every_case(inner, outer):
    hierarchy = make(inner, outer)
    return [every_call(hierarchy, numel, dtype) for numel, dtype in CASES]


def every_call(hierarchy, numel, dtype):
    inner, outer = hierarchy.inner.world_size, hierarchy.outer.world_size
    rank, world_size = hierarchy.rank, hierarchy.world_size
    wholes = [whole_of(each, world_size * numel, dtype) for each in range(world_size)]
    total = torch.stack(wholes).sum(0).to(wholes[0].dtype)
    sent = {}

    for in_place in (False, True):
        flat = wholes[rank].clone()
        shard = flat.view(world_size, numel)[rank] if in_place else torch.empty(numel, dtype=flat.dtype)
        with events.collect() as seen:
            hierarchy.reduce_scatter(shard, flat, tag="test")
        assert torch.equal(shard, total.view(world_size, numel)[rank])
        sent["reduce_scatter"] = sent_by_level(seen)

        flat = torch.full((world_size * numel,), -1.0).to(total.dtype)
        shard = flat.view(world_size, numel)[rank] if in_place else torch.empty(numel, dtype=flat.dtype)
        shard.copy_(total.view(world_size, numel)[rank])
        with events.collect() as seen:
            hierarchy.all_gather(flat, shard, tag="test")
        assert torch.equal(flat, total)
        sent["all_gather"] = sent_by_level(seen)

    flat = wholes[rank].clone()
    with events.collect() as seen:
        hierarchy.all_reduce(flat, tag="test")
    assert torch.equal(flat, total)
    sent["all_reduce"] = sent_by_level(seen)

    flat, mine = wholes[rank].clone(), total.view(inner, outer * numel)[hierarchy.inner.rank]
    shard = torch.empty_like(mine)
    with events.collect() as seen:
        hierarchy.reduce_to_inner(shard, flat, tag="test")
    assert torch.equal(shard, mine)
    sent["reduce_to_inner"] = sent_by_level(seen)
    return sent


@shapes
def test_results_are_exact_and_bytes_are_the_formulas(inner, outer):
    expected = []
    for numel, dtype in CASES:
        flat_bytes = inner * outer * numel * getattr(torch, dtype).itemsize
        near = flat_bytes // inner * (inner - 1)
        far = flat_bytes // (inner * outer) * (outer - 1)
        expected.append(
            {
                "reduce_scatter": {"tp": near, "dp": far},
                "all_gather": {"tp": near, "dp": far},
                "all_reduce": {"tp": 2 * near, "dp": 2 * far},
                "reduce_to_inner": {"tp": near, "dp": 2 * far},
            }
        )
    assert run_ranks(every_case, inner * outer, inner, outer) == [expected] * (inner * outer)


LENGTHS = [0, 1, 3, 40_001]


def mean_of_odd_lengths():
    hierarchy = make(2, 2)
    flats = [torch.randn(n, generator=torch.Generator().manual_seed(hierarchy.rank)) for n in LENGTHS]
    for flat in flats:
        hierarchy.all_reduce(flat, mean=True, tag="test")
    return flats


def test_an_all_reduce_takes_any_length_and_ends_with_the_same_bits():
    found = run_ranks(mean_of_odd_lengths, 4)
    for index, numel in enumerate(LENGTHS):
        inputs = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
        for flats in found:
            assert torch.equal(flats[index], found[0][index])
            torch.testing.assert_close(flats[index], torch.stack(inputs).mean(0))


def copies_and_slices(inner, outer):
    hierarchy = make(inner, outer)
    numel = 33
    flat = torch.randn(inner * numel, generator=torch.Generator().manual_seed(hierarchy.rank))
    copy = torch.empty(numel)
    hierarchy.reduce_to_inner(copy, flat, mean=True, tag="test")
    flat = torch.randn(
        inner * outer * numel, generator=torch.Generator().manual_seed(hierarchy.rank)
    ).bfloat16()
    shard = torch.empty(numel)
    hierarchy.reduce_scatter(shard, flat, mean=True, tag="test")
    return hierarchy.rank, copy, shard


def test_copies_of_all_nodes_are_the_same_bits_and_sums_are_taken_level_by_level():
    found = run_ranks(copies_and_slices, 4, 2, 2)
    assert torch.equal(found[0][1], found[2][1])
    assert torch.equal(found[1][1], found[3][1])
    inputs = [
        torch.randn(4 * 33, generator=torch.Generator().manual_seed(rank)).bfloat16().float()
        for rank in range(4)
    ]
    # In the wider dtype of the shard: inner sums first, in order, then the outer one.
    exact = ((inputs[0] + inputs[1]) + (inputs[2] + inputs[3])) * 0.25
    for rank, _, shard in found:
        assert torch.equal(shard, exact.view(4, 33)[rank])


def several_in_flight():
    hierarchy = make(2, 2)
    flats = [torch.full((4 * 5,), float(hierarchy.rank + index)) for index in range(3)]
    shards = [torch.empty(5) for _ in flats]
    handles = [
        hierarchy.reduce_scatter_async(shard, flat, tag=f"{index}")
        for index, (shard, flat) in enumerate(zip(shards, flats, strict=True))
    ]
    for handle in handles:
        handle.wait()
        handle.wait()
        assert handle.done()
    buffers = sorted(b.data_ptr() for free in hierarchy._scratch._free.values() for b in free)
    hierarchy.reduce_scatter(shards[0], flats[0], tag="again")
    assert buffers == sorted(b.data_ptr() for free in hierarchy._scratch._free.values() for b in free)
    return [float(shard[0]) for shard in shards[1:]]


def test_several_in_flight_keep_their_own_scratch_and_it_is_reused():
    assert run_ranks(several_in_flight, 4) == [[10.0, 14.0]] * 4


def nan_on_one_rank():
    hierarchy = make(2, 2)
    flat = torch.zeros(8)
    if hierarchy.rank == 3:
        flat[0] = float("nan")
    hierarchy.all_reduce(flat, tag="test")
    return flat.isnan().tolist()


def test_a_nan_reaches_every_rank():
    assert run_ranks(nan_on_one_rank, 4) == [[True] + [False] * 7] * 4


def test_groups_of_different_ranks_and_wrong_sizes_are_refused():
    one, other = (ds_comm.Loopback("dp", torch.device("cpu"), rank=rank) for rank in (0, 1))
    with pytest.raises(ValueError, match="needs two groups of one rank, got global ranks 0 and 1"):
        Hierarchy(one, other)
    with pytest.raises(ValueError, match="needs flat = world_size"):
        Hierarchy(one, one).reduce_scatter(torch.zeros(2), torch.zeros(3), tag="test")
