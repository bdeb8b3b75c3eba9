"""The processes of launched ranks: which ended first and how, and their end, by exact pid."""

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

# Whoever fails because a peer failed needs a moment to say so; then all are asked to end, then made to.
FAIL_THEMSELVES_S = 2.5
END_THEMSELVES_S = 4.0
LOOK_EVERY_S = 0.02
# The agent gives every rank this variable, and what a rank starts inherits it.
RUN_ID = "TORCHELASTIC_RUN_ID"


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank's process ended.

    Attributes:
        exit_code: the process's own, or 128 + the signal that ended it.
        signal_name: such as ``SIGKILL``, empty if none ended it.
        asked: whether it ended only after the launcher asked for it.
    """

    exit_code: int
    signal_name: str
    asked: bool


class RankProcesses:
    """The ranks' processes, each the leader of its own session, watched without reaping them.

    A process that has ended stays a zombie until the agent reaps it, so no pid here can have been given to a
    stranger.

    Attributes:
        ended: local rank to how it ended, in the order in which they did.
    """

    def __init__(self, run_id: str) -> None:
        self._mark = f"{RUN_ID}={run_id}".encode()
        self.pids: dict[int, int] = {}
        self.ended: dict[int, Ended] = {}
        self._asked = False
        self._failed_at_s: float | None = None

    def started(self, pids: dict[int, int]) -> None:
        """Take over processes by local rank."""
        self.pids = dict(pids)

    def look(self) -> None:
        """Note which have ended since the last look."""
        for rank, pid in self.pids.items():
            if rank in self.ended:
                continue
            try:
                found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                continue  # reaped while the agent was interrupted: how it ended is not known
            if found is not None:
                by_signal = found.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
                self.ended[rank] = Ended(
                    exit_code=found.si_status + (128 if by_signal else 0),
                    signal_name=signal.Signals(found.si_status).name if by_signal else "",
                    asked=self._asked,
                )

    def settled(self) -> bool:
        """Whether all ended. When one fails, the others get a moment to fail too, then are ended."""
        self.look()
        if len(self.ended) < len(self.pids) and any(end.exit_code for end in self.ended.values()):
            now_s = time.monotonic()
            self._failed_at_s = self._failed_at_s or now_s
            if now_s - self._failed_at_s > FAIL_THEMSELVES_S:
                self.stop()
        if self.pids and len(self.ended) == len(self.pids):
            if any(end.exit_code for end in self.ended.values()):
                self.stop()  # what the failed ranks started is still there
            return True
        return False

    def stop(self, first: signal.Signals = signal.SIGTERM) -> None:
        """End the ranks and all they started, detached or not: ``first``, then SIGKILL."""
        self._asked = True
        sessions = set(self.pids.values())
        targets = _members(sessions, self._mark)
        _signal(targets, first)
        deadline_s = time.monotonic() + END_THEMSELVES_S
        while _alive(targets) and time.monotonic() < deadline_s:
            time.sleep(LOOK_EVERY_S)
        targets |= _members(sessions, self._mark)
        _signal(targets, signal.SIGKILL)
        deadline_s = time.monotonic() + END_THEMSELVES_S
        while _alive(targets) and time.monotonic() < deadline_s:
            time.sleep(LOOK_EVERY_S)
        self.look()


class _Process(msgspec.Struct, frozen=True):
    """One process; the start time tells it from a later one with the same pid."""

    pid: int
    started: str


def _members(sessions: set[int], mark: bytes) -> set[_Process]:
    """Live processes of these sessions, with the mark in their environment, and all descendants of them."""
    table = {pid: fields for pid, fields in _table() if fields[0] != "Z"}
    members = {pid for pid, fields in table.items() if int(fields[3]) in sessions or _is_marked(pid, mark)}
    grown = True
    while grown:
        more = {pid for pid, fields in table.items() if int(fields[1]) in members} - members
        members |= more
        grown = bool(more)
    return {_Process(pid, table[pid][19]) for pid in members}


def _table() -> Iterable[tuple[int, list[str]]]:
    """Pid, and the fields of ``/proc/PID/stat`` from the state on: state, parent, group, session, ..."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # ended meanwhile


def _is_marked(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False  # another user's, or ended meanwhile


def _alive(processes: set[_Process]) -> set[_Process]:
    return {process for process in processes if _is_alive(process)}


def _is_alive(process: _Process) -> bool:
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] != "Z" and fields[19] == process.started


def _signal(processes: set[_Process], number: signal.Signals) -> None:
    for process in _alive(processes):
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            continue
