"""One group of ranks and its collectives: numbered, recorded, compared with the other ranks', and timed."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch

from ds_comm.calls import Call, CallLog
from ds_comm.errors import CollectiveMismatchError
from ds_comm.watch import Watch
from ds_comm.wire import DeviceWire, GlooWire, Posted
from ds_spec import CommEvent, events

# Below this an all-reduce is one small exchange; above, a reduce-scatter and an all-gather send less.
SMALL_BYTES = 1 << 16


class Handle:
    """A collective under way. Its buffers belong to it until :meth:`wait` returns."""

    def __init__(
        self, finish: Callable[[], None] | None = None, done: Callable[[], bool] | None = None
    ) -> None:
        self._finish = finish
        self._done = done

    def wait(self) -> None:
        """Return when the result is there; again is harmless.

        Raises:
            CommError: the ranks did not meet; the same error on every rank.
        """
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._finish is None or (self._done is not None and self._done())


class Communicator(ABC):
    """Collectives of one group. Every rank of the group calls the same ones in the same order.

    Attributes:
        name: of the mesh axis.
        rank: in the group.
        world_size: ranks in the group.
        ranks: their global ranks.
        device: where buffers live.
    """

    name: str
    rank: int
    world_size: int
    ranks: tuple[int, ...]
    device: torch.device

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A zeroed 1-D buffer where collectives are cheapest; the caller owns it."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    @property
    @abstractmethod
    def calls(self) -> Sequence[Call]:
        """The recent calls of this rank."""

    @abstractmethod
    def all_gather_async(self, flat: torch.Tensor, shard: torch.Tensor, *, tag: str) -> Handle:
        """Fill ``flat`` (world_size * S) with every rank's ``shard`` (S), maybe its own slice of it."""

    @abstractmethod
    def reduce_scatter_async(
        self, shard: torch.Tensor, flat: torch.Tensor, *, mean: bool = False, tag: str
    ) -> Handle:
        """Sum every rank's ``flat`` (world_size * S), in rank order, and give each rank its slice.

        Args:
            shard: S elements, may be the own slice of ``flat``, may be of a wider dtype, in which the sum is
                then taken.
            flat: input; contents are unspecified afterwards.
            mean: divide by the world size.
            tag: what for, in error messages and profiles.
        """

    @abstractmethod
    def all_reduce_async(self, flat: torch.Tensor, *, mean: bool = False, tag: str) -> Handle:
        """Sum ``flat`` over ranks, in place; in rank order when it is large and divides."""

    @abstractmethod
    def broadcast_async(self, tensor: torch.Tensor, *, src: int, tag: str) -> Handle:
        """Copy a contiguous ``tensor`` from group rank ``src`` to all."""

    @abstractmethod
    def all_to_all_async(self, output: torch.Tensor, source: torch.Tensor, *, tag: str) -> Handle:
        """Send slice ``i`` of ``source`` to rank ``i``; slices are equal."""

    @abstractmethod
    def exchange(self, values: torch.Tensor, *, tag: str) -> torch.Tensor:
        """Every rank's ``values`` (fp64, 1-D, on the CPU) as rows (world_size, len); small control data."""

    @abstractmethod
    def agree(self, *, tag: str) -> None:
        """Check that all ranks made the same calls so far.

        Raises:
            CollectiveMismatchError: they did not.
        """

    @abstractmethod
    def all_gather_object(self, obj: Any, *, tag: str) -> list[Any]:
        """Every rank's ``obj`` in rank order; anything MessagePack can carry."""

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, *, tag: str) -> None:
        """:meth:`all_gather_async`, waited for."""
        self.all_gather_async(flat, shard, tag=tag).wait()

    def reduce_scatter(
        self, shard: torch.Tensor, flat: torch.Tensor, *, mean: bool = False, tag: str
    ) -> None:
        """:meth:`reduce_scatter_async`, waited for."""
        self.reduce_scatter_async(shard, flat, mean=mean, tag=tag).wait()

    def all_reduce(self, flat: torch.Tensor, *, mean: bool = False, tag: str) -> None:
        """:meth:`all_reduce_async`, waited for."""
        self.all_reduce_async(flat, mean=mean, tag=tag).wait()

    def broadcast(self, tensor: torch.Tensor, *, src: int, tag: str) -> None:
        """:meth:`broadcast_async`, waited for."""
        self.broadcast_async(tensor, src=src, tag=tag).wait()

    def all_to_all(self, output: torch.Tensor, source: torch.Tensor, *, tag: str) -> None:
        """:meth:`all_to_all_async`, waited for."""
        self.all_to_all_async(output, source, tag=tag).wait()

    def barrier(self, *, tag: str) -> None:
        """Return when every rank has come."""
        self.exchange(torch.zeros(0, dtype=torch.float64), tag=tag)


def check_slices(flat: torch.Tensor, shard: torch.Tensor, world_size: int, op: str) -> None:
    """Refuse buffers that are not one flat whole and one equal slice of it.

    Raises:
        ValueError: with the sizes that were given and expected.
    """
    for name, tensor in (("flat", flat), ("shard", shard)):
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"{op} needs a contiguous 1-D {name}, got shape {tuple(tensor.shape)}")
    if flat.numel() != shard.numel() * world_size:
        raise ValueError(
            f"{op} needs flat = world_size * shard elements, got {flat.numel()} and "
            f"{world_size} * {shard.numel()}; pad the buffer to a multiple of the world size first"
        )


class GroupCommunicator(Communicator):
    """The collectives of a group of processes."""

    def __init__(self, name: str, wire: GlooWire, watch: Watch, log: CallLog, device: torch.device) -> None:
        self.name = name
        self.rank = wire.rank
        self.ranks = wire.ranks
        self.world_size = wire.world_size
        self.device = device
        self.watch = watch
        self._wire = wire
        self._log = log

    @property
    def calls(self) -> Sequence[Call]:
        """The recent calls of this rank."""
        return tuple(self._log.recent)

    def _post(
        self,
        op: str,
        tag: str,
        tensor: torch.Tensor,
        sent_bytes: int,
        post: Callable[[], Posted],
        *,
        numel: int = -1,
    ) -> Handle:
        begin_s = time.perf_counter()
        dtype = str(tensor.dtype).removeprefix("torch.")
        call = self._log.enter(op=op, tag=tag, dtype=dtype, numel=tensor.numel() if numel < 0 else numel)
        self.watch.before(call)
        works, after = post() if tensor.numel() else ([], None)

        def finish() -> None:
            self._wait(call, works)
            if after is not None:
                after()
            if events.listening():
                self._emit(call, tensor.nbytes, sent_bytes, begin_s)

        return Handle(finish, lambda: all(work.is_completed() for work in works))

    def _wait(self, call: Call, works: Sequence[Any]) -> None:
        if not self._wire.waits_on_host:
            for work in works:
                work.wait()
            self.watch.observe(call, works)
            return
        since_s = time.monotonic()
        self.watch.waiting(call)
        for work in works:
            while not self._arrived(call, work):
                self.watch.check(call, since_s)
        self.watch.done(call)

    def _arrived(self, call: Call, work: Any) -> bool:
        try:
            work.wait(timedelta(seconds=self.watch.check_s))
        except RuntimeError as error:
            # Running out of the slice is an error of the wait, not of the work, which goes on.
            if not work.is_completed() and "timed out" in str(error).lower():
                return False
            raise self.watch.explain(call, error) from error
        return True

    def _emit(self, call: Call, total_bytes: int, sent_bytes: int, begin_s: float) -> None:
        events.emit(
            CommEvent(
                seq=call.seq,
                group=call.group,
                op=call.op,
                bytes_sent=sent_bytes,
                bytes_total=total_bytes,
                dtype=call.dtype,
                tag=call.tag,
                begin_s=begin_s,
                end_s=time.perf_counter(),
                call_site=call.call_site,
                rank=self.rank,
            )
        )

    def inspect(self) -> None:
        """From the watch thread: find out why works on a device do not complete, and end them."""
        if self.watch.observed_are_stuck() and isinstance(self._wire, DeviceWire):
            self._wire.abort()

    def _share(self, tensor: torch.Tensor) -> int:
        """Bytes of all slices but one."""
        return tensor.nbytes // self.world_size * (self.world_size - 1)

    def all_gather_async(self, flat: torch.Tensor, shard: torch.Tensor, *, tag: str) -> Handle:
        """See :class:`Communicator`."""
        check_slices(flat, shard, self.world_size, "all_gather")
        return self._post(
            "all_gather", tag, flat, self._share(flat), lambda: self._wire.all_gather(flat, shard)
        )

    def reduce_scatter_async(
        self, shard: torch.Tensor, flat: torch.Tensor, *, mean: bool = False, tag: str
    ) -> Handle:
        """See :class:`Communicator`."""
        check_slices(flat, shard, self.world_size, "reduce_scatter")
        return self._post(
            "reduce_scatter",
            tag,
            flat,
            self._share(flat),
            lambda: self._wire.reduce_scatter(shard, flat, mean=mean),
        )

    def all_reduce_async(self, flat: torch.Tensor, *, mean: bool = False, tag: str) -> Handle:
        """See :class:`Communicator`."""
        if flat.dim() == 1 and flat.numel() % self.world_size == 0 and flat.nbytes >= SMALL_BYTES:
            shard = flat.chunk(self.world_size)[self.rank]
            scattered = self._post(
                "all_reduce",
                tag,
                flat,
                self._share(flat),
                lambda: self._wire.reduce_scatter(shard, flat, mean=mean),
            )
            scattered.wait()
            return self._post(
                "all_reduce", tag, flat, self._share(flat), lambda: self._wire.all_gather(flat, shard)
            )
        sent_bytes = 2 * flat.nbytes * (self.world_size - 1) // self.world_size
        return self._post("all_reduce", tag, flat, sent_bytes, lambda: self._wire.all_reduce(flat, mean=mean))

    def broadcast_async(self, tensor: torch.Tensor, *, src: int, tag: str) -> Handle:
        """See :class:`Communicator`."""
        if not 0 <= src < self.world_size:
            raise ValueError(f"src must be a rank of the group, 0..{self.world_size - 1}, got {src}")
        if not tensor.is_contiguous():
            raise ValueError("broadcast needs a contiguous tensor; call .contiguous() and copy back")
        sent_bytes = tensor.nbytes * (self.world_size - 1) if self.rank == src else 0
        return self._post("broadcast", tag, tensor, sent_bytes, lambda: self._wire.broadcast(tensor, src))

    def all_to_all_async(self, output: torch.Tensor, source: torch.Tensor, *, tag: str) -> Handle:
        """See :class:`Communicator`."""
        if output.shape != source.shape or source.numel() % self.world_size:
            raise ValueError(
                f"all_to_all needs equal shapes that divide by world_size={self.world_size}, "
                f"got {tuple(output.shape)} and {tuple(source.shape)}"
            )
        return self._post(
            "all_to_all", tag, source, self._share(source), lambda: self._wire.all_to_all(output, source)
        )

    def exchange(self, values: torch.Tensor, *, tag: str) -> torch.Tensor:
        """See :class:`Communicator`."""
        # A sum with zeros is exact, and one small all-reduce has less latency than a gather.
        rows = torch.zeros(self.world_size, values.numel() + 1, dtype=torch.float64)
        rows[self.rank, 1:] = values
        moved = rows.to(self.device)
        self._post(
            "control", tag, moved, moved.nbytes, lambda: self._wire.all_reduce(moved, mean=False)
        ).wait()
        return moved.cpu()[:, 1:]

    def agree(self, *, tag: str) -> None:
        """See :class:`Communicator`. Free where every call was compared before it was posted."""
        if self.watch.board.checks_before_posting:
            return
        digest = float(self._log.digest)
        recent = [call.describe() for call in self._log.recent]
        digests = self.exchange(torch.tensor([digest], dtype=torch.float64), tag=tag)[:, 0]
        if bool((digests == digest).all()):
            return
        everyone = self.all_gather_object(recent, tag=tag)
        raise CollectiveMismatchError(
            f"ranks made different calls in group {self.name}: {_first_difference(everyone)}"
        )

    def all_gather_object(self, obj: Any, *, tag: str) -> list[Any]:
        """See :class:`Communicator`."""
        data = msgspec.msgpack.encode(obj)
        sizes = self.exchange(torch.tensor([len(data)], dtype=torch.float64), tag=tag)[:, 0].long().tolist()
        width = max(sizes)
        flat = torch.zeros(self.world_size * width, dtype=torch.uint8)
        flat[self.rank * width :][: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        moved = flat.to(self.device)
        own = moved.chunk(self.world_size)[self.rank]
        self._post(
            "control", tag, moved, self._share(moved), lambda: self._wire.all_gather(moved, own)
        ).wait()
        rows = moved.cpu().view(self.world_size, width)
        return [
            msgspec.msgpack.decode(bytes(row[:size].numpy())) for row, size in zip(rows, sizes, strict=True)
        ]


def _first_difference(everyone: Sequence[Sequence[str]]) -> str:
    for calls in zip(*everyone, strict=False):
        if len(set(calls)) > 1:
            return "; ".join(f"rank {rank} made {call}" for rank, call in enumerate(calls))
    return "; ".join(f"rank {rank} made {len(calls)} calls" for rank, calls in enumerate(everyone))
