"""Who this process is among the launched ones, read from what the launcher put into the environment."""

import os
import re
from collections.abc import Mapping

import msgspec

from ds_comm.errors import CommError


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """What a launcher says: this rank, how many, and where they meet."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int


# Launcher -> (rank, world size, local rank, ranks on this host).
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
DEFAULT_PORT = 29500


def read_launch(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """This process's place, or ``None`` when no launcher started it.

    torchrun's variables come first, then Slurm's (``srun``), Open MPI's and PMI's.

    Raises:
        CommError: variables of a launcher are incomplete, not numbers, or contradict each other.
    """
    for launcher, names in (
        ("torchrun", TORCHRUN),
        ("Slurm", SLURM),
        ("Open MPI", OPEN_MPI),
        ("MPICH", MPICH),
    ):
        present = [name for name in names[:2] if environment.get(name)]
        if not present or (launcher == "Slurm" and not _is_step(environment)):
            continue
        if len(present) < len(names[:2]):
            missing = next(name for name in names[:2] if name not in present)
            raise CommError(
                f"{present[0]} is set but {missing} is not; start ranks with ds run, torchrun, srun or mpirun"
            )
        return _read(launcher, names, environment)
    return None


def _is_step(environment: Mapping[str, str]) -> bool:
    return bool(environment.get("SLURM_STEP_ID")) and environment.get("SLURM_STEP_ID") != "4294967290"


def _read(launcher: str, names: tuple[str, str, str, str], environment: Mapping[str, str]) -> Launched:
    rank, world_size = (_number(name, environment) for name in names[:2])
    if not 0 <= rank < world_size:
        raise CommError(f"{names[0]}={rank} must be below {names[1]}={world_size}")
    local_rank = _number(names[2], environment, default=rank)
    local_world_size = _number(names[3], environment, default=world_size)
    if launcher == "Slurm" and "SLURM_STEP_TASKS_PER_NODE" in environment:
        local_world_size = int(re.match(r"\d+", environment["SLURM_STEP_TASKS_PER_NODE"]).group())  # type: ignore[union-attr]
    return Launched(
        launcher=launcher,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=_master_addr(launcher, world_size, local_world_size, environment),
        master_port=_number("MASTER_PORT", environment, default=DEFAULT_PORT),
    )


def _number(name: str, environment: Mapping[str, str], default: int | None = None) -> int:
    value = environment.get(name)
    if value is None and default is not None:
        return default
    try:
        return int(str(value))
    except ValueError:
        raise CommError(f"{name} must be a whole number, got {value!r}") from None


def _master_addr(
    launcher: str, world_size: int, local_world_size: int, environment: Mapping[str, str]
) -> str:
    given = environment.get("MASTER_ADDR")
    if given:
        return given
    if launcher == "Slurm":
        return first_host(
            environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "127.0.0.1")
        )
    if world_size > local_world_size:
        raise CommError(
            f"{world_size} ranks on several hosts need MASTER_ADDR, the name of rank 0's host; it is not set"
        )
    return "127.0.0.1"


def first_host(node_list: str) -> str:
    """The first host of Slurm's compact list, such as ``node[03-07,9],other``."""
    match = re.match(r"([^,\[]+)(?:\[([^\],\-]+))?", node_list)
    if match is None:
        raise CommError(f"cannot read a host from the node list {node_list!r}; set MASTER_ADDR")
    return match.group(1) + (match.group(2) or "")
