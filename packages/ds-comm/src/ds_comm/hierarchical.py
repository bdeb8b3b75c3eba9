"""Reductions and gathers over two levels: ranks that are near each other first, so that less goes far.

Everything is built from the collectives of two communicators, so calls and bytes are recorded under the name
of the level they took.
"""

from collections.abc import Sequence

import torch

from ds_comm.communicator import Communicator, Handle, check_slices
from ds_comm.wire import Scratch


class Hierarchy:
    """An inner group (ranks of a node) and an outer one (the same place in every node).

    With I inner and O outer ranks, rank r = outer rank * I + inner rank of N = O * I, and **slice r of N of
    a flat belongs to rank r**: the same layout as one group of N ranks whose neighbours share a node has, so
    the two can be exchanged for each other. Sums are taken over the inner ranks in order, then over the
    outer ones; for a slice one rank does it, so every rank that receives it has the same bits.

    A rank of a flat of F bytes sends, against ``F * (N - 1) / N`` mostly far in one group:

    ==================== ========================= ============================
    call                 near                      far
    ==================== ========================= ============================
    reduce_scatter       F * (I - 1) / I           F / I * (O - 1) / O
    all_gather           F * (I - 1) / I           F / I * (O - 1) / O
    all_reduce           2 * F * (I - 1) / I       2 * F / I * (O - 1) / O
    reduce_to_inner      F * (I - 1) / I           2 * F / I * (O - 1) / O
    ==================== ========================= ============================

    The second level is posted by ``wait``, so all ranks wait for their handles in the same order.

    Args:
        inner: the near ranks.
        outer: the far ones.

    Raises:
        ValueError: the two are not this rank's.

    Source: ZeRO++, arXiv:2306.10209, section 3.3; MiCS, arXiv:2205.00119, section 3.
    """

    def __init__(self, inner: Communicator, outer: Communicator) -> None:
        if inner.ranks[inner.rank] != outer.ranks[outer.rank]:
            raise ValueError(
                f"a hierarchy needs two groups of one rank, got global ranks {inner.ranks[inner.rank]} and "
                f"{outer.ranks[outer.rank]}; Mesh.split gives two that belong together"
            )
        self.inner = inner
        self.outer = outer
        self.rank = outer.rank * inner.world_size + inner.rank
        self.world_size = outer.world_size * inner.world_size
        self.device = inner.device
        self._scratch = Scratch(inner.device)

    def reduce_scatter_async(
        self, shard: torch.Tensor, flat: torch.Tensor, *, mean: bool = False, tag: str
    ) -> Handle:
        """Sum every rank's ``flat`` and give rank r slice r.

        O reductions run within the inner group, one per node's run of slices, straight from ``flat``; their
        results lie together for one reduction across. Nothing is copied to reorder.

        Args:
            shard: S elements; may be the own slice of ``flat``, may be of a wider dtype, in which sums are
                taken and sums travel far.
            flat: N * S elements; contents are unspecified afterwards.
            mean: divide by N.
            tag: what for, in error messages and profiles.

        Raises:
            ValueError: sizes that do not fit.
        """
        check_slices(flat, shard, self.world_size, "reduce_scatter")
        single = self._single_level
        if single is not None:
            return single.reduce_scatter_async(shard, flat, mean=mean, tag=tag)
        taken, sums = self._take_column(shard)
        pairs = zip(sums.unbind(), self._runs(flat), strict=True)
        near = [self.inner.reduce_scatter_async(part, run, tag=tag) for part, run in pairs]

        def finish() -> None:
            _wait_all(near)
            self.outer.reduce_scatter(shard, sums.view(-1), tag=tag)
            self._scratch.give(taken)
            self._divide(shard, mean)

        return Handle(finish)

    def all_gather_async(self, flat: torch.Tensor, shard: torch.Tensor, *, tag: str) -> Handle:
        """Fill slice r of ``flat`` with rank r's ``shard``, maybe its own slice of it.

        One gather across brings the slices of this place in every node, each once per node; O gathers
        within spread them straight into ``flat``.

        Raises:
            ValueError: sizes that do not fit.
        """
        check_slices(flat, shard, self.world_size, "all_gather")
        single = self._single_level
        if single is not None:
            return single.all_gather_async(flat, shard, tag=tag)
        taken, column = self._take_column(shard)
        far = self.outer.all_gather_async(column.view(-1), shard, tag=tag)

        def finish() -> None:
            far.wait()
            pairs = zip(self._runs(flat), column.unbind(), strict=True)
            _wait_all([self.inner.all_gather_async(run, part, tag=tag) for run, part in pairs])
            self._scratch.give(taken)

        return Handle(finish)

    def all_reduce_async(self, flat: torch.Tensor, *, mean: bool = False, tag: str) -> Handle:
        """Sum ``flat`` (any length) over all ranks, in place.

        Where I does not divide, the last elements, fewer than I, go through one all-reduce per level.
        """
        single = self._single_level
        if single is not None:
            return single.all_reduce_async(flat, mean=mean, tag=tag)
        size = flat.numel() // self.inner.world_size
        even, rest = flat[: size * self.inner.world_size], flat[size * self.inner.world_size :]
        own = even[size * self.inner.rank :][:size]
        near = [self.inner.reduce_scatter_async(own, even, tag=tag)]
        if rest.numel():
            near.append(self.inner.all_reduce_async(rest, tag=tag))

        def finish() -> None:
            _wait_all(near)
            far = [self.outer.all_reduce_async(part, tag=tag) for part in (own, rest) if part.numel()]
            _wait_all(far)
            self._divide(own, mean)
            self._divide(rest, mean)
            self.inner.all_gather(even, own, tag=tag)

        return Handle(finish)

    def reduce_to_inner_async(
        self, shard: torch.Tensor, flat: torch.Tensor, *, mean: bool = False, tag: str
    ) -> Handle:
        """Sum every rank's ``flat`` (I * S) and give inner rank i slice i: nodes hold copies, bit for bit.

        Args:
            shard: as of :meth:`reduce_scatter_async`.
            flat: I * S elements; contents are unspecified afterwards.
            mean: divide by N.
            tag: what for, in error messages and profiles.

        Raises:
            ValueError: sizes that do not fit.
        """
        check_slices(flat, shard, self.inner.world_size, "reduce_to_inner")
        near = self.inner.reduce_scatter_async(shard, flat, tag=tag)

        def finish() -> None:
            near.wait()
            self.outer.all_reduce(shard, tag=tag)
            self._divide(shard, mean)

        return Handle(finish)

    @property
    def _single_level(self) -> Communicator | None:
        """The only group there is when the other level has one rank."""
        if self.outer.world_size == 1:
            return self.inner
        return self.outer if self.inner.world_size == 1 else None

    def _runs(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The slices of every node, which lie together."""
        return flat.view(self.outer.world_size, flat.numel() // self.outer.world_size).unbind()

    def _take_column(self, shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scratch to give back, and in it a row like ``shard`` for this place in every node."""
        shape = (self.outer.world_size, shard.numel())
        taken = self._scratch.take(shape[0] * shape[1], shard.dtype)
        return taken, taken[: shape[0] * shape[1]].view(shape)

    def _divide(self, tensor: torch.Tensor, mean: bool) -> None:
        if mean:
            tensor.mul_(1.0 / self.world_size)

    def reduce_scatter(
        self, shard: torch.Tensor, flat: torch.Tensor, *, mean: bool = False, tag: str
    ) -> None:
        """:meth:`reduce_scatter_async`, waited for."""
        self.reduce_scatter_async(shard, flat, mean=mean, tag=tag).wait()

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, *, tag: str) -> None:
        """:meth:`all_gather_async`, waited for."""
        self.all_gather_async(flat, shard, tag=tag).wait()

    def all_reduce(self, flat: torch.Tensor, *, mean: bool = False, tag: str) -> None:
        """:meth:`all_reduce_async`, waited for."""
        self.all_reduce_async(flat, mean=mean, tag=tag).wait()

    def reduce_to_inner(
        self, shard: torch.Tensor, flat: torch.Tensor, *, mean: bool = False, tag: str
    ) -> None:
        """:meth:`reduce_to_inner_async`, waited for."""
        self.reduce_to_inner_async(shard, flat, mean=mean, tag=tag).wait()


def _wait_all(handles: Sequence[Handle]) -> None:
    for handle in handles:
        handle.wait()
