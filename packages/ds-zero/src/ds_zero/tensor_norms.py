"""Sums over ranks of per-tensor figures, for optimizers that step slices but need norms of whole tensors."""

from collections.abc import Sequence

import torch

from ds_comm import Communicator
from ds_zero.gradients import FlatGradients
from ds_zero.pieces import Owned


class TensorSums:
    """Adds up figures of the parts of every trainable parameter that ranks hold.

    Args:
        pieces: of this rank.
        gradients: of all flats, the same on every rank.
        comm: of the ranks.
    """

    def __init__(
        self, pieces: Sequence[Owned], gradients: Sequence[FlatGradients], comm: Communicator
    ) -> None:
        names = [slot.name for gradient in gradients for slot in gradient.flat.layout.slots]
        position = {name: index for index, name in enumerate(names)}
        self._num_rows = len(names)
        self._rows = {id(piece.parameter): position[piece.name] for piece in pieces}
        self._comm = comm

    def __call__(self, parameters: Sequence[torch.Tensor], figures: torch.Tensor) -> torch.Tensor:
        """The sums over ranks of ``figures``, (K, C) in fp64, one row for each of ``parameters``.

        Collective: every rank, whichever parameters it has parts of.
        """
        rows = [self._rows[id(parameter)] for parameter in parameters]
        table = torch.zeros(self._num_rows, figures.shape[1], dtype=torch.float64)
        table[rows] = figures
        everyone = self._comm.exchange(table.view(-1), tag="norms of tensors")
        return everyone.view(-1, *table.shape).sum(dim=0)[rows]
