"""The swap files of one engine: tensors are read and written by a few threads while the step goes on."""

import logging
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from itertools import count
from pathlib import Path

import torch

from ds_spec import IoEvent, events
from ds_zero.errors import SwapError
from ds_zero.swap_file import ALIGN_BYTES, DirectAccess, SwapFile, file_name
from ds_zero.swap_folder import SwapFolder

logger = logging.getLogger(__name__)

# A transfer is cut into blocks of this size, so that several are in flight.
BLOCK_BYTES = 8 << 20


class SwapHandle:
    """A read or write under way; its tensor must not be touched until :meth:`wait` returns or raises."""

    def __init__(self, moves: Sequence[futures.Future[None]], on_seen: Callable[[], object]) -> None:
        self._moves = list(moves)
        self._on_seen = on_seen

    def wait(self) -> None:
        """Return when all bytes are moved; again is harmless unless it failed, then the error comes again.

        When it raises, the other blocks are at rest too, so that the tensor may be used for something else.

        Raises:
            SwapError: with the file, what was expected, and what to do.
        """
        futures.wait(self._moves)
        self._on_seen()
        for move in self._moves:
            move.result()

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return all(move.done() for move in self._moves)


class SwapStore:
    """One engine's swap files on one rank, in a folder of their own that goes with the process.

    Transfers of different keys may overlap and end in any order; wait for one of a key before the next of it.

    Args:
        path: folder on a local disk.
        rank: this rank.
        num_threads: transfers of blocks at a time.
        block_bytes: size of a block, a multiple of 4096.

    Attributes:
        folder: where the files are.
        bytes_read: so far, counted when a read starts.
        bytes_written: so far, counted when a write starts.

    Raises:
        SwapError: the folder cannot be made.
    """

    def __init__(
        self, path: str | Path, *, rank: int, num_threads: int = 2, block_bytes: int = BLOCK_BYTES
    ) -> None:
        if num_threads < 1 or block_bytes < ALIGN_BYTES or block_bytes % ALIGN_BYTES:
            raise ValueError(
                f"SwapStore needs num_threads >= 1 and block_bytes a multiple of {ALIGN_BYTES}, "
                f"got {num_threads} and {block_bytes}"
            )
        self._owner = SwapFolder(path, rank=rank)
        self.folder = self._owner.path
        self.bytes_read = 0
        self.bytes_written = 0
        self._rank = rank
        self._block_bytes = block_bytes
        self._process = os.getpid()
        self._is_open = True
        self._pins = torch.accelerator.is_available()
        self._access = DirectAccess()
        self._files: dict[str, SwapFile] = {}
        self._numbers = count()
        # First error of every write whose handle nobody has waited for.
        self._unseen: dict[int, SwapError] = {}
        self._threads = futures.ThreadPoolExecutor(num_threads, thread_name_prefix="ds-zero-swap")

    def create(self, key: str, num_bytes: int) -> None:
        """Make the file of ``key`` with all its room on the disk, so that a full disk is found here.

        Raises:
            SwapError: there is not enough room; nothing is left of the file.
        """
        self._check_usable()
        if key in self._files:
            raise ValueError(f"there is a swap file for {key!r} already; choose another key")
        self._files[key] = SwapFile(self.folder / file_name(key), num_bytes, access=self._access)

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor on the CPU, aligned for unbuffered transfers, pinned where there is an accelerator.

        Without one it lies in large pages where the system has them.
        """
        num_bytes = numel * dtype.itemsize
        raw = self._pinned(num_bytes) if self._pins else None
        if raw is not None and raw.data_ptr() % ALIGN_BYTES:  # seldom: pinned memory starts at a page
            raw = self._pinned(num_bytes + ALIGN_BYTES)
        if raw is None:
            raw = _mapped(num_bytes)
        start = -raw.data_ptr() % ALIGN_BYTES
        return raw[start : start + num_bytes].view(dtype)

    def _pinned(self, num_bytes: int) -> torch.Tensor | None:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            self._pins = False
            logger.warning(
                "swap buffers are not pinned, which makes copies to the device slower; "
                "raise the limit of locked memory (ulimit -l): %s",
                error,
            )
            return None

    def write_async(self, key: str, source: torch.Tensor) -> SwapHandle:
        """Start to write a contiguous CPU tensor as the whole file of ``key``."""
        handle = self._start(key, source, is_write=True)
        self.bytes_written += source.nbytes
        return handle

    def read_async(self, key: str, target: torch.Tensor) -> SwapHandle:
        """Start to read the whole file of ``key`` into a contiguous CPU tensor."""
        handle = self._start(key, target, is_write=False)
        self.bytes_read += target.nbytes
        return handle

    def _start(self, key: str, tensor: torch.Tensor, *, is_write: bool) -> SwapHandle:
        self._check_usable()
        file = self._files.get(key)
        if file is None:
            raise ValueError(f"there is no swap file for {key!r}; call create() first")
        if not tensor.is_contiguous() or tensor.device.type != "cpu" or tensor.nbytes != file.num_bytes:
            raise ValueError(
                f"{key} needs a contiguous CPU tensor of {file.num_bytes} bytes, got {tensor.nbytes} bytes "
                f"on {tensor.device}{'' if tensor.is_contiguous() else ', not contiguous'}"
            )
        number = next(self._numbers)

        # Holds the tensor as long as a block is under way, even when the handle is dropped.
        def move(start: int, num_bytes: int) -> None:
            try:
                self._move(file, tensor.data_ptr() + start, start, num_bytes, is_write=is_write)
            except SwapError as error:
                if is_write:
                    self._unseen.setdefault(number, error)
                raise

        moves = [
            self._threads.submit(move, start, num_bytes)
            for start, num_bytes in _blocks(file.num_bytes, self._block_bytes)
        ]
        return SwapHandle(moves, on_seen=lambda: self._unseen.pop(number, None))

    def _move(self, file: SwapFile, address: int, offset: int, num_bytes: int, *, is_write: bool) -> None:
        begin_s = time.perf_counter()
        file.transfer(address, offset, num_bytes, is_write=is_write)
        if events.listening():
            events.emit(
                IoEvent(
                    path=str(file.path),
                    op="write" if is_write else "read",
                    num_bytes=num_bytes,
                    begin_s=begin_s,
                    end_s=time.perf_counter(),
                    rank=self._rank,
                )
            )

    def _check_usable(self) -> None:
        if not self._is_open:
            raise ValueError(f"the swap store in {self.folder} is closed; make a new one")
        if os.getpid() != self._process:
            raise SwapError(
                f"the swap store in {self.folder} belongs to process {self._process}, and a forked child has "
                "none of its threads; make the store after the fork"
            )

    def close(self) -> None:
        """Wait for what is under way and remove the folder; harmless when done already.

        Raises:
            SwapError: a write failed and nobody waited for it; the folder is removed all the same.
        """
        if not self._is_open or os.getpid() != self._process:
            return
        self._is_open = False
        self._threads.shutdown(wait=True)
        self._files.clear()
        self._owner.close()
        for error in self._unseen.values():
            raise error


def _mapped(num_bytes: int) -> torch.Tensor:
    """Memory of its own from the system, in large pages if it has them.

    The disk is told the address of every page, and takes so many at a time: with large pages a block is a few
    requests instead of dozens, which took half the time where it was measured (``docs/results.md``).
    """
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a system without them gives the usual ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _blocks(num_bytes: int, block_bytes: int) -> list[tuple[int, int]]:
    """Starts and lengths; the end that is no multiple of the alignment is a block of its own. Pure."""
    whole = num_bytes // ALIGN_BYTES * ALIGN_BYTES
    blocks = [(start, min(block_bytes, whole - start)) for start in range(0, whole, block_bytes)]
    return blocks + ([(whole, num_bytes - whole)] if num_bytes > whole else [])
