"""One flat buffer of parameters: whole at stages 0 to 2, a slice that can be gathered at stage 3."""

import enum
from collections.abc import Sequence

import torch
from torch import nn

from ds_comm import Communicator, Handle
from ds_zero.buffers import Ledger
from ds_zero.config import ZeroOptions
from ds_zero.errors import InternalError
from ds_zero.layout import FlatLayout, Piece

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
        full: F elements in the precision's dtype; storage of zero bytes while sharded.
        shard: S elements, this rank's slice; a view of ``full`` when whole.
        master: fp32 elements this rank steps: all F at stage 0, else S. The same memory as the parameters
            in fp32, a separate copy under mixed precision, ``None`` when frozen.
    """

    def __init__(
        self,
        label: str,
        layout: FlatLayout,
        parameters: Sequence[nn.Parameter],
        *,
        comm: Communicator,
        options: ZeroOptions,
        trainable: bool,
        ledger: Ledger,
    ) -> None:
        self.label = label
        self.layout = layout
        self.parameters = tuple(parameters)
        self.trainable = trainable
        self.comm = comm
        self.stage = options.stage
        self.dtype = options.precision.param_dtype
        self.has_master = trainable and options.precision.has_master
        self.state = ParameterState.WHOLE
        self.master: torch.Tensor | None = None
        self._ledger = ledger
        self._handle: Handle | None = None
        self._empty = torch.empty(0, dtype=self.dtype, device=comm.device)

    @property
    def full_bytes(self) -> int:
        """Bytes of the gathered buffer."""
        return self.layout.padded_numel * self.dtype.itemsize

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
            self.comm.broadcast(values, src=0, tag=f"{self.label} initial values")
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
        if self.stage == 3:
            self.shard = self.comm.allocate(self.layout.shard_numel, self.dtype)
            self.shard.copy_(self.full[first:last])
        else:
            self.shard = self.full[first:last]
        self._ledger.add("parameters", self.shard.nbytes if self.stage == 3 else self.full_bytes)
        if not self.trainable:
            return
        if self.has_master:
            start, stop = self.stepped_range
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
        self._handle = self.comm.all_gather_async(self.full, self.shard, tag=f"{self.label} parameters")
        self.state = ParameterState.GATHERING

    def finish_gather(self) -> None:
        """Wait for the all-gather and point the parameters at the buffer; a no-op when they are there."""
        if self.state is ParameterState.SHARDED:
            raise InternalError(f"{self.label}: finish_gather without start_gather")
        if self.state is not ParameterState.GATHERING or self._handle is None:
            return
        self._handle.wait()
        self._handle = None
        self._point_parameters()
        self.state = ParameterState.GATHERED

    def release(self) -> None:
        """Give the gathered memory back; a no-op when whole or sharded."""
        if self.state in (ParameterState.WHOLE, ParameterState.SHARDED):
            return
        self.finish_gather()
        for parameter in self.parameters:
            parameter.data = self._empty
        self.full.untyped_storage().resize_(0)
        self._ledger.add("gathered", -self.full_bytes)
        self.state = ParameterState.SHARDED

    def publish(self) -> None:
        """Make the stepped master weights everyone's parameters.

        Collective: every rank, flats in the same order; no communication at stages 0 and 3.
        """
        if self.master is None:
            return
        if self.has_master:
            (self.full if self.stage == 0 else self.shard).copy_(self.master)
        if self.stage in (1, 2):
            self.comm.all_gather(self.full, self.shard, tag=f"{self.label} parameters")

    def commit(self) -> None:
        """Take over edits that were made in the whole parameters of this rank.

        Master weights change only where the parameter really changed, so a look keeps their fp32 digits.
        """
        first, last = self.shard_range
        if self.stage == 3:
            self.shard.copy_(self.full[first:last])
        if self.has_master and self.master is not None:
            start, stop = self.stepped_range
            edited = self.full[start:stop]
            changed = edited != self.master.to(self.dtype)
            self.master.copy_(torch.where(changed, edited.float(), self.master))

    def restore(self) -> None:
        """Make the parameters plain tensors of their own again, whole on this rank."""
        self.start_gather()
        self.finish_gather() if self.state is not ParameterState.WHOLE else None
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()
