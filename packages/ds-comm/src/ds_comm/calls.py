"""The record of every collective: what it was, which number in its group, and where the user asked for it."""

import os
import sys
import zlib
from collections import deque

import msgspec

RING_LENGTH = 64

# Frames of these packages are not the user's.
OURS = frozenset(
    ["ds", "ds_spec", "ds_kernels", "ds_profile", "ds_comm", "ds_zero", "ds_parallel", "ds_pipe", "ds_ckpt"]
    + ["ds_compress", "ds_infer", "ds_rlhf", "torch", "contextlib", "functools", "threading"]
)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One collective as one rank entered it.

    Attributes:
        seq: number in its group, from 1.
        numel: elements of the whole buffer, 0 where ranks may differ.
        signature: what must agree between ranks: op, tag, numel and dtype, hashed.
    """

    seq: int
    group: str
    op: str
    tag: str
    dtype: str
    numel: int
    call_site: str
    signature: int

    def describe(self) -> str:
        """One line for an error message."""
        size = f" {self.dtype}[{self.numel}]" if self.numel else ""
        return f"{self.op} ({self.tag}){size} at {self.call_site}"


def make_call(*, seq: int, group: str, op: str, tag: str, dtype: str, numel: int) -> Call:
    """The record of a call that is about to be posted, with the user's source line."""
    signature = zlib.crc32(f"{op}|{tag}|{dtype}|{numel}".encode())
    site = call_site()
    return Call(
        seq=seq, group=group, op=op, tag=tag, dtype=dtype, numel=numel, call_site=site, signature=signature
    )


class CallLog:
    """The recent calls of one group on this rank, and a hash of all of them."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.recent: deque[Call] = deque(maxlen=RING_LENGTH)
        self.seq = 0
        self.digest = 0

    def enter(self, *, op: str, tag: str, dtype: str, numel: int) -> Call:
        """Number and record the next call."""
        self.seq += 1
        call = make_call(seq=self.seq, group=self.group, op=op, tag=tag, dtype=dtype, numel=numel)
        self.digest = zlib.crc32(call.signature.to_bytes(4, "little"), self.digest)
        self.recent.append(call)
        return call


NO_SITE = "the end of the script"


def call_site() -> str:
    """The innermost line of this thread outside ds and torch, as ``file.py:12 in function``."""
    return _site(sys._getframe(1)) or NO_SITE


def site_of_thread(ident: int) -> str:
    """The same for another thread of this process."""
    frame = sys._current_frames().get(ident)
    return (_site(frame) if frame is not None else "") or NO_SITE


def _site(frame: object) -> str:
    while frame is not None:
        name = frame.f_globals.get("__name__", "")  # type: ignore[attr-defined]
        if name.partition(".")[0] not in OURS or name == "ds_comm.testing":
            return _format(frame)
        frame = frame.f_back  # type: ignore[attr-defined]
    return ""


def _format(frame: object) -> str:
    code = frame.f_code  # type: ignore[attr-defined]
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"  # type: ignore[attr-defined]
