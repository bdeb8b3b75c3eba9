"""A private folder for one engine's swap files: locked while it lives, removed after that."""

import fcntl
import logging
import os
import secrets
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
    with their process.

    Args:
        parent: folder on a local disk; made when it is not there.
        rank: shown in the folder's name.

    Raises:
        SwapError: the folder cannot be made or written.
    """

    def __init__(self, parent: str | Path, *, rank: int) -> None:
        base = Path(parent).expanduser()
        try:
            base.mkdir(parents=True, exist_ok=True)
            remove_stale(base)
            self.path = base / f"{PREFIX}{os.getpid()}-{rank}-{secrets.token_hex(4)}"
            self.path.mkdir(mode=0o700)
            descriptor = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SwapError(
                f"cannot make a folder for swap files in {base}: {error.strerror}; "
                "give Offload(path=...) a writable folder on a local disk"
            ) from error
        self._remove = weakref.finalize(self, _remove, self.path, descriptor, os.getpid())

    def close(self) -> None:
        """Remove the folder and everything in it; harmless when done already."""
        self._remove()


def _remove(path: Path, descriptor: int, owner: int) -> None:
    if os.getpid() != owner:  # a forked child ends: the folder is its parent's
        return
    shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)


def remove_stale(base: Path) -> list[Path]:
    """Remove swap folders in ``base`` whose process is dead; the ones that were removed."""
    removed = []
    for folder in sorted(base.glob(f"{PREFIX}*")):
        if folder.is_dir() and not folder.is_symlink() and _is_stale(folder):
            shutil.rmtree(folder, ignore_errors=True)
            logger.info("removed %s, which a process that died had left", folder)
            removed.append(folder)
    return removed


def _is_stale(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return _age_s(folder) > MAKING_S
    except OSError:
        return False  # somebody else's
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _age_s(folder: Path) -> float:
    try:
        return time.time() - folder.stat().st_mtime
    except OSError:
        return 0.0
