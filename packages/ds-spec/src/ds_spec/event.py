"""What happened: records that runtimes emit and profilers read. Times are ``time.perf_counter`` seconds."""

import msgspec

from ds_spec.checks import check_fields, check_order


class CommEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="comm_event"):
    """One collective of one rank.

    Attributes:
        seq: number of the call in its group, from 1.
        group: name of the group, such as ``dp``.
        op: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``broadcast``, ``all_to_all``, ``barrier`` or
            ``control``.
        bytes_sent: what this rank put on the wire.
        bytes_total: size of the whole (gathered or unreduced) buffer.
        tag: what it was for, in the caller's words.
        call_site: the user's source line.
        rank: rank in the group.
    """

    seq: int
    group: str
    op: str
    bytes_sent: int
    bytes_total: int
    dtype: str
    tag: str
    begin_s: float
    end_s: float
    call_site: str
    rank: int
    version: int = 1

    def __post_init__(self) -> None:
        check_fields(self, counts=("seq", "bytes_sent", "bytes_total", "rank"), seconds=("begin_s", "end_s"))
        check_order(self)


class SpanEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="span_event"):
    """A named stretch of time on one rank."""

    name: str
    category: str
    begin_s: float
    end_s: float
    rank: int
    version: int = 1

    def __post_init__(self) -> None:
        check_fields(self, counts=("rank",), seconds=("begin_s", "end_s"))
        check_order(self)


class MemoryEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="memory_event"):
    """Bytes that one component holds on one rank from ``time_s`` on."""

    component: str
    bytes_held: int
    time_s: float
    rank: int
    version: int = 1

    def __post_init__(self) -> None:
        check_fields(self, counts=("bytes_held", "rank"), seconds=("time_s",))


class IoEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="io_event"):
    """One read or write of a file."""

    path: str
    op: str
    num_bytes: int
    begin_s: float
    end_s: float
    rank: int
    version: int = 1

    def __post_init__(self) -> None:
        check_fields(self, counts=("num_bytes", "rank"), seconds=("begin_s", "end_s"))
        check_order(self)


Event = CommEvent | SpanEvent | MemoryEvent | IoEvent
