"""Who a process is, read from every launcher's variables; and run_ranks itself."""

import pytest

import ds_comm
from ds_comm.launch_env import first_host, read_launch
from ds_comm.testing import RankFailedError, run_ranks

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
}
SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


def test_no_launcher_is_a_process_alone():
    assert read_launch({"PATH": "/bin"}) is None
    assert read_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None  # a shell inside an allocation


@pytest.mark.parametrize(
    ("environment", "launcher", "rank", "world_size", "address"),
    [
        (TORCHRUN, "torchrun", 3, 4, "10.0.0.1"),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu[03-04]"}, "Slurm", 1, 2, "gpu03"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "Open MPI", 1, 2, "127.0.0.1"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPICH", 0, 2, "127.0.0.1"),
        (TORCHRUN | SLURM, "torchrun", 3, 4, "10.0.0.1"),
    ],
)
def test_launchers_are_understood(environment, launcher, rank, world_size, address):
    launched = read_launch(environment)
    assert (launched.launcher, launched.rank, launched.world_size) == (launcher, rank, world_size)
    assert launched.master_addr == address


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1"}, "RANK is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK is not"),
        ({"RANK": "two", "WORLD_SIZE": "2"}, "RANK must be a whole number, got 'two'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 must be below WORLD_SIZE=2"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "need MASTER_ADDR"),
    ],
)
def test_variables_that_contradict_are_refused(environment, message):
    with pytest.raises(ds_comm.CommError, match=message):
        read_launch(environment)


@pytest.mark.parametrize(
    ("nodes", "first"), [("a", "a"), ("a,b", "a"), ("n[01-03,7],m", "n01"), ("n[5]", "n5")]
)
def test_the_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


def identify(word):
    world = ds_comm.init()
    assert ds_comm.init() is world is ds_comm.current()
    return world.rank, world.world_size, world.backend, word


def test_run_ranks_gives_every_ranks_result_in_order():
    assert run_ranks(identify, 2, "x") == [(0, 2, "gloo", "x"), (1, 2, "gloo", "x")]
    assert run_ranks(identify, 1, "x") == [(0, 1, "none", "x")]


def fail_on_one():
    if ds_comm.init().rank == 1:
        raise KeyError("only here")


def test_run_ranks_shows_the_failing_rank():
    with pytest.raises(RankFailedError, match="only here") as failure:
        run_ranks(fail_on_one, 2)
    assert 1 in failure.value.errors


def spin():
    while True:
        pass


def test_run_ranks_ends_what_hangs_and_shows_its_stack():
    with pytest.raises(RankFailedError) as failure:
        run_ranks(spin, 1, timeout_s=2.0)
    assert "did not finish in time" in failure.value.errors[0]
    assert "in spin" in failure.value.errors[0]


def test_before_init_there_is_no_world_but_a_mesh_of_one():
    assert not ds_comm.is_initialized()
    with pytest.raises(ds_comm.CommError, match=r"call ds_comm\.init"):
        ds_comm.current()
    assert ds_comm.Mesh.world().axis("dp").world_size == 1
