"""Finds out why ranks do not meet, and tells all of them: looks at the board while a call waits."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from ds_comm.board import Board, State
from ds_comm.calls import Call, CallLog, call_site, site_of_thread
from ds_comm.errors import BY_NAME, CollectiveMismatchError, CommError, PeerLostError, StalledError

# After the transport failed, how long to look for the reason on the board.
REASON_S = 5.0


class Watch:
    """One group's view of its ranks.

    Args:
        board: where ranks show their calls.
        log: this rank's calls.
        rank: this rank in the group.
        ranks: global ranks of the group, for messages.
        timeout_s: how long a rank may stay away from a call while it is alive.
        check_s: how often to look while waiting.
    """

    def __init__(
        self, board: Board, log: CallLog, *, rank: int, ranks: Sequence[int], timeout_s: float, check_s: float
    ) -> None:
        self.board = board
        self.check_s = check_s
        self._log = log
        self._rank = rank
        self._ranks = tuple(ranks)
        self._timeout_s = timeout_s
        self._peers = [index for index in range(len(ranks)) if index != rank]
        self._waiting = False
        self._observed: deque[tuple[Call, Sequence[Any], float]] = deque()

    def before(self, call: Call) -> None:
        """Show the call, and refuse it when a rank made another one under the same number.

        Raises:
            CommError: the verdict of this or another rank.
        """
        self.board.post(call)
        self._raise_verdict()
        if self.board.checks_before_posting:
            self._compare(call)
        self.board.set_status(State.COMPUTING, call.seq, call.describe())

    def waiting(self, call: Call) -> None:
        """Mark this rank as waiting in ``call``."""
        self._waiting = True
        self.board.set_status(State.IN_CALL, call.seq, f"waiting in {call.describe()}")

    def done(self, call: Call) -> None:
        """Mark this rank as past ``call``."""
        self._waiting = False
        self.board.set_status(State.COMPUTING, call.seq, f"computing after {call.describe()}")

    def check(self, call: Call, since_s: float) -> None:
        """Look for a reason why ``call`` does not complete; returns when there is none yet.

        Raises:
            CommError: the verdict, the same on every rank.
        """
        self._raise_verdict()
        self._compare(call)
        missing = [peer for peer in self._peers if self.board.peer_call(peer, call.seq) is None]
        for peer in self._peers:
            self._check_end(peer, call, entered=peer not in missing)
        waited_s = time.monotonic() - since_s
        if missing and waited_s > self._timeout_s:
            names = ", ".join(
                f"rank {self._ranks[peer]} is {self.board.status(peer).activity}" for peer in missing
            )
            self._rule(
                StalledError,
                f"{self._name(call)} waits {waited_s:.0f} s for ranks that did not enter it: {names}. "
                f"Rank {self._ranks[self._rank]} entered {call.describe()}. "
                "If the wait is expected, raise timeout_s in ds_comm.init",
            )

    def observe(self, call: Call, works: Sequence[Any]) -> None:
        """Leave works that nobody waits for on the host to the watch thread."""
        self._observed.append((call, works, time.monotonic()))

    def observed_are_stuck(self) -> bool:
        """Whether the oldest observed call has a verdict; called again and again by the watch thread."""
        while self._observed and all(work.is_completed() for work in self._observed[0][1]):
            self._observed.popleft()
        if not self._observed:
            return False
        call, _, since_s = self._observed[0]
        try:
            self.check(call, since_s)
        except CommError:
            self._observed.clear()
            return True
        return False

    def explain(self, call: Call, error: Exception) -> CommError:
        """The reason for a failure of the transport, as far as it can be found within seconds."""
        since = time.monotonic()
        while time.monotonic() - since < REASON_S:
            try:
                self.check(call, time.monotonic())
            except CommError as verdict:
                return verdict
            threading.Event().wait(self.check_s / 4)
        return CommError(f"{self._name(call)} failed: {error}. This rank entered {call.describe()}")

    def _name(self, call: Call) -> str:
        return f"call {call.seq} of group {call.group}"

    def _compare(self, call: Call) -> None:
        for peer in self._peers:
            other = self.board.peer_call(peer, call.seq)
            if other is not None and other[0] != call.signature:
                mine, theirs = self._ranks[self._rank], self._ranks[peer]
                self._rule(
                    CollectiveMismatchError,
                    f"{self._name(call)} differs between ranks: rank {mine} entered {call.describe()}, "
                    f"rank {theirs} entered {other[1]}. Every rank must make the same calls in order: "
                    "look for a branch, a skipped module or a batch that only some ranks have",
                )

    def _check_end(self, peer: int, call: Call, *, entered: bool) -> None:
        status = self.board.status(peer)
        who = f"rank {self._ranks[peer]}"
        if status.state is State.FAILED:
            self._rule(
                PeerLostError,
                f"{who} ended with an error while {self._name(call)} needed it: {status.activity}",
            )
        if status.state is State.LEFT and not entered:
            self._rule(
                StalledError,
                f"{who} did not enter {self._name(call)}: it has finished ({status.activity}). "
                f"Rank {self._ranks[self._rank]} entered {call.describe()}. "
                "Give every rank the same number of batches and steps",
            )
        if status.state not in (State.LEFT, State.ABSENT) and not self.board.is_alive(peer):
            self._rule(
                PeerLostError,
                f"{who} has died (killed, or out of memory?) while {self._name(call)} needed it; "
                f"it was last {status.activity}",
            )

    def _rule(self, kind: type[CommError], text: str) -> None:
        self.board.set_verdict(f"{kind.__name__}|{text}")
        self._raise_verdict()
        raise kind(text)

    def _raise_verdict(self) -> None:
        verdict = self.board.verdict()
        if verdict:
            kind, _, text = verdict.partition("|")
            raise BY_NAME.get(kind, CommError)(text)

    def show_activity(self, main_thread: int) -> None:
        """Publish the line the main thread is at, unless it waits in a call."""
        status = self.board.status(self._rank)
        if not self._waiting and status.state is State.COMPUTING:
            self.board.set_status(State.COMPUTING, status.seq, f"at {site_of_thread(main_thread)}")

    def leave(self, *, failed: str = "") -> None:
        """Enter no further call; with a reason when this rank fails."""
        state = State.FAILED if failed else State.LEFT
        self.board.set_status(
            state, self._log.seq, failed or f"left at {call_site()} after call {self._log.seq}"
        )

    def peers_left(self) -> bool:
        """Whether every other rank has ended.

        Raises:
            CommError: another rank waits for this one.
        """
        self._raise_verdict()
        statuses = {peer: self.board.status(peer) for peer in self._peers}
        return all(
            status.state in (State.LEFT, State.FAILED, State.ABSENT) or not self.board.is_alive(peer)
            for peer, status in statuses.items()
        )
