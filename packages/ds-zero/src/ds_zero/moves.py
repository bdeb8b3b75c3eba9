"""How gathers and reductions of flats travel: plain or as codes, over all ranks or node by node."""

from collections.abc import Callable
from typing import Any

import torch

from ds_comm import BlockCodec, Communicator, Handle, Mesh, QuantizedMoves
from ds_zero.config import ZeroOptions


class Moves:
    """The groups of one engine and the collectives its flats use.

    Attributes:
        everyone: all data-parallel ranks.
        comm: the ranks that share one copy of the flats: all, or those of a node (``within_node``).
        replicas: the ranks that hold the same slice of other copies, ``None`` when there is one copy.
        node: the ranks of a node, for secondary copies of parameters, ``None`` when there are none.

    Collective: every rank, at construction and in every call.
    """

    def __init__(self, mesh: Mesh, options: ZeroOptions) -> None:
        self.everyone: Communicator = mesh.axis("dp")
        self.comm = self.everyone
        self.replicas: Communicator | None = None
        self.node: Communicator | None = None
        reach = options.reach
        outer: Communicator | None = None
        inner = self.everyone
        if reach.node_size is not None and 1 <= reach.node_size < self.everyone.world_size:
            inner, outer = mesh.split("dp", reach.node_size)
        if outer is not None and reach.within_node:
            self.comm, self.replicas = inner, outer
        elif outer is not None and reach.secondary:
            self.node = inner
        self._weights = self._quantized(reach.weight_bits, self.comm, None)
        hops = (inner, outer) if self.replicas is None else (self.comm, None)
        self._gradients = self._quantized(reach.gradient_bits, *hops)

    @staticmethod
    def _quantized(bits: int | None, comm: Communicator, outer: Communicator | None) -> QuantizedMoves | None:
        return QuantizedMoves(comm, BlockCodec(bits=bits), outer=outer) if bits is not None else None

    def spread(self, values: torch.Tensor, *, src: int, tag: str) -> None:
        """Copy rank ``src``'s values to all ranks of all copies."""
        if self.replicas is not None:
            self.replicas.broadcast(values, src=0, tag=tag)
        self.comm.broadcast(values, src=src, tag=tag)

    def gather_async(self, flat: torch.Tensor, shard: torch.Tensor, *, tag: str) -> Handle:
        """Fill a flat with the slices of all its ranks."""
        moves = self._weights if self._weights is not None and flat.is_floating_point() else self.comm
        return moves.all_gather_async(flat, shard, tag=tag)

    def reduce_async(self, shard: torch.Tensor, flat: torch.Tensor, *, tag: str) -> Handle:
        """Give each rank the mean of its slice over all ranks of all copies."""
        moves = self._gradients if self._gradients is not None else self.comm
        handle = moves.reduce_scatter_async(shard, flat, mean=True, tag=tag)
        if self.replicas is None:
            return handle
        return Handle(
            _then(handle.wait, self.replicas.all_reduce, shard, mean=True, tag=f"{tag} of all copies"),
            handle.done,
        )


def _then(
    first: Callable[[], None], second: Callable[..., None], *args: Any, **options: Any
) -> Callable[[], None]:
    def run() -> None:
        first()
        second(*args, **options)

    return run
