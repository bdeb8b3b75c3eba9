"""Where ranks see each other's calls before and while they make them: one file that a host's ranks map."""

import contextlib
import enum
import fcntl
import mmap
import os
import struct
import tempfile
from typing import Protocol

import msgspec

from ds_comm.calls import RING_LENGTH, Call

TEXT_BYTES = 240
# A key, a number, the length of a text, the text. The key (a call's seq, a rank's state) is written last and
# in one piece, so that who reads a new key reads the rest of the record too.
KEY = struct.Struct("@Q")
BODY = struct.Struct(f"@QQ{TEXT_BYTES}s")
RECORD_BYTES = KEY.size + BODY.size
VERDICT_BYTES = 4096
LENGTH = struct.Struct("<Q")
ROW_BYTES = RECORD_BYTES * (1 + RING_LENGTH)


class State(enum.IntEnum):
    """What a rank is doing, as far as its group can see."""

    ABSENT = 0  # has not opened the board
    COMPUTING = 1  # outside any call of this group
    IN_CALL = 2  # waiting in call ``seq``
    LEFT = 3  # ended in order; enters no further call
    FAILED = 4  # ended with an exception


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's row: its state, its last call's number, and what it is doing in words."""

    state: State
    seq: int
    activity: str


class Board(Protocol):
    """What the watch needs to see; ``peer_call`` gives (signature, text) of a rank's call, if known."""

    checks_before_posting: bool

    def post(self, call: Call) -> None: ...
    def set_status(self, state: State, seq: int, activity: str) -> None: ...
    def peer_call(self, rank: int, seq: int) -> tuple[int, str] | None: ...
    def status(self, rank: int) -> Status: ...
    def is_alive(self, rank: int) -> bool: ...
    def verdict(self) -> str: ...
    def set_verdict(self, text: str) -> None: ...
    def close(self) -> None: ...


class SharedBoard:
    """A board in memory that all ranks of a group map: posting and looking cost microseconds.

    Each rank writes its own call before it reads the others', so of two ranks that disagree the later one
    always sees it before it posts anything. Each rank also holds a file lock on its row, which the kernel
    drops when the process dies, however it dies.

    Args:
        path: file of :meth:`create`.
        rank: this rank's row.
        world_size: rows.
    """

    checks_before_posting = True

    def __init__(self, path: str, *, rank: int, world_size: int) -> None:
        self._rank = rank
        self._file = os.open(path, os.O_RDWR)
        self._map = mmap.mmap(self._file, self.size(world_size))
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        self.set_status(State.COMPUTING, 0, "starting")

    @staticmethod
    def size(world_size: int) -> int:
        """Bytes of the file."""
        return VERDICT_BYTES + world_size * ROW_BYTES

    @classmethod
    def create(cls, world_size: int) -> str:
        """Make an empty board and return its path; who opens it last unlinks it."""
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        file, path = tempfile.mkstemp(prefix="ds-comm-board-", dir=folder)
        try:
            os.posix_fallocate(file, 0, cls.size(world_size))
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(file)
        return path

    def _row(self, rank: int) -> int:
        return VERDICT_BYTES + rank * ROW_BYTES

    def _slot(self, rank: int, seq: int) -> int:
        return self._row(rank) + RECORD_BYTES * (1 + seq % RING_LENGTH)

    def _write(self, offset: int, key: int, number: int, text: str) -> None:
        data = text.encode()[:TEXT_BYTES]
        BODY.pack_into(self._map, offset + KEY.size, number, len(data), data)
        KEY.pack_into(self._map, offset, key)

    def _read(self, offset: int) -> tuple[int, int, str]:
        (key,) = KEY.unpack_from(self._map, offset)
        number, length, data = BODY.unpack_from(self._map, offset + KEY.size)
        return key, number, data[:length].decode(errors="replace")

    def post(self, call: Call) -> None:
        """Show this rank's call."""
        self._write(self._slot(self._rank, call.seq), call.seq, call.signature, call.describe())

    def peer_call(self, rank: int, seq: int) -> tuple[int, str] | None:
        """Signature and text of ``rank``'s call number ``seq``, if it made it and it is recent."""
        found, signature, text = self._read(self._slot(rank, seq))
        return (signature, text) if found == seq else None

    def set_status(self, state: State, seq: int, activity: str) -> None:
        """Show what this rank is doing."""
        self._write(self._row(self._rank), state, seq, activity)

    def status(self, rank: int) -> Status:
        """What ``rank`` says it is doing."""
        state, seq, activity = self._read(self._row(rank))
        return Status(state=State(state), seq=seq, activity=activity)

    def is_alive(self, rank: int) -> bool:
        """Whether ``rank``'s process still holds its row."""
        if rank == self._rank:
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return False

    def verdict(self) -> str:
        """What some rank found wrong, or nothing."""
        (length,) = LENGTH.unpack_from(self._map, 0)
        return self._map[LENGTH.size : LENGTH.size + length].decode(errors="replace") if length else ""

    def set_verdict(self, text: str) -> None:
        """Tell every rank what is wrong; the first one to speak counts."""
        if self.verdict():
            return
        data = text.encode()[: VERDICT_BYTES - LENGTH.size]
        self._map[LENGTH.size : LENGTH.size + len(data)] = data
        LENGTH.pack_into(self._map, 0, len(data))

    def close(self) -> None:
        """Unmap; the kernel frees the memory when the last rank has."""
        with contextlib.suppress(ValueError):
            self._map.close()
            os.close(self._file)
