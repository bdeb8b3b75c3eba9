"""The communicator of one rank alone: same calls, same records, nothing on the wire, no process group."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from ds_comm.calls import Call, CallLog
from ds_comm.communicator import Communicator, Handle, check_slices
from ds_spec import CommEvent, events


class Loopback(Communicator):
    """Every collective over a group of one: at most a copy from input to output."""

    def __init__(self, name: str, device: torch.device, *, rank: int = 0) -> None:
        self.name = name
        self.device = device
        self.rank = 0
        self.world_size = 1
        self.ranks = (rank,)
        self._log = CallLog(name)

    @property
    def calls(self) -> Sequence[Call]:
        """The recent calls."""
        return tuple(self._log.recent)

    def _record(self, op: str, tag: str, tensor: torch.Tensor) -> Handle:
        dtype = str(tensor.dtype).removeprefix("torch.")
        call = self._log.enter(op=op, tag=tag, dtype=dtype, numel=tensor.numel())
        if events.listening():
            now = time.perf_counter()
            events.emit(
                CommEvent(
                    seq=call.seq,
                    group=self.name,
                    op=op,
                    bytes_sent=0,
                    bytes_total=tensor.nbytes,
                    dtype=dtype,
                    tag=tag,
                    begin_s=now,
                    end_s=now,
                    call_site=call.call_site,
                    rank=0,
                )
            )
        return Handle()

    def all_gather_async(self, flat: torch.Tensor, shard: torch.Tensor, *, tag: str) -> Handle:
        """See :class:`Communicator`."""
        check_slices(flat, shard, 1, "all_gather")
        _copy(flat, shard)
        return self._record("all_gather", tag, flat)

    def reduce_scatter_async(
        self, shard: torch.Tensor, flat: torch.Tensor, *, mean: bool = False, tag: str
    ) -> Handle:
        """See :class:`Communicator`."""
        check_slices(flat, shard, 1, "reduce_scatter")
        _copy(shard, flat)
        return self._record("reduce_scatter", tag, flat)

    def all_reduce_async(self, flat: torch.Tensor, *, mean: bool = False, tag: str) -> Handle:
        """See :class:`Communicator`."""
        return self._record("all_reduce", tag, flat)

    def broadcast_async(self, tensor: torch.Tensor, *, src: int, tag: str) -> Handle:
        """See :class:`Communicator`."""
        if src != 0:
            raise ValueError(f"src must be a rank of the group, 0..0, got {src}")
        return self._record("broadcast", tag, tensor)

    def all_to_all_async(self, output: torch.Tensor, source: torch.Tensor, *, tag: str) -> Handle:
        """See :class:`Communicator`."""
        _copy(output, source)
        return self._record("all_to_all", tag, source)

    def exchange(self, values: torch.Tensor, *, tag: str) -> torch.Tensor:
        """See :class:`Communicator`."""
        self._record("control", tag, values)
        return values.clone().unsqueeze(0)

    def agree(self, *, tag: str) -> None:
        """One rank agrees with itself."""

    def all_gather_object(self, obj: Any, *, tag: str) -> list[Any]:
        """See :class:`Communicator`."""
        data = msgspec.msgpack.encode(obj)
        self._record("control", tag, torch.empty(len(data), dtype=torch.uint8))
        return [msgspec.msgpack.decode(data)]


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
