"""Start the ranks of one machine on torch's elastic agent, and end them together."""

import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    registry,
)

from ds_comm import rank_start
from ds_comm.rank_logs import LogFollower, OnLine, RankLogs
from ds_comm.rank_processes import Ended, RankProcesses

HOST = "127.0.0.1"
LOOK_EVERY_S = 0.05
LAST_LINES = 25
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# A rank whose last words are these failed because another one did.
BLAMES_A_PEER = ("PeerLostError", "StalledError", "Connection closed by peer", "Connection reset by peer")


class RankFailure(msgspec.Struct, frozen=True, kw_only=True):
    """One rank that did not end well.

    Attributes:
        rank: which.
        exit_code: the process's own, or 128 + the signal that ended it.
        signal_name: such as ``SIGKILL``, empty if none ended it.
        asked: whether it ended only because the launcher asked for it.
        last_lines: the end of its error output.
    """

    rank: int
    exit_code: int
    signal_name: str
    asked: bool
    last_lines: tuple[str, ...]


class LaunchResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a launch ended.

    Attributes:
        exit_code: 0, that of the rank that failed first, or 128 + the signal that stopped the launcher.
        stopped_by: name of the signal that stopped the launcher, empty if none did.
        failures: the ranks that failed; the cause comes first.
    """

    exit_code: int
    stopped_by: str
    failures: tuple[RankFailure, ...]


class _Agent(LocalElasticAgent):
    """torch's agent, with our idea of when a failed job is over and of how to end it."""

    def __init__(self, spec: WorkerSpec, logs: RankLogs, ranks: RankProcesses) -> None:
        super().__init__(spec, logs_specs=logs)
        self._ranks = ranks

    # torch wraps these two in a timer whose type hides their own.
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        pids: dict[int, int] = super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue,reportAssignmentType]
        self._ranks.started(pids)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # pyright: ignore[reportIncompatibleVariableOverride]
        if not self._ranks.settled():
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue,reportReturnType]

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        with _deaf():
            self._ranks.stop(death_sig)
            super()._shutdown(death_sig, *args, **kwargs)

    def close(self) -> None:
        """Give up the place where the ranks met."""
        self._rdzv_handler.shutdown()


@contextmanager
def _deaf() -> Iterator[None]:
    """Let no second signal interrupt the ending of ranks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in HANDLED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def launch(
    command: Sequence[str],
    *,
    num_ranks: int,
    log_dir: Path,
    variables: Mapping[str, str] | None = None,
    master_port: int = 0,
    on_line: OnLine | None = None,
) -> LaunchResult:
    """Run ``command`` as ``num_ranks`` processes of one job on this machine, and wait for all.

    When one fails, the others get some seconds to notice and say so; then they, and everything they started,
    are ended: SIGTERM, then SIGKILL, within 10 s in all. SIGINT, SIGTERM, SIGHUP and SIGQUIT to this process
    reach the ranks and end them the same way. Ranks die with this process even when it is killed. What ranks
    started and left running is ended too, also after success.

    Call it from the main thread, on Linux.

    Args:
        command: program and arguments.
        num_ranks: processes, >= 1.
        log_dir: an existing folder for what each rank writes: ``rank-0.stdout.log`` and so on.
        variables: environment variables for the ranks beside this process's own.
        master_port: where the ranks meet; 0 for any free port.
        on_line: called with rank, ``stdout`` or ``stderr``, and each whole line, from another thread.

    Raises:
        ValueError: ``num_ranks`` is below 1, or the port is taken.
    """
    if num_ranks < 1:
        raise ValueError(f"launch needs at least 1 rank, got {num_ranks}")
    run_id = f"ds-run-{uuid.uuid4()}"
    logs, ranks = RankLogs(log_dir, num_ranks), RankProcesses(run_id)
    given = [f"{name}={value}" for name, value in (variables or {}).items()]
    start = [rank_start.__file__, str(os.getpid()), str(log_dir), *given]
    spec = WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        entrypoint=sys.executable,
        args=("-I", "-S", *start, "--", *command),
        rdzv_handler=_rendezvous(run_id, master_port),
        max_restarts=0,
        monitor_interval=LOOK_EVERY_S,
        local_addr=HOST,
    )
    follower = LogFollower(logs, on_line) if on_line is not None else None
    try:
        stopped_by = _run(_Agent(spec, logs, ranks))
    finally:
        if follower is not None:
            follower.close()
    return _result(ranks.ended, logs, stopped_by)


def _run(agent: _Agent) -> signal.Signals | None:
    """Run to the end; the signal that stopped it."""
    # The result says what the agent would log, once and with the cause first.
    for name in ("agent.server.api", "agent.server.local_elastic_agent", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    try:
        agent.run()
    except SignalException as stopped:
        return stopped.sigval
    finally:
        with _deaf():
            agent.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return None


def _rendezvous(run_id: str, port: int) -> RendezvousHandler:
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"{HOST}:{port}",
        run_id=run_id,
        min_nodes=1,
        max_nodes=1,
        local_addr=HOST,
        is_host=True,
    )
    try:
        return registry.get_rendezvous_handler(parameters)
    except RendezvousError as error:
        raise ValueError(f"the ranks cannot meet at port {port}, it is taken; leave the port out") from error


def _result(ended: Mapping[int, Ended], logs: RankLogs, stopped_by: signal.Signals | None) -> LaunchResult:
    failures = [
        RankFailure(
            rank=rank,
            exit_code=end.exit_code,
            signal_name=end.signal_name,
            asked=end.asked,
            last_lines=logs.last_lines(rank, LAST_LINES),
        )
        for rank, end in ended.items()
        if end.exit_code
    ]
    # Stable: among equals the order in which they ended stays.
    failures.sort(key=lambda failure: (failure.asked, _blames_a_peer(failure)))
    code = failures[0].exit_code if failures else 0
    if stopped_by is not None:
        code = 128 + stopped_by
    name = stopped_by.name if stopped_by is not None else ""
    return LaunchResult(exit_code=code, stopped_by=name, failures=tuple(failures))


def _blames_a_peer(failure: RankFailure) -> bool:
    words = " ".join(failure.last_lines[-5:])
    return not failure.signal_name and any(name in words for name in BLAMES_A_PEER)


def python_command(script: str, arguments: Sequence[str], *, module: bool = False) -> list[str]:
    """The command that runs a script or module with this interpreter, its output unbuffered."""
    return [sys.executable, "-u", *(["-m"] if module else []), script, *arguments]


def available_backends() -> list[str]:
    """The transports that this torch was built with."""
    names = ("gloo", "nccl", "mpi", "ucc", "xccl")
    return [name for name in names if getattr(torch.distributed, f"is_{name}_available", bool)()]
