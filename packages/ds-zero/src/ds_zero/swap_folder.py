"""A private folder for one engine's swap files: locked while it lives, removed after that."""

import fcntl
import logging
import os
import shutil
import time
import weakref
from pathlib import Path

from ds_zero.errors import SwapError

logger = logging.getLogger(__name__)

PREFIX = "ds-zero-swap-"
LOCK = "lock"
# A folder without a lock is one being made; older than this, its process died while making it.
MAKING_S = 60.0


class SwapFolder:
    """A fresh folder under ``parent``; folders that dead processes left there are removed first.

    A lock on a file inside tells a living owner from a dead one, whatever ended it, as the system drops locks
    with their process. A forked child has no part in it: it neither holds the lock nor removes the folder.

    Args:
        parent: folder on a local disk, or a link to one; made when it is not there.
        rank: shown in the folder's name.

    Attributes:
        path: the folder, absolute and without links, so that a later change of directory does no harm.

    Raises:
        SwapError: the folder cannot be made or written.
    """

    def __init__(self, parent: str | Path, *, rank: int) -> None:
        base = Path(os.path.realpath(Path(parent).expanduser()))
        self.path = base / f"{PREFIX}{os.getpid()}-{rank}-{os.urandom(4).hex()}"
        try:
            base.mkdir(parents=True, exist_ok=True)
            remove_stale(base)
            self.path.mkdir(mode=0o700)
            descriptor = _lock(self.path)
        except OSError as error:
            raise SwapError(
                f"cannot make a folder for swap files in {base}: {error.strerror}; "
                "give Offload(path=...) a writable folder on a local disk"
            ) from error
        self._descriptor = descriptor
        self._remove = weakref.finalize(self, _remove, self.path, descriptor, os.getpid())
        _living.add(self)

    def close(self) -> None:
        """Remove the folder and everything in it; harmless when done already."""
        self._remove()

    def leave(self) -> None:
        """Let go in a forked child: a lock lasts until the last process that shares it has closed it."""
        if self._remove.detach() is not None:
            os.close(self._descriptor)


_living: weakref.WeakSet[SwapFolder] = weakref.WeakSet()


def _leave_all() -> None:
    for folder in list(_living):
        folder.leave()


os.register_at_fork(after_in_child=_leave_all)


def _lock(folder: Path) -> int:
    """Put a lock file into ``folder`` that nobody ever sees unlocked; the descriptor that holds the lock."""
    making = folder / f"{LOCK}.making"
    descriptor = None
    try:
        descriptor = os.open(making, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        making.rename(folder / LOCK)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)
        raise
    return descriptor


def _remove(path: Path, descriptor: int, owner: int) -> None:
    if os.getpid() != owner:  # a child forked past Python: the folder is its parent's
        return
    shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)
    if path.exists():
        logger.warning("could not remove all of the swap folder %s; remove it by hand", path)


def remove_stale(base: Path) -> list[Path]:
    """Remove swap folders in ``base`` whose process is dead; the ones that were removed."""
    found = sorted(base.glob(f"{PREFIX}*"))
    return [folder for folder in found if folder.is_dir() and not folder.is_symlink() and _clear(folder)]


def _clear(folder: Path) -> bool:
    """Remove one folder if its owner is dead, holding the lock meanwhile; whether it is gone by that."""
    descriptor = None
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _remove_left(folder)
    except FileNotFoundError:
        return _age_s(folder) > MAKING_S and _remove_left(folder)
    except OSError:
        return False  # its owner lives, somebody else is removing it, or it is another user's
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _remove_left(folder: Path) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        return False
    logger.info("removed %s, which a process that died had left", folder)
    return True


def _age_s(folder: Path) -> float:
    try:
        return time.time() - folder.stat().st_mtime
    except OSError:
        return 0.0
