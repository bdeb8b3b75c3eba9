"""The loader that initialize() makes of training_data: micro-batches, split over ranks, shuffled."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler


class ShardedLoader(DataLoader[Any]):
    """A DataLoader whose ranks see different samples, all of them the same number.

    The order is another one in every epoch and the same on all ranks, seeded by the number of the epoch. When
    the samples do not divide, some come twice; with ``drop_last`` some are left out. An ``IterableDataset``
    is read as it is: it splits itself.
    """

    def __init__(
        self,
        data: Dataset[Any],
        *,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        drop_last: bool = False,
        collate_fn: Callable[..., Any] | None = None,
    ) -> None:
        self._order: DistributedSampler[Any] | None = None
        self._epoch = 0
        if not isinstance(data, IterableDataset):
            self._order = DistributedSampler(data, num_replicas=world_size, rank=rank, drop_last=drop_last)
        super().__init__(
            data, batch_size=micro_batch_size, sampler=self._order, drop_last=drop_last, collate_fn=collate_fn
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Start the next epoch."""
        if self._order is not None:
            self._order.set_epoch(self._epoch)
        self._epoch += 1
        return super().__iter__()
