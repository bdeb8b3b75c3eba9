"""How each collective travels over ``torch.distributed``: the works to wait for, and what to do after.

Over gloo the moves are built from the operations that copy least there (``docs/results.md``): an all-gather
is one broadcast per owner straight into its slice, a reduce-scatter an all-to-all into scratch and a local
sum in rank order. On devices NCCL's own are used.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

# Works to wait for (torch types them loosely), and what to do when they are done.
Posted = tuple[list[Any], Callable[[], None] | None]


class Scratch:
    """Receive buffers by dtype, kept at the largest size asked for; several in flight get several."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[torch.dtype, list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """At least ``numel`` elements with unspecified contents."""
        free = self._free.setdefault(dtype, [])
        fitting = [index for index, buffer in enumerate(free) if buffer.numel() >= numel]
        if fitting:
            return free.pop(min(fitting, key=lambda index: free[index].numel()))
        if free:
            free.pop()  # the larger one below takes its place
        return torch.empty(numel, dtype=dtype, device=self._device)

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer."""
        self._free[buffer.dtype].append(buffer)


class GlooWire:
    """Moves for one group on CPU tensors.

    Attributes:
        waits_on_host: whether waiting for a work blocks this thread until it is done.
    """

    waits_on_host = True

    def __init__(
        self, group: dist.ProcessGroup, rank: int, ranks: Sequence[int], device: torch.device
    ) -> None:
        self.group = group
        self.rank = rank
        self.ranks = tuple(ranks)
        self.world_size = len(ranks)
        self._scratch = Scratch(device)

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor) -> Posted:
        """Fill every slice of ``flat`` from its owner."""
        slices = flat.chunk(self.world_size)
        if slices[self.rank].data_ptr() != shard.data_ptr():
            slices[self.rank].copy_(shard)
        works = [self._broadcast(part, source) for source, part in enumerate(slices)]
        return works, None

    def broadcast(self, tensor: torch.Tensor, src: int) -> Posted:
        """Copy ``tensor`` from group rank ``src``."""
        return [self._broadcast(tensor.view(-1), src)], None

    def _broadcast(self, flat: torch.Tensor, src: int) -> Any:
        # As bytes, so that every dtype travels.
        data = flat.view(torch.uint8)
        return dist.broadcast(data, self.ranks[src], group=self.group, async_op=True)

    def reduce_scatter(self, shard: torch.Tensor, flat: torch.Tensor, *, mean: bool) -> Posted:
        """Sum everybody's slice of this rank into ``shard``, in rank order.

        Slices for lower ranks lie before the own one and those for higher ranks after it, so two exchanges
        move everything but the own slice, straight from ``flat``.
        """
        rank, size, num_higher = self.rank, flat.numel() // self.world_size, self.world_size - 1 - self.rank
        received = self._scratch.take(flat.numel() - size, flat.dtype)
        lower, higher = received[: rank * size], received[rank * size : flat.numel() - size]
        num_bytes = size * flat.element_size()
        to_lower = [num_bytes] * rank + [0] * (num_higher + 1)
        to_higher = [0] * (rank + 1) + [num_bytes] * num_higher
        works = [
            self._exchange(higher, to_higher, flat[: rank * size], to_lower),
            self._exchange(lower, to_lower, flat[(rank + 1) * size :], to_higher),
        ]

        def add() -> None:
            own = flat[rank * size : (rank + 1) * size]
            below = lower.split(size) if rank else ()
            above = higher.split(size) if num_higher else ()
            sum_in_order([*below, own, *above], out=shard, mean=mean)
            self._scratch.give(received)

        return works, add

    def _exchange(self, output: torch.Tensor, taken: list[int], source: torch.Tensor, sent: list[int]) -> Any:
        """Send and take runs of bytes, by rank."""
        data = (output.view(torch.uint8), source.view(torch.uint8))
        return dist.all_to_all_single(*data, taken, sent, group=self.group, async_op=True)

    def all_to_all(self, output: torch.Tensor, source: torch.Tensor) -> Posted:
        """Slice ``i`` of ``source`` goes to rank ``i``."""
        work = dist.all_to_all_single(
            output.view(torch.uint8), source.view(torch.uint8), group=self.group, async_op=True
        )
        return [work], None

    def all_reduce(self, flat: torch.Tensor, *, mean: bool) -> Posted:
        """Sum small tensors; one round of latency, sums in gloo's order."""
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        return [work], (lambda: _scale(flat, self.world_size)) if mean else None


class DeviceWire(GlooWire):
    """The same moves by the device's own library (NCCL), which has in-place, true collectives.

    Waiting only orders the stream and returns at once; whether works complete is watched from a thread.
    """

    waits_on_host = False

    def abort(self) -> None:
        """End the group's works, so that a stuck stream goes on and the next call can raise the reason."""
        abort = getattr(self.group, "abort", None)
        if abort is not None:
            abort()

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor) -> Posted:
        """Fill every slice of ``flat`` from its owner."""
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return [gather(flat, shard, group=self.group, async_op=True)], None

    def reduce_scatter(self, shard: torch.Tensor, flat: torch.Tensor, *, mean: bool) -> Posted:
        """Sum everybody's slice of this rank into ``shard``; exchanged and summed here when it is wider."""
        if shard.dtype is not flat.dtype:
            return super().reduce_scatter(shard, flat, mean=mean)
        reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
        return [reduce(shard, flat, op=op, group=self.group, async_op=True)], None


def sum_in_order(pieces: Sequence[torch.Tensor], *, out: torch.Tensor, mean: bool) -> None:
    """``out`` = the sum of ``pieces`` from first to last in ``out``'s dtype, or their mean.

    Pieces of ``out``'s dtype are used up; ``out`` may be one of them.
    """
    total, *rest = pieces
    if not rest or out.dtype is not total.dtype:
        out.copy_(total)
        for piece in rest:
            out.add_(piece)
    else:
        for piece in rest[:-1]:
            total = torch.add(total, piece, out=piece)
        torch.add(total, rest[-1], out=out)
    if mean:
        _scale(out, len(pieces))


def _scale(tensor: torch.Tensor, count: int) -> None:
    tensor.mul_(1.0 / count)
