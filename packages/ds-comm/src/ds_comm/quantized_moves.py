"""Gathers and reductions whose bytes travel as block codes, over one group or an inner and an outer one."""

import torch

from ds_comm.blocks import BlockCodec
from ds_comm.communicator import Communicator, Handle, check_slices
from ds_comm.wire import Scratch


class QuantizedMoves:
    """Collectives of one group that send codes; buffers are kept and reused.

    Args:
        comm: the ranks; or those of one node, with ``outer``.
        codec: how values become codes.
        outer: the same rank of every node. Slices then belong to ranks counted node by node.
    """

    def __init__(self, comm: Communicator, codec: BlockCodec, *, outer: Communicator | None = None) -> None:
        self.codec = codec
        self._comm = comm
        self._outer = outer
        self._scratch = Scratch(comm.device)

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return self._comm.world_size * (self._outer.world_size if self._outer is not None else 1)

    def all_gather_async(self, flat: torch.Tensor, shard: torch.Tensor, *, tag: str) -> Handle:
        """Fill ``flat`` with every rank's ``shard`` as its codes say, the own one too, so that ranks agree.

        Collective: every rank of the group; ``outer`` plays no part.

        Args:
            flat: world_size * S elements.
            shard: S elements, may be the own slice of ``flat``.
            tag: what for, in error messages and profiles.

        Source: ZeRO++, arXiv:2306.10209, section 3.1 (quantized weight communication).
        """
        comm = self._comm
        check_slices(flat, shard, comm.world_size, "all_gather")
        size = self.codec.payload_bytes(shard.numel())
        taken = self._scratch.take(size * comm.world_size, torch.uint8)
        payload = taken[: size * comm.world_size]
        own = payload.chunk(comm.world_size)[comm.rank]
        self.codec.encode(shard, own, scratch=self._scratch)
        handle = comm.all_gather_async(payload, own, tag=tag)

        def finish() -> None:
            handle.wait()
            for part, target in zip(payload.chunk(comm.world_size), flat.chunk(comm.world_size), strict=True):
                self.codec.decode(part, target, scratch=self._scratch)
            self._scratch.give(taken)

        return Handle(finish, handle.done)

    def reduce_scatter_async(
        self, shard: torch.Tensor, flat: torch.Tensor, *, mean: bool = False, tag: str
    ) -> Handle:
        """Sum every rank's ``flat`` in fp32 from its codes, in rank order, and give each rank its slice.

        With ``outer`` in two hops: within the node every rank sums what goes to its place in all nodes, and
        only these sums travel between nodes, as codes again.

        Collective: every rank of the group, and of ``outer``; handles are waited for in the same order, as
        the second hop begins then.

        Args:
            shard: S elements, may be the own slice of ``flat``.
            flat: S elements for every rank of every node; contents stay.
            mean: divide by the number of ranks.
            tag: what for, in error messages and profiles.

        Source: ZeRO++, arXiv:2306.10209, section 3.3 (quantized gradient communication).
        """
        check_slices(flat, shard, self.world_size, "reduce_scatter")
        inner, num_nodes = self._comm.world_size, self.world_size // self._comm.world_size
        size = self.codec.payload_bytes(shard.numel())
        sent = self._take(size * self.world_size)
        received = self._take(size * self.world_size)
        slices = flat.chunk(self.world_size)
        # To rank i of this node go the slices of rank i of every node.
        for index, part in enumerate(sent[: size * self.world_size].chunk(self.world_size)):
            rank, node = divmod(index, num_nodes)
            self.codec.encode(slices[node * inner + rank], part, scratch=self._scratch)
        handle = self._comm.all_to_all_async(
            received[: size * self.world_size], sent[: size * self.world_size], tag=tag
        )

        def finish() -> None:
            handle.wait()
            self._scratch.give(sent)
            sums = self._scratch.take(shard.numel() * num_nodes, torch.float32)
            parts = received[: size * self.world_size].chunk(inner)
            self._add_up([part.chunk(num_nodes) for part in parts], sums[: shard.numel() * num_nodes])
            self._scratch.give(received)
            if self._outer is not None:
                self._second_hop(self._outer, sums, size, shard.numel(), tag)
            result = sums[: shard.numel()]
            shard.copy_(result.div_(self.world_size) if mean else result)
            self._scratch.give(sums)

        # With a second hop the result is not there before somebody waits for it.
        return Handle(finish, handle.done if self._outer is None else None)

    def _take(self, num_bytes: int) -> torch.Tensor:
        return self._scratch.take(num_bytes, torch.uint8)

    def _add_up(self, parts: list[tuple[torch.Tensor, ...]], sums: torch.Tensor) -> None:
        for source, slices in enumerate(parts):
            for part, target in zip(slices, sums.chunk(len(slices)), strict=True):
                self.codec.decode(part, target, add=source > 0, scratch=self._scratch)

    def _second_hop(
        self, outer: Communicator, sums: torch.Tensor, size: int, shard_numel: int, tag: str
    ) -> None:
        sent, received = self._take(size * outer.world_size), self._take(size * outer.world_size)
        whole = sums[: shard_numel * outer.world_size]
        for part, source in zip(
            sent[: size * outer.world_size].chunk(outer.world_size),
            whole.chunk(outer.world_size),
            strict=True,
        ):
            self.codec.encode(source, part, scratch=self._scratch)
        outer.all_to_all(received[: size * outer.world_size], sent[: size * outer.world_size], tag=tag)
        parts = received[: size * outer.world_size].chunk(outer.world_size)
        self._add_up([(part,) for part in parts], sums[:shard_numel])
        self._scratch.give(sent)
        self._scratch.give(received)
