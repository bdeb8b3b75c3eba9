"""Reused buffers of the engine, and the ledger that knows how many bytes each component holds."""

import time

import torch

from ds_comm import Communicator
from ds_spec import MemoryEvent, events


class Ledger:
    """Bytes held on this rank by component, with the peak of their sum."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.held: dict[str, int] = {}
        self.peak_bytes = 0
        self.peak_by_component: dict[str, int] = {}

    def add(self, component: str, num_bytes: int) -> None:
        """Count ``num_bytes`` more (or fewer, when negative) for ``component``."""
        self.held[component] = self.held.get(component, 0) + num_bytes
        total = sum(self.held.values())
        if total > self.peak_bytes:
            self.peak_bytes = total
            self.peak_by_component = dict(self.held)
        if events.listening():
            event = MemoryEvent(
                component=component,
                bytes_held=self.held[component],
                time_s=time.perf_counter(),
                rank=self.rank,
            )
            events.emit(event)

    def reset_peak(self) -> None:
        """Start a new peak from what is held now."""
        self.peak_bytes = sum(self.held.values())
        self.peak_by_component = dict(self.held)


class BufferPool:
    """Buffers that units take in turn, by exact size; allocated once, reused, never shrunk.

    First touch of fresh memory costs more than using it, and a collective wants the same addresses again.
    """

    def __init__(self, comm: Communicator, ledger: Ledger, component: str) -> None:
        self._comm = comm
        self._ledger = ledger
        self._component = component
        self._free: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        """A buffer of ``numel`` elements with unspecified contents, by default on the group's device."""
        device = device or self._comm.device
        free = self._free.setdefault((numel, dtype, device), [])
        if free:
            return free.pop()
        if device == self._comm.device:
            buffer = self._comm.allocate(numel, dtype)
        else:
            buffer = torch.empty(numel, dtype=dtype, device=device)
        self._ledger.add(self._component, buffer.nbytes)
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer taken before."""
        self._free.setdefault((buffer.numel(), buffer.dtype, buffer.device), []).append(buffer)

    def free(self) -> list[torch.Tensor]:
        """The buffers nobody uses now."""
        return [buffer for buffers in self._free.values() for buffer in buffers]

    def clear(self) -> None:
        """Forget the free buffers, so that their memory returns to the system."""
        for buffers in self._free.values():
            for buffer in buffers:
                self._ledger.add(self._component, -buffer.nbytes)
        self._free.clear()
