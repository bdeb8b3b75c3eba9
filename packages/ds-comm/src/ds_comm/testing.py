"""Run a function on several ranks of this machine, in fractions of a second, and get every rank's outcome."""

import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_comm import world as worlds
from ds_comm.launch_env import Launched

# torch._dynamo is imported by the first optimizer that is made, which takes seconds.
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "ds_comm.testing"]
# How long the other ranks get to fail by themselves once one has.
GRACE_S = 20.0


class RankFailedError(AssertionError):
    """At least one rank failed.

    Attributes:
        errors: what each failing rank raised, with its traceback, or how its process ended.
    """

    def __init__(self, errors: dict[int, str]) -> None:
        self.errors = errors
        text = "\n\n".join(f"--- rank {rank} ---\n{error}" for rank, error in sorted(errors.items()))
        super().__init__(f"{len(errors)} rank(s) failed\n\n{text}")


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    comm_timeout_s: float = 30.0,
    stall_check_s: float = 0.2,
) -> list[Any]:
    """Call ``function(*args)`` in ``world_size`` processes that have joined one job, on CPU and gloo.

    Processes come from a fork server that has torch loaded, with one thread each. The function may live in a
    test file that cannot be imported by name; arguments and results are pickled.

    Args:
        function: at the top level of a file.
        world_size: how many ranks.
        timeout_s: for everything; then ranks are stopped and their stacks shown.
        comm_timeout_s: ``timeout_s`` of :func:`ds_comm.init`.
        stall_check_s: the same's.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankFailedError: a rank raised, died or did not finish.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {
        "file": sys.modules[function.__module__].__file__,
        "module": function.__module__,
        "function": function.__qualname__,
        "args": pickle.dumps(args),
        "port": store.port,
        "world_size": world_size,
        "timeout_s": comm_timeout_s,
        "check_s": stall_check_s,
    }
    with tempfile.TemporaryDirectory(prefix="ds-comm-ranks-") as folder:
        ranks = [_Rank(context, rank, job, Path(folder)) for rank in range(world_size)]
        _collect(ranks, timeout_s)
        return _results(ranks)


class _Rank:
    """One process and what came back from it."""

    def __init__(self, context: Any, rank: int, job: dict[str, Any], folder: Path) -> None:
        self.rank = rank
        self.stacks = folder / f"stacks-{rank}"
        self.reader, writer = context.Pipe(duplex=False)
        self.process = context.Process(target=_main, args=(rank, job, writer, str(self.stacks)), daemon=True)
        self.process.start()
        writer.close()
        self.outcome: tuple[str, Any] | None = None

    def receive(self) -> None:
        """Take the outcome, or note how the process ended."""
        try:
            self.outcome = pickle.loads(self.reader.recv_bytes())
        except EOFError:
            self.process.join()
            code = self.process.exitcode or 0
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            self.outcome = ("error", f"the process {how} without a result")

    def stop(self) -> None:
        """Note where it is stuck and end it."""
        if self.outcome is None:
            os.kill(self.process.pid, signal.SIGUSR1)
            self.process.join(0.5)
            stacks = self.stacks.read_text() if self.stacks.exists() else "no stack"
            self.outcome = ("error", f"did not finish in time; stacks:\n{stacks}")
        self.process.kill()
        self.process.join()


def _collect(ranks: list[_Rank], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    waiting = {rank.reader: rank for rank in ranks}
    try:
        while waiting and time.monotonic() < deadline:
            for reader in wait(list(waiting), max(0.0, deadline - time.monotonic())):
                rank = waiting.pop(reader)  # type: ignore[arg-type]
                rank.receive()
                if rank.outcome is not None and rank.outcome[0] == "error":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
    finally:
        for rank in ranks:
            rank.stop()


def _results(ranks: list[_Rank]) -> list[Any]:
    outcomes = [rank.outcome or ("error", "no outcome") for rank in ranks]
    errors = {rank: value for rank, (kind, value) in enumerate(outcomes) if kind == "error"}
    if errors:
        raise RankFailedError(errors)
    return [value for _, value in outcomes]


def _main(rank: int, job: dict[str, Any], writer: Connection, stacks: str) -> None:
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        outcome = _run(rank, job)
        writer.send_bytes(pickle.dumps(outcome))
        writer.close()
    # Not through the interpreter's end: threads of a failed transport would wait for peers.
    os._exit(0)


def _run(rank: int, job: dict[str, Any]) -> tuple[str, Any]:
    torch.set_num_threads(1)
    size = job["world_size"]
    launched = Launched(
        launcher="run_ranks",
        rank=rank,
        world_size=size,
        local_rank=rank,
        local_world_size=size,
        master_addr="127.0.0.1",
        master_port=job["port"],
    )
    world = worlds.World(launched, torch.device("cpu"), timeout_s=job["timeout_s"], check_s=job["check_s"])
    try:
        if size > 1:
            world.connect(
                dist.TCPStore("127.0.0.1", job["port"], timeout=timedelta(seconds=job["timeout_s"]))
            )
        worlds.adopt(world)
        result = _load(job["file"], job["module"], job["function"])(*pickle.loads(job["args"]))
        worlds.shutdown()
    except BaseException as error:
        if worlds.is_initialized():
            world.leave(failed=f"{type(error).__name__}: {str(error)[:100]}")
        return "error", traceback.format_exc()
    return "result", result


def _load(path: str, module_name: str, qualname: str) -> Callable[..., Any]:
    # Under the name it has in the parent, which then knows the classes of what comes back.
    name = f"ds_comm_ranks_{Path(path).stem}" if module_name == "__main__" else module_name
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return getattr(module, qualname)
