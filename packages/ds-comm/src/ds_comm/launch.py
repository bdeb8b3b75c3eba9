"""Start the ranks of one machine on torch's elastic agent and end them together."""

import logging
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch.distributed
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

# Lines of the failing rank's error output that are shown.
LAST_LINES = 20


class LaunchResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a launch ended.

    Attributes:
        exit_code: 0, the failing rank's code, or 128 + the signal that ended it.
        rank: the rank that failed first, -1 if none did.
        message: how it failed, with the end of its error output.
    """

    exit_code: int
    rank: int
    message: str


def launch(command: Sequence[str], *, num_ranks: int) -> LaunchResult:
    """Run ``command`` as ``num_ranks`` processes and wait; when one fails the others are ended.

    Standard output is the ranks' own; error output is shown with the rank in front and kept for the result.

    Args:
        command: program and arguments.
        num_ranks: processes, >= 1.
    """
    with tempfile.TemporaryDirectory(prefix="ds-run-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id="ds-run",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder, tee=Std.ERR),
            log_line_prefix_template="[rank ${rank}]: ",
        )
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return _failure(rank, failure.exitcode, Path(folder))
        except SignalException as stopped:
            return LaunchResult(
                exit_code=128 + stopped.sigval, rank=-1, message=f"stopped by {stopped.sigval.name}"
            )
    return LaunchResult(exit_code=0, rank=-1, message="")


def _failure(rank: int, code: int, folder: Path) -> LaunchResult:
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    logs = sorted(folder.rglob(f"{rank}/stderr.log"))
    lines = logs[-1].read_text(errors="replace").splitlines()[-LAST_LINES:] if logs else []
    text = "\n".join([f"rank {rank} failed first: it {how}", *(f"  {line}" for line in lines)])
    return LaunchResult(exit_code=code if code > 0 else 128 - code, rank=rank, message=text)


def python_command(script: str, arguments: Sequence[str], *, module: bool) -> list[str]:
    """The command that runs a script or module with this interpreter."""
    return [sys.executable, "-u", *(["-m"] if module else []), script, *arguments]


def available_backends() -> list[str]:
    """The transports that this torch was built with."""
    names = ("gloo", "nccl", "mpi", "ucc", "xccl")
    return [name for name in names if getattr(torch.distributed, f"is_{name}_available", bool)()]
