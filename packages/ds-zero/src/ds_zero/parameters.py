"""One flat buffer of parameters: whole at stages 0 to 2, a slice that can be gathered at stage 3."""

import enum
from collections.abc import Sequence

import torch
from torch import nn

from ds_comm import Handle
from ds_zero.buffers import Ledger
from ds_zero.config import ZeroOptions
from ds_zero.errors import InternalError
from ds_zero.layout import FlatLayout, Piece
from ds_zero.moves import Moves
from ds_zero.states import MASTER, FlatStates, Place

# P = elements of one parameter, F = flat buffer (padded), S = F // world_size


class ParameterState(enum.Enum):
    """What memory a flat holds for its parameters."""

    WHOLE = "whole"  # F elements, for good; the owned slice is a view of it
    SHARDED = "sharded"  # S elements; every parameter is empty
    GATHERING = "gathering"  # S + F elements, an all-gather is in flight
    GATHERED = "gathered"  # S + F elements, parameters are views of the F


class FlatParameters:
    """Parameters of one unit that lie one after the other in one buffer.

    Attributes:
        layout: where each parameter lies.
        parameters: the model's own objects, in slot order.
        dtype: of the parameters.
        full: F elements in ``dtype``; storage of zero bytes while sharded.
        shard: S elements, this rank's slice; a view of ``full`` when whole.
        master: fp32 elements this rank steps: all F at stage 0, else S. The same memory as the parameters
            in fp32, a separate copy under mixed precision, ``None`` when frozen or kept in ``states``.
        place: where the slice is kept between uses, if not on the device; ``shard`` is then empty.
        states: master weights and moments that are kept elsewhere, if they are; set before :meth:`adopt`.
    """

    def __init__(
        self,
        label: str,
        layout: FlatLayout,
        parameters: Sequence[nn.Parameter],
        *,
        moves: Moves,
        dtype: torch.dtype,
        options: ZeroOptions,
        trainable: bool,
        ledger: Ledger,
    ) -> None:  # each names one thing that a flat is made of
        self.label = label
        self.layout = layout
        self.parameters = tuple(parameters)
        self.trainable = trainable
        self.moves = moves
        self.comm = moves.comm
        self.stage = options.stage
        self.dtype = dtype
        self.has_master = trainable and dtype is not torch.float32
        self.place: Place | None = None
        self.states: FlatStates | None = None
        self.state = ParameterState.WHOLE
        self.master: torch.Tensor | None = None
        self._ledger = ledger
        self._handle: Handle | None = None
        self._secondary: torch.Tensor | None = None  # F / node elements, valid until the next write
        self._secondary_buffer: torch.Tensor | None = None
        self._empty = torch.empty(0, dtype=self.dtype, device=moves.comm.device)

    @property
    def full_bytes(self) -> int:
        """Bytes of the gathered buffer."""
        return self.layout.padded_numel * self.dtype.itemsize

    @property
    def keeps_master_elsewhere(self) -> bool:
        """Whether the master weights lie in ``states``."""
        return self.states is not None and self.states.has_master

    @property
    def shard_range(self) -> tuple[int, int]:
        """This rank's slice in the flat buffer."""
        return self.layout.shard_range(self.comm.rank)

    @property
    def stepped_range(self) -> tuple[int, int]:
        """The elements this rank's optimizer steps: everything at stage 0, else the slice."""
        return (0, self.layout.padded_numel) if self.stage == 0 else self.shard_range

    def adopt(self, sources: Sequence[torch.Tensor]) -> None:
        """Copy the parameters' values in, as rank 0 has them, and point the parameters at the buffer.

        Collective: every rank, flats in the same order.
        """
        values = self.comm.allocate(self.layout.padded_numel, torch.float32)
        with torch.no_grad():
            for slot, source in zip(self.layout.slots, sources, strict=True):
                values[slot.start_numel : slot.stop_numel].copy_(source.reshape(-1))
            self.moves.spread(values, src=0, tag=f"{self.label} initial values")
            self._place(values)
        self._point_parameters()
        if self.stage == 3:
            self.state = ParameterState.GATHERED
            self._ledger.add("gathered", self.full_bytes)
            self.release()

    def _place(self, values: torch.Tensor) -> None:
        if self.dtype is torch.float32:
            self.full = values
        else:
            self.full = self.comm.allocate(self.layout.padded_numel, self.dtype)
            self.full.copy_(values)
        first, last = self.shard_range
        if self.place is not None:
            self.shard = self._empty
            self.has_master = self.trainable
            self._write_shard(self.full[first:last])
        elif self.stage == 3:
            self.shard = self.comm.allocate(self.layout.shard_numel, self.dtype)
            self.shard.copy_(self.full[first:last])
        else:
            self.shard = self.full[first:last]
        self._ledger.add("parameters", self.shard.nbytes if self.stage == 3 else self.full_bytes)
        if not self.trainable:
            return
        start, stop = self.stepped_range
        if self.states is not None:
            self.states.create(values[start:stop])
        if self.keeps_master_elsewhere:
            self.master = None
        elif self.has_master:
            self.master = values[start:stop].clone()
            self._ledger.add("optimizer", self.master.nbytes)
        else:
            self.master = self.full if self.stage == 0 else self.shard

    def _point_parameters(self) -> None:
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            parameter.data = self.view(self.full, slot.start_numel, slot.numel).view(slot.shape)

    @staticmethod
    def view(buffer: torch.Tensor, start_numel: int, numel: int) -> torch.Tensor:
        """A flat view of ``numel`` elements."""
        return buffer.detach()[start_numel : start_numel + numel]

    def holds(self, name: str) -> bool:
        """Whether the parameter of this name lies here."""
        return any(slot.name == name for slot in self.layout.slots)

    def stepped_pieces(self) -> list[Piece]:
        """The parts of parameters that this rank's optimizer steps."""
        return list(self.layout.pieces(*self.stepped_range))

    # Gathering, stage 3. The same storage shrinks to zero bytes and grows again, so views that autograd
    # saved in forward are right again in backward.

    def start_gather(self) -> None:
        """Post the all-gather; a no-op unless sharded."""
        if self.state is not ParameterState.SHARDED:
            return
        self.full.untyped_storage().resize_(self.full_bytes)
        self._ledger.add("gathered", self.full_bytes)
        tag = f"{self.label} parameters"
        if self._secondary is not None and self.moves.node is not None:
            self._handle = self.moves.node.all_gather_async(self.full, self._secondary, tag=tag)
        else:
            shard = self.shard if self.place is None else self._read_shard(self.place)
            self._handle = self.moves.gather_async(self.full, shard, tag=tag)
        self.state = ParameterState.GATHERING

    def fetch(self) -> None:
        """Start to bring the slice from where it is kept, to be gathered soon; a no-op on the device."""
        if self.place is not None and self.state is ParameterState.SHARDED:
            self.place.fetch()

    def _read_shard(self, place: Place) -> torch.Tensor:
        """Bring the slice to its own part of the gathered buffer, from where the all-gather takes it."""
        first, last = self.shard_range
        own = self.full[first:last]
        own.copy_(place.wait().view(self.dtype))
        place.drop()
        return own

    def _write_shard(self, values: torch.Tensor) -> None:
        self._secondary = None
        if self.place is None:
            self.stepped.copy_(values)
        else:
            self.place.blank().view(self.dtype).copy_(values)
            self.place.store()

    def finish_gather(self) -> None:
        """Wait for the all-gather and point the parameters at the buffer; a no-op when they are there."""
        if self.state is ParameterState.SHARDED:
            raise InternalError(f"{self.label}: finish_gather without start_gather")
        if self.state is not ParameterState.GATHERING or self._handle is None:
            return
        self._handle.wait()
        self._handle = None
        self._point_parameters()
        self._keep_secondary()
        self.state = ParameterState.GATHERED

    def _keep_secondary(self) -> None:
        """Keep this rank's part of the node's copy until the parameters change."""
        node = self.moves.node
        if node is None or self._secondary is not None:
            return
        part = self.full.chunk(node.world_size)[node.rank]
        if self._secondary_buffer is None:
            self._secondary_buffer = node.allocate(part.numel(), self.dtype)
            self._ledger.add("gathered", part.nbytes)
        self._secondary = self._secondary_buffer.copy_(part)

    def release(self) -> None:
        """Give the gathered memory back; a no-op when whole or sharded."""
        if self.state is ParameterState.SHARDED and self.place is not None:
            self.place.drop()
        if self.state in (ParameterState.WHOLE, ParameterState.SHARDED):
            return
        self.finish_gather()
        for parameter in self.parameters:
            parameter.data = self._empty
        self.full.untyped_storage().resize_(0)
        self._ledger.add("gathered", -self.full_bytes)
        self.state = ParameterState.SHARDED

    @property
    def stepped(self) -> torch.Tensor:
        """The parameters' elements that this rank steps, in ``dtype``."""
        return self.full if self.stage == 0 else self.shard

    def publish_from(self, master: torch.Tensor) -> None:
        """Take stepped master weights (as many as this rank steps) that are kept elsewhere."""
        self._write_shard(master)

    def publish(self) -> None:
        """Make the stepped master weights everyone's parameters.

        Collective: every rank, flats in the same order; no communication at stages 0 and 3.
        """
        if not self.trainable:
            return
        self._secondary = None
        if self.has_master and self.master is not None:
            self._write_shard(self.master)
        if self.stage in (1, 2):
            self.comm.all_gather(self.full, self.shard, tag=f"{self.label} parameters")

    def commit(self) -> None:
        """Take over edits that were made in the whole parameters of this rank.

        Master weights change only where the parameter really changed, so a look keeps their fp32 digits.
        """
        first, last = self.shard_range
        if self.stage == 3:
            self._write_shard(self.full[first:last])
        start, stop = self.stepped_range
        edited = self.full[start:stop]
        if self.states is not None and self.states.has_master:
            master = self.states.open()[MASTER]
            if self._take_over(master, edited):
                self.states.close()
            else:
                self.states.drop()
        elif self.has_master and self.master is not None:
            self._take_over(self.master, edited)

    def _take_over(self, master: torch.Tensor, edited: torch.Tensor) -> bool:
        edited = edited.to(master.device)
        changed = edited != master.to(self.dtype)
        master.copy_(torch.where(changed, edited.float(), master))
        return bool(changed.any())

    def restore(self) -> None:
        """Make the parameters plain tensors of their own again, whole on this rank."""
        self.start_gather()
        self.finish_gather() if self.state is not ParameterState.WHOLE else None
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()
