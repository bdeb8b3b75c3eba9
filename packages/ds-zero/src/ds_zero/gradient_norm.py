"""The global gradient norm, and which parameters no rank got a gradient for: one small exchange a step."""

from collections.abc import Sequence

import torch

from ds_zero.gradients import FlatGradients
from ds_zero.moves import Moves


class GradientNorm:
    """Measures the reduced gradient of all ranks.

    Attributes:
        norm: of the last :meth:`measure`, of the gradients as they are, scaled or not.
        untouched: ``id``s of parameters that no rank got a gradient for.
    """

    def __init__(self, gradients: Sequence[FlatGradients], moves: Moves) -> None:
        self.norm = 0.0
        self.untouched: set[int] = set()
        self._gradients = tuple(gradients)
        self._comm = moves.everyone
        # Copies of the slices in other nodes are the same gradient and count once.
        self._holders = slice(None)
        if moves.replicas is not None:
            first = moves.replicas.rank * moves.comm.world_size
            self._holders = slice(first, first + moves.comm.world_size)

    def measure(self) -> float:
        """Exchange sums of squares, and set ``norm`` and ``untouched``.

        Collective: every rank.
        """
        local = sum(gradient.sum_of_squares() for gradient in self._gradients if gradient.num_reduced)
        flags = [flag for gradient in self._gradients for flag in gradient.touched]
        row = torch.tensor([local, float(len(flags) - sum(flags))], dtype=torch.float64)
        rows = self._comm.exchange(row, tag="gradient norm")
        self._comm.agree(tag="step")
        # Rounded to fp32, because the order of the fp64 sums depends on the units.
        self.norm = float(rows[self._holders, 0].sum().sqrt().float())
        self.untouched = self._find_untouched(flags) if float(rows[:, 1].sum()) else set()
        return self.norm

    def _find_untouched(self, flags: Sequence[bool]) -> set[int]:
        row = torch.tensor([float(flag) for flag in flags], dtype=torch.float64)
        touched = self._comm.exchange(row, tag="touched parameters").amax(dim=0) > 0
        parameters = [parameter for gradient in self._gradients for parameter in gradient.flat.parameters]
        return {
            id(parameter) for parameter, flag in zip(parameters, touched.tolist(), strict=True) if not flag
        }

    def first_nonfinite(self) -> str:
        """Name of the first parameter on any rank whose gradient is not finite; empty if there is none.

        Collective: every rank.
        """
        names = self._comm.all_gather_object(self._first_here(), tag="non-finite")
        return next((name for name in names if name), "")

    def _first_here(self) -> str:
        for gradient in self._gradients:
            if not gradient.num_reduced:
                continue
            shard = gradient.read_shard()
            first, last = gradient.flat.shard_range
            for piece in gradient.flat.layout.pieces(first, last):
                part = gradient.flat.view(shard, piece.start_numel - first, piece.numel)
                if not bool(torch.isfinite(part).all()):
                    return gradient.flat.layout.slots[piece.slot_index].name
        return ""
