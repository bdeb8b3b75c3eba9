"""The board for ranks on several hosts: the same rows in the rendezvous store, published while ranks wait."""

import contextlib
import time

import msgspec

from ds_comm.board import State, Status
from ds_comm.calls import Call
from ds_comm.store import KeyValue

# A row that its rank has not renewed for this long belongs to a lost process.
STALE_S = 15.0


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank publishes."""

    state: int
    seq: int
    activity: str
    renewed: int
    calls: dict[int, tuple[int, str]]


class StoreBoard:
    """Rows in the store. Looking costs a round trip, so calls are compared only while a rank waits."""

    checks_before_posting = False

    def __init__(self, store: KeyValue, name: str, *, rank: int, world_size: int) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._status = Status(state=State.COMPUTING, seq=0, activity="starting")
        self._calls: dict[int, tuple[int, str]] = {}
        self._renewed = 0
        self._seen: dict[int, tuple[int, float]] = {}

    def post(self, call: Call) -> None:
        """Keep this rank's call for the next :meth:`publish`."""
        self._calls[call.seq] = (call.signature, call.describe())
        self._calls.pop(call.seq - 16, None)

    def set_status(self, state: State, seq: int, activity: str) -> None:
        """Keep what this rank is doing; ends are published at once."""
        self._status = Status(state=state, seq=seq, activity=activity)
        if state in (State.LEFT, State.FAILED):
            self.publish()

    def publish(self) -> None:
        """Write this rank's row; the watch thread does so every second."""
        self._renewed += 1
        row = Row(
            state=self._status.state,
            seq=self._status.seq,
            activity=self._status.activity,
            renewed=self._renewed,
            calls=dict(self._calls),
        )
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._name}/{self._rank}", msgspec.msgpack.encode(row))

    def _row(self, rank: int) -> Row | None:
        data = self._store.get(f"{self._name}/{rank}")
        return msgspec.msgpack.decode(data, type=Row) if data else None

    def peer_call(self, rank: int, seq: int) -> tuple[int, str] | None:
        """Signature and text of ``rank``'s call number ``seq``, if published."""
        row = self._row(rank)
        return row.calls.get(seq) if row else None

    def status(self, rank: int) -> Status:
        """What ``rank`` last said it was doing."""
        row = self._row(rank)
        if row is None:
            return Status(state=State.ABSENT, seq=0, activity="not started")
        return Status(state=State(row.state), seq=row.seq, activity=row.activity)

    def is_alive(self, rank: int) -> bool:
        """Whether ``rank`` has renewed its row lately."""
        row = self._row(rank)
        if rank == self._rank or row is None:
            return True
        now = time.monotonic()
        renewed, since = self._seen.get(rank, (-1, now))
        if row.renewed != renewed:
            self._seen[rank] = (row.renewed, now)
            return True
        return now - since < STALE_S

    def verdict(self) -> str:
        """What some rank found wrong, or nothing."""
        return self._store.get(f"{self._name}/verdict").decode()

    def set_verdict(self, text: str) -> None:
        """Tell every rank what is wrong."""
        self._store.set(f"{self._name}/verdict", text.encode())

    def close(self) -> None:
        """Nothing to free: the store goes with its host."""
