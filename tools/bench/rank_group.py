"""A fresh group of ranks for one benchmark run: own processes, own loopback device, meeting points.

The loopback device is private where the kernel allows it: its counters then hold only these ranks' traffic.
Knows nothing of torch or of what is measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import glob
import multiprocessing
import os
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
SIOCGIFFLAGS = 0x8913
SIOCSIFFLAGS = 0x8914
IFF_UP = 0x1


class GroupError(RuntimeError):
    """A rank failed, or the group did not finish in time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupResult:
    """What a group of ranks gave.

    Attributes:
        results: what the function returned, in rank order.
        loopback_bytes: bytes on the loopback device between the first and the last meeting of the ranks.
        is_private: whether nobody else could use that device.
    """

    results: list[Any]
    loopback_bytes: int
    is_private: bool


class Rank:
    """What a rank's function is given.

    Attributes:
        rank: of this process.
        world_size: ranks in the group.
        port: free TCP port of this group, the same on every rank.
    """

    def __init__(self, connection: Connection, rank: int, world_size: int, port: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.port = port
        self._connection = connection

    def meet(self) -> None:
        """Wait until every rank is here; the group notes the traffic so far."""
        self._connection.send(("meet", None))
        self._connection.recv()


def run_group(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float,
    environment: dict[str, str],
    litter: str = "",
) -> GroupResult:
    """Call ``function(rank, *args)`` in ``world_size`` fresh processes.

    Args:
        function: of an importable module; takes a :class:`Rank` first, and meets the others at least twice.
        world_size: how many processes.
        args: picklable.
        timeout_s: for everything.
        environment: more variables for the ranks, beside those of torchrun.
        litter: pattern of files to remove afterwards; ``{port}`` in it is the group's port.

    Raises:
        GroupError: with the traceback of the rank that failed first, or the rank's last lines.
    """
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    job = (function, world_size, args, timeout_s, environment, litter)
    leader = context.Process(target=_lead, args=(writer, job))
    leader.start()
    writer.close()
    try:
        outcome = reader.recv() if reader.poll(timeout_s + 30) else "the group is stuck"
    except EOFError:
        outcome = "the group's leader died"
    finally:
        leader.join(10)
        if leader.is_alive():
            leader.kill()
    if not isinstance(outcome, GroupResult):
        raise GroupError(outcome)
    return outcome


def _lead(writer: Connection, job: tuple) -> None:
    function, world_size, args, timeout_s, environment, litter = job
    is_private = _own_loopback()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= environment | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    context = multiprocessing.get_context("spawn")
    connections, processes = [], []
    for rank in range(world_size):
        here, there = context.Pipe()
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = context.Process(target=_be_rank, args=(there, rank, world_size, port, function, args))
        process.start()
        there.close()
        connections.append(here)
        processes.append(process)
    try:
        results, counts = _serve(connections, timeout_s)
        sent_bytes = counts[-1] - counts[0]
        writer.send(GroupResult(results=results, loopback_bytes=sent_bytes, is_private=is_private))
    except GroupError as error:
        writer.send(str(error))
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        for path in glob.glob(litter.format(port=port)) if litter else ():
            os.unlink(path)


def _serve(connections: Sequence[Connection], timeout_s: float) -> tuple[list[Any], list[int]]:
    """Let ranks meet, sampling the loopback device each time, until all have returned."""
    deadline = time.monotonic() + timeout_s
    results: dict[Any, Any] = {}
    here: set[Any] = set()
    counts: list[int] = []
    while len(results) < len(connections):
        open_ones = [connection for connection in connections if connection not in results]
        ready = wait(open_ones, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise GroupError(f"not done within {timeout_s:.0f} s")
        for connection in ready:
            kind, value = _receive(connection)
            if kind == "result":
                results[connection] = value
            else:
                here.add(connection)
        if len(here) == len(connections):
            counts.append(loopback_bytes())
            for connection in connections:
                connection.send(None)
            here.clear()
    return [results[connection] for connection in connections], counts or [0]


def _receive(connection: Any) -> tuple[str, Any]:
    try:
        kind, value = connection.recv()
    except EOFError:
        raise GroupError("a rank died without a word") from None
    if kind == "error":
        raise GroupError(value)
    return kind, value


def _be_rank(
    connection: Connection, rank: int, world_size: int, port: int, function: Callable[..., Any], args: tuple
) -> None:
    os.setsid()  # a session of its own, so that what it starts (a compiler) ends with it
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, sys.stdout.fileno())
    os.dup2(quiet, sys.stderr.fileno())
    try:
        outcome = ("result", function(Rank(connection, rank, world_size, port), *args))
    except BaseException:
        outcome = ("error", f"rank {rank}: {traceback.format_exc()}")
    connection.send(outcome)
    connection.recv()  # stay until the leader has everything: a peer may still need this process


def loopback_bytes() -> int:
    """Bytes this network namespace has sent over its loopback device."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == "lo":
            return int(fields.split()[8])
    return 0


def _own_loopback() -> bool:
    """Move this process to a network namespace of its own, with a loopback device that is up."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0 and libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(control, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))
    return True
