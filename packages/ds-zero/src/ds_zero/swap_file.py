"""A swap file: its room on the disk, and reads and writes past the page cache, checked for their length."""

import ctypes
import errno
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from ds_zero.errors import SwapError

logger = logging.getLogger(__name__)

# What O_DIRECT asks of addresses, offsets and lengths on every common disk; one that asks for more refuses
# the first transfer, which is then made through the page cache.
ALIGN_BYTES = 4096
MAX_NAME = 200
ADVICE = {
    errno.ENOSPC: "free some room, or give Offload(path=...) a larger disk",
    errno.EDQUOT: "the quota is used up; give Offload(path=...) another folder",
    errno.EFBIG: "the file-size limit of this process (ulimit -f) is too low",
    errno.EIO: "the disk reports a failure; look at the system's log",
    errno.EMFILE: "too many files are open; raise the limit (ulimit -n)",
    errno.ENOENT: "something else has removed it; give Offload(path=...) a folder that nothing cleans up",
    errno.EROFS: "the disk is read-only, perhaps after a failure; look at the system's log",
}


class DirectAccess:
    """Whether the files of one folder are moved past the page cache; the first refusal ends that for all."""

    def __init__(self) -> None:
        self.works = hasattr(os, "O_DIRECT")
        self._lock = threading.Lock()

    def refuse(self, path: Path) -> None:
        """Note that the file system of ``path`` refuses unbuffered access, and say so the first time."""
        with self._lock:
            first, self.works = self.works, False
        if first:
            logger.warning(
                "%s: the file system refuses unbuffered access (O_DIRECT); swap files go through the page "
                "cache, which is slower and takes memory; a folder on a local disk avoids that",
                path.parent,
            )


class SwapFile:
    """A file of fixed length with all its room on the disk.

    It is opened for each transfer: that costs microseconds, and no number of files runs out of descriptors.

    Args:
        path: of a file that is not there yet.
        num_bytes: its length.
        access: shared by the files of a folder.

    Raises:
        SwapError: there is not enough room, or the file cannot be made; nothing of it is left.
    """

    def __init__(self, path: Path, num_bytes: int, *, access: DirectAccess) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self._access = access
        try:
            with _opened(path, os.O_CREAT | os.O_EXCL) as descriptor:
                if num_bytes:
                    os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise SwapError(
                f"cannot make swap file {path}: {num_bytes} bytes needed, {_free_bytes(path.parent)} free "
                f"({error.strerror}); {_advice(error)}"
            ) from error

    def transfer(self, address: int, offset: int, num_bytes: int, *, is_write: bool) -> None:
        """Move ``num_bytes`` between memory at ``address`` and the file at ``offset``.

        Goes past the page cache where all three are multiples of ``ALIGN_BYTES``.

        Raises:
            SwapError: the system reports an error, or the file ends before all is moved.
        """
        if not num_bytes:
            return
        view = memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
        moved = 0
        try:
            if self._access.works and not (address | offset | num_bytes) % ALIGN_BYTES:
                moved = self._move_direct(view, offset, is_write=is_write)
            if moved < num_bytes:  # unaligned, refused, or the rest of a transfer that was cut short
                with _opened(self.path) as descriptor:
                    moved += _move(descriptor, view[moved:], offset + moved, is_write=is_write)
        except OSError as error:
            action = "write" if is_write else "read"
            raise SwapError(
                f"cannot {action} {num_bytes} bytes at {offset} of swap file {self.path}: {error.strerror}; "
                f"{_advice(error)}"
            ) from error
        if moved < num_bytes:
            raise SwapError(
                f"swap file {self.path} is cut short: of {num_bytes} bytes at {offset} only {moved} could be "
                f"{'written' if is_write else 'read'}; something else has changed it: give Offload(path=...) "
                "a folder that nothing cleans up"
            )

    def _move_direct(self, view: memoryview, offset: int, *, is_write: bool) -> int:
        """Bytes moved, which are fewer than asked for where the file ends or unbuffered access is refused."""
        try:
            with _opened(self.path, os.O_DIRECT) as descriptor:
                return _move(descriptor, view, offset, is_write=is_write, align_bytes=ALIGN_BYTES)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._access.refuse(self.path)
            return 0  # what was moved already is moved again


@contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _move(descriptor: int, view: memoryview, offset: int, *, is_write: bool, align_bytes: int = 1) -> int:
    """Move until all is moved, the file ends, or the next transfer would not be aligned; bytes moved."""
    call = os.pwritev if is_write else os.preadv
    moved = 0
    while moved < len(view) and moved % align_bytes == 0:
        count = call(descriptor, [view[moved:]], offset + moved)
        if not count:
            break
        moved += count
    return moved


def _free_bytes(folder: Path) -> int | str:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return "unknown"


def _advice(error: OSError) -> str:
    return ADVICE.get(error.errno or 0, "check the folder of Offload(path=...)")


def file_name(key: str) -> str:
    """A name for any key, different for different keys, that cannot leave the folder. Pure."""
    name = quote(key, safe="").replace(".", "%2E")
    if len(name) > MAX_NAME:
        name = name[:MAX_NAME] + hashlib.sha256(key.encode()).hexdigest()[:16]
    return name + ".swap"
