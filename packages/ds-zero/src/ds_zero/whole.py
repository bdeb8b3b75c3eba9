"""Optimizers that need whole tensors, such as Muon: every rank updates some parameters whole, for all."""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn

from ds_comm import Communicator
from ds_zero.buffers import BufferPool
from ds_zero.dealing import Deal, Part, plan_deal
from ds_zero.errors import InternalError
from ds_zero.gradients import FlatGradients
from ds_zero.layout import Slot


class WholePiece:
    """One whole parameter that this rank updates, as a parameter of the user's optimizer.

    Attributes:
        name: of the model's parameter.
        gradient: of the flat that holds it.
        slot: where it lies in the flat.
        parameter: of the parameter's own shape during the step, empty in between.
    """

    def __init__(self, name: str, gradient: FlatGradients, slot: Slot) -> None:
        self.name = name
        self.gradient = gradient
        self.slot = slot
        self.parameter = nn.Parameter(
            torch.empty(slot.shape, dtype=torch.float32, device=gradient.flat.comm.device)
        )
        self.release()

    def open(self) -> None:
        """Have memory for the whole parameter and its gradient."""
        self.parameter.data = self.parameter.data.new_empty(self.slot.shape)
        self.parameter.grad = torch.empty_like(self.parameter)

    def release(self) -> None:
        """Give the memory back."""
        self.parameter.grad = None
        self.parameter.data = self.parameter.data.new_empty((0,) * max(1, len(self.slot.shape)))


class WholeParameters:
    """Brings master weights and gradients of dealt parameters together, and takes the new weights back.

    At stage 0 every rank has all of them already, and updates all.

    Args:
        gradients: of all flats.
        names: of the dealt parameters.
        comm: of the ranks.
        pool: gives the exchange buffers.
        everywhere: every rank updates every parameter (stage 0).
    """

    def __init__(
        self,
        gradients: Sequence[FlatGradients],
        names: Collection[str],
        *,
        comm: Communicator,
        pool: BufferPool,
        everywhere: bool,
    ) -> None:
        self._comm = comm
        self._pool = pool
        self._everywhere = everywhere
        self._gradients = [g for g in gradients if any(slot.name in names for slot in g.flat.layout.slots)]
        layouts = [gradient.flat.layout for gradient in self._gradients]
        self._deal: Deal = plan_deal(layouts, list(names), world_size=comm.world_size)
        self.pieces = {
            slot.name: WholePiece(slot.name, gradient, slot)
            for gradient in self._gradients
            for slot in gradient.flat.layout.slots
            if slot.name in names and (everywhere or self._deal.updaters[slot.name] == comm.rank)
        }

    @property
    def names(self) -> Collection[str]:
        """Names of all dealt parameters."""
        return self._deal.updaters.keys()

    def collect(self, sources: Mapping[int, torch.Tensor], untouched: Collection[int]) -> list[WholePiece]:
        """Fill whole weights and gradients; the pieces to step.

        Collective: every rank.

        Args:
            sources: reduced gradient of the stepped range, by ``id`` of its :class:`FlatGradients`.
            untouched: ``id``s of parameters that no rank got a gradient for.
        """
        if not self._deal.updaters:
            return []
        for piece in self.pieces.values():
            piece.open()
        self._gather(lambda gradient: sources[id(gradient)], lambda piece: piece.parameter.grad)
        self._gather(_master_of, lambda piece: piece.parameter.data)
        touched = {
            slot.name
            for gradient in self._gradients
            for slot, parameter in zip(gradient.flat.layout.slots, gradient.flat.parameters, strict=True)
            if slot.name in self._deal.updaters and id(parameter) not in untouched
        }
        return [piece for name, piece in self.pieces.items() if name in touched]

    def deliver(self) -> None:
        """Take the new weights back to the slices.

        Collective: every rank.
        """
        if not self._deal.updaters:
            return
        if self._everywhere:
            for piece in self.pieces.values():
                part = self._part(piece.gradient, piece.slot.start_numel, piece.slot.numel)
                part.copy_(piece.parameter.data.view(-1))
        else:
            self._scatter()
        for piece in self.pieces.values():
            piece.release()

    def _part(self, gradient: FlatGradients, start_numel: int, numel: int) -> torch.Tensor:
        first = gradient.flat.stepped_range[0]
        return gradient.flat.view(_master_of(gradient), start_numel - first, numel)

    def _gather(
        self,
        source_of: Callable[[FlatGradients], torch.Tensor],
        target_of: Callable[[WholePiece], torch.Tensor | None],
    ) -> None:
        if self._everywhere:
            for piece in self.pieces.values():
                whole = piece.gradient.flat.view(
                    source_of(piece.gradient), piece.slot.start_numel, piece.slot.numel
                )
                _target(target_of, piece).copy_(whole)
            return
        sent, received = self._buffers()
        for part in self._parts(holder=self._comm.rank):
            gradient = self._gradients[part.flat_index]
            offset = part.start_numel - gradient.flat.shard_range[0]
            self._slot(sent, part.updater, part).copy_(source_of(gradient)[offset : offset + part.numel])
        self._comm.all_to_all(received, sent, tag="whole parameters")
        for part in self._parts(updater=self._comm.rank):
            target = _target(target_of, self.pieces[part.name])
            target[part.offset_numel : part.offset_numel + part.numel].copy_(
                self._slot(received, part.holder, part)
            )
        self._give(sent, received)

    def _scatter(self) -> None:
        sent, received = self._buffers()
        for part in self._parts(updater=self._comm.rank):
            whole = self.pieces[part.name].parameter.data.view(-1)
            piece = whole[part.offset_numel : part.offset_numel + part.numel]
            self._slot(sent, part.holder, part).copy_(piece)
        self._comm.all_to_all(received, sent, tag="updated whole parameters")
        for part in self._parts(holder=self._comm.rank):
            self._part(self._gradients[part.flat_index], part.start_numel, part.numel).copy_(
                self._slot(received, part.updater, part)
            )
        self._give(sent, received)

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        numel = self._deal.width_numel * self._comm.world_size
        return self._pool.take(numel, torch.float32), self._pool.take(numel, torch.float32)

    def _give(self, *buffers: torch.Tensor) -> None:
        for buffer in buffers:
            self._pool.give(buffer)

    def _slot(self, buffer: torch.Tensor, rank: int, part: Part) -> torch.Tensor:
        start = rank * self._deal.width_numel + part.position_numel
        return buffer[start : start + part.numel]

    def _parts(self, *, holder: int | None = None, updater: int | None = None) -> list[Part]:
        return [part for part in self._deal.parts if holder == part.holder or updater == part.updater]


def _master_of(gradient: FlatGradients) -> torch.Tensor:
    if gradient.flat.master is None:
        raise InternalError(f"{gradient.flat.label}: dealt parameters need master weights on the device")
    return gradient.flat.master


def _target(target_of: Callable[[WholePiece], torch.Tensor | None], piece: WholePiece) -> torch.Tensor:
    target = target_of(piece)
    if target is None:
        raise InternalError(f"{piece.name} is not open")
    return target.view(-1)
