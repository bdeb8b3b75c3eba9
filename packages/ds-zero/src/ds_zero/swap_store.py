"""Tensors in files: aligned, unbuffered reads and writes by a few threads, each checked for its length."""

import ctypes
import errno
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import torch

from ds_spec import IoEvent, events
from ds_zero.errors import SwapError
from ds_zero.swap_folder import SwapFolder

logger = logging.getLogger(__name__)

# What O_DIRECT asks of addresses, offsets and lengths on every common disk.
ALIGN_BYTES = 4096
# A transfer is cut into blocks of this size, so that several are in flight.
BLOCK_BYTES = 8 << 20
MAX_NAME = 200
ADVICE = {
    errno.ENOSPC: "free some room, or give Offload(path=...) a larger disk",
    errno.EDQUOT: "the quota is used up; give Offload(path=...) another folder",
    errno.EFBIG: "the file-size limit of this process (ulimit -f) is too low",
    errno.EIO: "the disk reports a failure; look at the system's log",
}


class SwapHandle:
    """A read or write under way; its tensor belongs to it until :meth:`wait` returns."""

    def __init__(self, futures: Sequence[Future[None]], tensor: torch.Tensor) -> None:
        self._futures = list(futures)
        self._tensor: torch.Tensor | None = tensor

    def wait(self) -> None:
        """Return when all bytes are moved; again is harmless unless it failed, then the error comes again.

        Raises:
            SwapError: with the file, what was expected, and what to do.
        """
        for future in self._futures:
            future.result()
        self._tensor = None

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return all(future.done() for future in self._futures)


class _File:
    """One swap file, open twice: without the page cache where the file system can, and with it."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self.buffered = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self.direct: int | None = None
        try:
            if num_bytes:
                os.posix_fallocate(self.buffered, 0, num_bytes)
            self.direct = _open_direct(path)
        except OSError:
            os.close(self.buffered)
            raise

    def close(self) -> None:
        os.close(self.buffered)
        if self.direct is not None:
            os.close(self.direct)


def _open_direct(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise


class SwapStore:
    """One engine's swap files on one rank, in a folder of their own that goes with the process.

    Args:
        path: folder on a local disk.
        rank: this rank.
        num_threads: transfers of blocks at a time.
        block_bytes: size of a block, a multiple of 4096.

    Attributes:
        folder: where the files are.
        bytes_read: so far.
        bytes_written: so far.

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
        self._files: dict[str, _File] = {}
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="ds-zero-swap")

    def create(self, key: str, num_bytes: int) -> None:
        """Make the file of ``key`` with all its room on the disk.

        Raises:
            SwapError: there is not enough room.
        """
        if key in self._files:
            raise ValueError(f"there is a swap file for {key!r} already")
        path = self.folder / _file_name(key)
        try:
            self._files[key] = _File(path, num_bytes)
        except OSError as error:
            free = shutil.disk_usage(self.folder).free
            raise SwapError(
                f"no room for swap file {path}: {num_bytes} bytes needed, {free} free ({error.strerror}); "
                f"{_advice(error)}"
            ) from error
        if self._files[key].direct is None:
            logger.info("%s has no unbuffered files; swap files go through the page cache", self.folder)

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor on the CPU, aligned for unbuffered transfers, pinned where there is an accelerator."""
        num_bytes = numel * dtype.itemsize
        raw = _allocate(num_bytes + ALIGN_BYTES)
        start = -raw.data_ptr() % ALIGN_BYTES
        return raw[start : start + num_bytes].view(dtype)

    def write_async(self, key: str, source: torch.Tensor) -> SwapHandle:
        """Start to write a contiguous CPU tensor as the whole file of ``key``."""
        return self._start(key, source, is_write=True)

    def read_async(self, key: str, target: torch.Tensor) -> SwapHandle:
        """Start to read the whole file of ``key`` into a contiguous CPU tensor."""
        return self._start(key, target, is_write=False)

    def _start(self, key: str, tensor: torch.Tensor, *, is_write: bool) -> SwapHandle:
        file = self._files[key]
        if not tensor.is_contiguous() or tensor.device.type != "cpu" or tensor.nbytes != file.num_bytes:
            raise ValueError(
                f"{key} needs a contiguous CPU tensor of {file.num_bytes} bytes, got {tensor.nbytes} bytes "
                f"on {tensor.device}"
            )
        futures = [
            self._threads.submit(self._transfer, file, tensor.data_ptr() + start, start, num_bytes, is_write)
            for start, num_bytes in _blocks(file.num_bytes, self._block_bytes)
        ]
        if is_write:
            self.bytes_written += tensor.nbytes
        else:
            self.bytes_read += tensor.nbytes
        return SwapHandle(futures, tensor)

    def _transfer(self, file: _File, address: int, offset: int, num_bytes: int, is_write: bool) -> None:
        begin_s = time.perf_counter()
        aligned = address % ALIGN_BYTES == 0 and num_bytes % ALIGN_BYTES == 0
        descriptor = file.direct if aligned and file.direct is not None else file.buffered
        view = memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
        moved = 0
        try:
            while moved < num_bytes:
                move = os.pwritev if is_write else os.preadv
                count = move(descriptor, [view[moved:]], offset + moved)
                if not count:
                    raise SwapError(_short(file, offset, num_bytes, moved, is_write))
                moved += count
                if moved % ALIGN_BYTES:  # the rest of a transfer cut short is no longer aligned
                    descriptor = file.buffered
        except OSError as error:
            action = "write" if is_write else "read"
            raise SwapError(
                f"cannot {action} {num_bytes} bytes at {offset} of swap file {file.path}: {error.strerror}; "
                f"{_advice(error)}"
            ) from error
        if events.listening():
            self._emit(file, num_bytes, begin_s, is_write)

    def _emit(self, file: _File, num_bytes: int, begin_s: float, is_write: bool) -> None:
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

    def close(self) -> None:
        """Wait for what is under way and remove the folder; harmless when done already."""
        self._threads.shutdown(wait=True)
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._owner.close()


def _blocks(num_bytes: int, block_bytes: int) -> list[tuple[int, int]]:
    """Starts and lengths; the end that is no multiple of the alignment is a block of its own."""
    whole = num_bytes // ALIGN_BYTES * ALIGN_BYTES
    blocks = [(start, min(block_bytes, whole - start)) for start in range(0, whole, block_bytes)]
    return blocks + ([(whole, num_bytes - whole)] if num_bytes > whole else [])


def _short(file: _File, offset: int, num_bytes: int, moved: int, is_write: bool) -> str:
    action = "written" if is_write else "read"
    return (
        f"swap file {file.path} is cut short: of {num_bytes} bytes at {offset} only {moved} could be "
        f"{action}. Something else has changed it; give Offload(path=...) a folder that nothing cleans up"
    )


def _advice(error: OSError) -> str:
    return ADVICE.get(error.errno or 0, "check the folder of Offload(path=...)")


def _file_name(key: str) -> str:
    """A name for any key that cannot leave the folder."""
    name = quote(key, safe="").replace(".", "%2E")
    if len(name) > MAX_NAME:
        name = name[:MAX_NAME] + hashlib.sha256(key.encode()).hexdigest()[:16]
    return name + ".swap"


def _allocate(num_bytes: int) -> torch.Tensor:
    if torch.accelerator.is_available():
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            logger.warning("swap buffers are not pinned, which makes copies slower: %s", error)
    return torch.empty(num_bytes, dtype=torch.uint8)
