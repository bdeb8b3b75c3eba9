"""Where the kept input of a recomputed block waits for backward: as it is, on the CPU, or over ranks."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ds_comm import Communicator
from ds_zero.errors import InternalError


class Stowed:
    """One tensor between forward and the recomputation.

    ``get`` gives the tensor itself until :meth:`stow`, and an equal one afterwards.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._kept: torch.Tensor | None = None
        self._shape = tensor.shape
        self._device = tensor.device
        self._requires_grad = tensor.requires_grad

    def stow(self) -> None:
        """Let the tensor go and keep what it can be made from."""
        if self._tensor is not None:
            self._kept = self._keep(self._tensor.detach())
            self._tensor = None

    def prefetch(self) -> None:
        """Start to bring the tensor back; a no-op where nothing is gained."""

    def get(self) -> torch.Tensor:
        """The tensor, on its device."""
        if self._tensor is not None:
            return self._tensor
        if self._kept is None:
            raise InternalError("a stowed tensor has neither itself nor what it is made from")
        return self._bring(self._kept).detach().requires_grad_(self._requires_grad)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def _bring(self, kept: torch.Tensor) -> torch.Tensor:
        return kept


class OnCpu(Stowed):
    """Kept in CPU memory, pinned beside an accelerator; comes back while the next block runs backward."""

    _coming: torch.Tensor | None = None

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        pin = tensor.device.type != "cpu"
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
        return kept.copy_(tensor, non_blocking=pin)

    def prefetch(self) -> None:
        """Start the copy to the device."""
        if self._coming is None and self._kept is not None:
            self._coming = self._kept.to(self._device, non_blocking=True)

    def _bring(self, kept: torch.Tensor) -> torch.Tensor:
        self.prefetch()
        coming, self._coming = self._coming, None
        return coming if coming is not None else kept.to(self._device)


class Partitioned(Stowed):
    """Each rank of a group keeps its part; all parts are gathered for the recomputation.

    For a tensor that is the same on all ranks of the group, such as a block's input under tensor parallelism.

    Collective: ``get`` after ``stow``, on every rank in the same order.

    Source: Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198, section 4.
    """

    def __init__(self, tensor: torch.Tensor, comm: Communicator) -> None:
        super().__init__(tensor)
        self._comm = comm
        self._dtype = tensor.dtype

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        size = self._comm.world_size
        part_numel = -(-tensor.numel() // size)
        part = tensor.new_zeros(part_numel)
        mine = tensor.reshape(-1)[self._comm.rank * part_numel :][:part_numel]
        part[: mine.numel()].copy_(mine)
        return part

    def _bring(self, kept: torch.Tensor) -> torch.Tensor:
        whole = self._comm.allocate(kept.numel() * self._comm.world_size, self._dtype)
        self._comm.all_gather(whole, kept, tag="kept activations")
        return whole[: self._shape.numel()].view(self._shape)


Stow = Callable[[torch.Tensor], Stowed]


class Queue:
    """The stowed tensors of one forward in order, so that backward can look one ahead."""

    def __init__(self) -> None:
        self._before: weakref.WeakKeyDictionary[Stowed, weakref.ref[Stowed]] = weakref.WeakKeyDictionary()
        self._last: weakref.ref[Stowed] | None = None

    def add(self, stowed: Stowed) -> None:
        """Note that ``stowed`` came after the others."""
        if self._last is not None:
            self._before[stowed] = self._last
        self._last = weakref.ref(stowed)

    def look_ahead(self, stowed: Stowed) -> None:
        """Prefetch what backward wants after ``stowed``: what came before it."""
        reference = self._before.get(stowed)
        before = reference() if reference is not None else None
        if before is not None:
            before.prefetch()


def stow_arguments(value: Any, stow: Stow, kept: list[Stowed]) -> Any:
    """``value`` with tensors that need a gradient replaced by stowed ones, which are appended to ``kept``."""
    if isinstance(value, torch.Tensor) and value.requires_grad:
        stowed = stow(value)
        kept.append(stowed)
        return stowed
    if type(value) in (list, tuple):
        return type(value)(stow_arguments(item, stow, kept) for item in value)
    if type(value) is dict:
        return {key: stow_arguments(item, stow, kept) for key, item in value.items()}
    return value


def bring_arguments(value: Any) -> Any:
    """The counterpart of :func:`stow_arguments`."""
    if isinstance(value, Stowed):
        return value.get()
    if type(value) in (list, tuple):
        return type(value)(bring_arguments(item) for item in value)
    if type(value) is dict:
        return {key: bring_arguments(item) for key, item in value.items()}
    return value
