"""No hang without a name: when ranks do not meet, every rank raises and says which rank, call and line."""

import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ds_comm
from ds_comm.testing import RankFailedError, run_ranks
from ds_spec import MeshSpec


def group():
    ds_comm.init()
    return ds_comm.Mesh.world().axis("dp")


def gather(comm, numel=8, tag="weights", dtype=torch.float32):
    flat = torch.zeros(numel * comm.world_size, dtype=dtype)
    comm.all_gather(flat, flat.chunk(comm.world_size)[comm.rank], tag=tag)


def differ(kind):
    comm = group()
    gather(comm)
    last = comm.rank == comm.world_size - 1
    if kind == "tag":
        gather(comm, tag="blocks.4" if last else "blocks.3")
    elif kind == "size":
        gather(comm, numel=16 if last else 8)
    elif kind == "dtype":
        gather(comm, dtype=torch.int32 if last else torch.float32)
    elif kind == "op" and last:
        comm.all_reduce(torch.zeros(8 * comm.world_size), tag="weights")
    elif kind == "skip" and last:
        gather(comm, tag="second")
    elif kind == "skip":
        gather(comm, tag="first")
        gather(comm, tag="second")
    elif kind == "swap":
        for tag in ("b", "a") if last else ("a", "b"):
            gather(comm, tag=tag)
    else:
        gather(comm)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", ["tag", "size", "dtype", "op", "skip", "swap"])
def test_ranks_that_make_different_calls_all_get_the_same_error(kind, world_size):
    with pytest.raises(RankFailedError) as failure:
        run_ranks(differ, world_size, kind)
    errors = failure.value.errors
    assert set(errors) == set(range(world_size))
    messages = {text.strip().splitlines()[-1] for text in errors.values()}
    assert len(messages) == 1, messages
    (message,) = messages
    assert "CollectiveMismatchError: call 2 of group dp differs between ranks" in message
    assert f"rank {world_size - 1} entered" in message
    assert message.count("test_divergence_ranks.py:") == 2


def call_once_more():
    comm = group()
    for _ in range(2 + comm.rank):
        gather(comm)


def test_a_rank_that_has_left_is_named():
    with pytest.raises(RankFailedError) as failure:
        run_ranks(call_once_more, 2)
    assert set(failure.value.errors) == {0, 1}
    for text in failure.value.errors.values():
        assert "rank 0 did not enter call 3 of group dp: it has finished" in text
        assert "Give every rank the same number of batches" in text


def die(how):
    comm = group()
    gather(comm)
    if comm.rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the data is wrong")
    gather(comm)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_killed_rank_is_named_by_the_others(world_size):
    with pytest.raises(RankFailedError) as failure:
        run_ranks(die, world_size, "kill")
    errors = failure.value.errors
    assert "was ended by SIGKILL" in errors[1]
    for rank in set(range(world_size)) - {1}:
        assert "PeerLostError: rank 1 has died" in errors[rank]


def test_a_rank_that_raises_is_named_with_its_error():
    with pytest.raises(RankFailedError) as failure:
        run_ranks(die, 2, "raise")
    assert "ValueError: the data is wrong" in failure.value.errors[1]
    assert "rank 1 ended with an error" in failure.value.errors[0]
    assert "the data is wrong" in failure.value.errors[0]


def be_elsewhere(comm):
    while not comm.watch.board.verdict():
        threading.Event().wait(0.05)


def stay_away():
    comm = group()
    gather(comm)
    if comm.rank == 1:
        be_elsewhere(comm)  # for longer than the limit
    gather(comm)


def test_a_rank_that_stays_away_is_named_with_its_line():
    with pytest.raises(RankFailedError) as failure:
        run_ranks(stay_away, 2, comm_timeout_s=1.0)
    text = failure.value.errors[0]
    assert "StalledError: call 2 of group dp waits" in text
    assert "rank 1 is at test_divergence_ranks.py:" in text
    assert "in be_elsewhere" in text


def wait_for_each_other():
    ds_comm.init()
    mesh = ds_comm.Mesh(MeshSpec(axes=("dp", "tp"), sizes=(2, 1)))
    first, second = mesh.axis("dp"), ds_comm.Mesh(MeshSpec(axes=("ep",), sizes=(2,))).axis("ep")
    for comm in (first, second) if first.rank == 0 else (second, first):
        gather(comm)


def test_ranks_that_wait_in_different_groups_are_named():
    with pytest.raises(RankFailedError) as failure:
        run_ranks(wait_for_each_other, 2, comm_timeout_s=1.0)
    assert set(failure.value.errors) == {0, 1}
    assert "waits 1 s for ranks that did not enter it" in failure.value.errors[0]


def test_nothing_is_left_in_shared_memory():
    with pytest.raises(RankFailedError):
        run_ranks(die, 2, "kill")
    folder = Path("/dev/shm")
    assert not list(folder.glob("ds-comm-board-*")) if folder.is_dir() else True


def stay_away_from_a_device():
    from ds_comm.wire import DeviceWire

    comm = group()
    gather(comm)
    ended = threading.Event()
    wire = DeviceWire(comm._wire.group, comm.rank, comm.ranks, comm.device)
    wire.abort = ended.set
    comm._wire = wire
    if comm.rank == 1:
        be_elsewhere(comm)
        return
    stuck = SimpleNamespace(wait=lambda: None, is_completed=lambda: False)
    wire.all_gather = lambda flat, shard: ([stuck], None)
    gather(comm)  # returns at once, as on a device
    assert ended.wait(20)
    gather(comm)


def test_a_stuck_device_is_ended_and_the_next_call_says_why():
    with pytest.raises(RankFailedError) as failure:
        run_ranks(stay_away_from_a_device, 2, comm_timeout_s=1.0)
    assert "StalledError: call 2 of group dp waits" in failure.value.errors[0]
