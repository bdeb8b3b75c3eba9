"""Where the states of flats lie between uses: makes places on the device, on the CPU and in files."""

from collections import deque
from collections.abc import Sequence

import torch

from ds_comm import Communicator
from ds_zero.buffers import BufferPool, Ledger
from ds_zero.config import ZeroOptions
from ds_zero.errors import InternalError
from ds_zero.parameters import FlatParameters
from ds_zero.states import FlatStates, Place, ResidentPlace, plan_components, plan_spans
from ds_zero.swap_store import SwapHandle, SwapStore

CPU = torch.device("cpu")


class Staging:
    """Buffers between files and the step, each as large as the largest place; writes go on behind.

    Args:
        store: the files.
        ledger: counts the buffers.
    """

    def __init__(self, store: SwapStore, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger
        self._free: list[torch.Tensor] = []
        self._writing: deque[tuple[torch.Tensor, SwapHandle]] = deque()
        self._num_bytes = 0

    def make_room(self, num_bytes: int) -> None:
        """Have buffers of at least ``num_bytes``, before the first is taken."""
        self._num_bytes = max(self._num_bytes, num_bytes)

    def take(self) -> torch.Tensor:
        """A buffer, after the oldest write if that still holds one."""
        if not self._free and self._writing:
            buffer, handle = self._writing.popleft()
            self._free.append(buffer)
            handle.wait()
        buffer = self._free.pop() if self._free else None
        if buffer is None or buffer.numel() < self._num_bytes:
            self._ledger.add("host", self._num_bytes - (0 if buffer is None else buffer.nbytes))
            buffer = self._store.buffer(self._num_bytes, torch.uint8)
        return buffer

    def give(self, buffer: torch.Tensor, *, after: SwapHandle | None = None) -> None:
        """Return a buffer, at once or when its write is done."""
        if after is None:
            self._free.append(buffer)
        else:
            self._writing.append((buffer, after))


class FilePlace:
    """Bytes in a file, in a staging buffer while they are used.

    Raises:
        SwapError: from any method, when a read or a write before it failed.
    """

    def __init__(self, store: SwapStore, staging: Staging, key: str, num_bytes: int) -> None:
        store.create(key, num_bytes)
        self._store = store
        self._staging = staging
        self._key = key
        self._num_bytes = num_bytes
        self._buffer: torch.Tensor | None = None
        self._reading: SwapHandle | None = None
        self._writing: SwapHandle | None = None
        self._is_empty = True
        staging.make_room(num_bytes)

    def fetch(self) -> None:
        """Start to read, unless that is under way; a file never written gives zeros."""
        if self._buffer is not None:
            return
        if self._writing is not None:
            self._writing.wait()
            self._writing = None
        self._buffer = self._staging.take()
        if self._is_empty:
            self._buffer.zero_()
        else:
            self._reading = self._store.read_async(self._key, self._buffer[: self._num_bytes])

    def wait(self) -> torch.Tensor:
        """The bytes, read."""
        self.fetch()
        if self._reading is not None:
            self._reading.wait()
            self._reading = None
        if self._buffer is None:
            raise InternalError(f"{self._key}: no buffer after fetch()")
        return self._buffer[: self._num_bytes]

    def blank(self) -> torch.Tensor:
        """A buffer for new bytes; nothing is read."""
        self.drop()
        self._buffer = self._staging.take()
        return self._buffer[: self._num_bytes]

    def store(self) -> None:
        """Start to write what is in the buffer, and return it when that is done."""
        if self._buffer is not None:
            self._writing = self._store.write_async(self._key, self._buffer[: self._num_bytes])
            self._staging.give(self._buffer, after=self._writing)
            self._buffer, self._is_empty = None, False

    def drop(self) -> None:
        """Return the buffer without writing it."""
        if self._reading is not None:
            self._reading.wait()
            self._reading = None
        if self._buffer is not None:
            self._staging.give(self._buffer)
            self._buffer = None


class Homes:
    """Gives every flat the places its states were asked to have.

    Args:
        options: what was asked for.
        comm: of the ranks that share the flats.
        pool: gives buffers for the step.
        ledger: counts what the places hold.
    """

    def __init__(self, options: ZeroOptions, comm: Communicator, pool: BufferPool, ledger: Ledger) -> None:
        self._offload = options.offload
        self._precision = options.precision
        self._comm = comm
        self._pool = pool
        self._ledger = ledger
        self.store: SwapStore | None = None
        if self._offload.uses_files and self._offload.path is not None:
            self.store = SwapStore(self._offload.path, rank=comm.rank)
            self._staging = Staging(self.store, ledger)

    @property
    def needs_moments(self) -> bool:
        """Whether states are kept anywhere but in torch's own memory."""
        return self._offload.optimizer != "device" or self._precision.state != "fp32"

    def states_of(self, flat: FlatParameters, moments: Sequence[str], *, leaves: bool) -> FlatStates | None:
        """The states of a flat that need a place of their own, ``None`` when torch's own memory will do.

        Args:
            flat: the flat, not yet filled.
            moments: what the optimizer keeps per element.
            leaves: whether the flat is among those whose states leave the device.
        """
        home = self._offload.optimizer if leaves else "device"
        narrow = self._precision.state == "bf16"
        if home == "device" and not narrow:
            return None
        first, last = flat.stepped_range
        dtype = torch.bfloat16 if narrow else torch.float32
        components = plan_components(last - first, with_master=home != "device", moments=moments, dtype=dtype)
        num_bytes = sum((last - first) * component.dtype.itemsize for component in components)
        place = self._place(home, f"{flat.label}/states", num_bytes, component="optimizer")
        spans = plan_spans(flat.layout, first, last)
        return FlatStates(last - first, components, place, pool=self._pool, spans=spans)

    def gradient_place(self, flat: FlatParameters) -> Place | None:
        """Where the flat's reduced gradient lies until the step, ``None`` for the device."""
        home = self._offload.gradients
        if home == "device":
            return None
        num_bytes = flat.layout.shard_numel * torch.float32.itemsize
        return self._place(home, f"{flat.label}/gradients", num_bytes, component="gradients")

    def parameter_place(self, label: str, num_bytes: int) -> Place | None:
        """Where a flat's parameter slice lies, ``None`` for the device."""
        home = self._offload.parameters
        if home == "device":
            return None
        return self._place(home, f"{label}/parameters", num_bytes, component="parameters")

    def _place(self, home: str, key: str, num_bytes: int, *, component: str) -> Place:
        if home == "file" and self.store is not None:
            return FilePlace(self.store, self._staging, key, num_bytes)
        device = CPU if home == "cpu" else self._comm.device
        pin = home == "cpu" and self._comm.device.type != "cpu"
        raw = torch.zeros(num_bytes, dtype=torch.uint8, device=device, pin_memory=pin)
        self._ledger.add(component if home == "device" else "host", num_bytes)
        return ResidentPlace(raw)

    def close(self) -> None:
        """Remove the files; harmless when there are none."""
        if self.store is not None:
            self.store.close()


def leaving(numels: Sequence[int], ratio: float) -> list[bool]:
    """Which flats leave the device, so that at least ``ratio`` of all elements do: the first ones. Pure."""
    wanted = ratio * sum(numels)
    chosen: list[bool] = []
    total = 0
    for numel in numels:
        chosen.append(total < wanted)
        total += numel
    return chosen
