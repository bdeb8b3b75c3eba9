"""Every collective against its definition, with exact bytes, on several ranks and on one."""

import pytest
import torch

import ds_comm
from ds_comm.testing import run_ranks
from ds_spec import events

DTYPES = ["float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8"]


def group():
    ds_comm.init()
    return ds_comm.Mesh.world().axis("dp")


def inputs(dtype, numel, world_size):
    """What every rank holds: small whole numbers, exact in every dtype."""
    return [
        torch.arange(numel).add(7 * rank).remainder(11).to(getattr(torch, dtype))
        for rank in range(world_size)
    ]


def gather_all(dtype, numel, in_place):
    comm = group()
    everyone = inputs(dtype, numel, comm.world_size)
    flat = comm.allocate(comm.world_size * numel, getattr(torch, dtype))
    shard = flat.chunk(comm.world_size)[comm.rank] if in_place else everyone[comm.rank].clone()
    shard.copy_(everyone[comm.rank])
    with events.collect() as seen:
        comm.all_gather(flat, shard, tag="test")
    assert torch.equal(flat, torch.cat(everyone))
    return [(event.op, event.bytes_sent, event.bytes_total) for event in seen]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_gather(world_size, in_place, dtype):
    size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    expected = [("all_gather", (world_size - 1) * 5 * size, world_size * 5 * size)]
    assert run_ranks(gather_all, world_size, dtype, 5, in_place) == [expected] * world_size


def reduce_slices(dtype, numel, in_place, mean):
    comm = group()
    whole = [torch.cat(inputs(dtype, numel, comm.world_size)).add(rank) for rank in range(comm.world_size)]
    flat = whole[comm.rank].clone()
    shard = flat.chunk(comm.world_size)[comm.rank] if in_place else torch.zeros(numel, dtype=flat.dtype)
    with events.collect() as seen:
        comm.reduce_scatter(shard, flat, mean=mean, tag="test")
    expected = whole[0]
    for other in whole[1:]:
        expected = expected + other
    expected = expected.chunk(comm.world_size)[comm.rank]
    assert torch.equal(shard, expected * (1.0 / comm.world_size) if mean else expected)
    return [(event.op, event.bytes_sent) for event in seen]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("dtype", "mean"), [("float32", True), ("float32", False), ("bfloat16", False), ("int64", False)]
)
def test_reduce_scatter_sends_only_what_others_own(world_size, in_place, dtype, mean):
    size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    expected = [("reduce_scatter", (world_size - 1) * 6 * size)]
    assert run_ranks(reduce_slices, world_size, dtype, 6, in_place, mean) == [expected] * world_size


def reduce_into_wider():
    comm = group()
    flat = torch.full((4 * comm.world_size,), 1.0 if comm.rank == 0 else 2**-9, dtype=torch.bfloat16)
    shard = torch.zeros(4)
    comm.reduce_scatter(shard, flat, tag="test")
    return shard.tolist()


def test_a_wider_output_is_summed_in_its_own_precision():
    assert run_ranks(reduce_into_wider, 2) == [[1.0 + 2**-9] * 4] * 2  # bf16 would give 1.0


def several_in_flight():
    comm = group()
    flats = [torch.full((comm.world_size * 3,), float(index + comm.rank)) for index in range(4)]
    shards = [torch.zeros(3) for _ in flats]
    handles = [
        comm.reduce_scatter_async(s, f, tag=f"{i}")
        for i, (s, f) in enumerate(zip(shards, flats, strict=True))
    ]
    for handle in reversed(handles):
        handle.wait()
        handle.wait()
        assert handle.done()
    return [float(shard[0]) for shard in shards]


def test_several_in_flight_keep_their_own_scratch():
    assert run_ranks(several_in_flight, 2) == [[1.0, 3.0, 5.0, 7.0]] * 2


def reduce_all(numel, mean):
    comm = group()
    flat = torch.arange(float(numel)) * (comm.rank + 1)
    comm.all_reduce(flat, mean=mean, tag="test")
    factor = sum(range(1, comm.world_size + 1)) / (comm.world_size if mean else 1)
    torch.testing.assert_close(flat, torch.arange(float(numel)) * factor)


@pytest.mark.parametrize("numel", [3, 40_000, 40_001])
@pytest.mark.parametrize("mean", [False, True])
def test_all_reduce_small_large_and_odd(numel, mean):
    run_ranks(reduce_all, 2, numel, mean)


def move_others():
    comm = group()
    received = torch.zeros(2 * comm.world_size)
    comm.all_to_all(received, torch.arange(2.0 * comm.world_size) + 100 * comm.rank, tag="test")
    sent = torch.full((3,), float(comm.rank))
    comm.broadcast(sent, src=1, tag="test")
    rows = comm.exchange(torch.tensor([float(comm.rank), float("nan")], dtype=torch.float64), tag="test")
    objects = comm.all_gather_object({"rank": comm.rank, "text": "x" * comm.rank}, tag="test")
    comm.barrier(tag="test")
    comm.agree(tag="test")
    empty = torch.zeros(0)
    comm.all_gather(empty, empty, tag="empty")
    assert comm.calls[-1].op == "all_gather"
    return received.tolist(), sent.tolist(), rows[:, 0].tolist(), bool(rows[:, 1].isnan().all()), objects


def test_all_to_all_broadcast_exchange_and_objects():
    results = run_ranks(move_others, 2)
    assert [result[0] for result in results] == [[0.0, 1.0, 100.0, 101.0], [2.0, 3.0, 102.0, 103.0]]
    for result in results:
        assert result[1:] == (
            [1.0] * 3,
            [0.0, 1.0],
            True,
            [{"rank": 0, "text": ""}, {"rank": 1, "text": "x"}],
        )


def use_two_meshes():
    ds_comm.init()
    from ds_spec import MeshSpec

    grid = ds_comm.Mesh(MeshSpec(axes=("dp", "tp"), sizes=(2, 2)))
    rows, columns, everyone = grid.axis("dp"), grid.axis("tp"), ds_comm.Mesh.world().axis("dp")
    results = []
    for comm in (rows, columns, everyone):
        value = torch.tensor([float(ds_comm.current().rank)])
        comm.all_reduce(value, tag="test")
        results.append(float(value))
    assert grid.axis("dp") is rows
    assert grid.device_mesh.get_group("tp").size() == 2
    return results, rows.ranks, columns.ranks


def test_meshes_live_side_by_side():
    results = run_ranks(use_two_meshes, 4)
    assert [result[0] for result in results] == [[2, 1, 6], [4, 1, 6], [2, 5, 6], [4, 5, 6]]
    assert results[3][1:] == ((1, 3), (2, 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.all_gather(torch.zeros(5), torch.zeros(2), tag="t"), "needs flat = world_size"),
        (lambda c: c.reduce_scatter(torch.zeros(2), torch.zeros(2, 2), tag="t"), "contiguous 1-D"),
        (lambda c: c.broadcast(torch.zeros(2), src=3, tag="t"), "src must be a rank of the group"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(ds_comm.Loopback("dp", torch.device("cpu")))


def test_a_mesh_of_the_wrong_size_is_refused():
    from ds_spec import MeshSpec

    with pytest.raises(ds_comm.CommError, match="a mesh of dp=3 needs 3 ranks, this job has 1"):
        ds_comm.Mesh(MeshSpec(axes=("dp",), sizes=(3,)))
