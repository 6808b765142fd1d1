"""One process per peer folder: a second one could sign a slot twice.

The kernel's ``flock`` alone decides who holds a folder. The number in the file only says whom to
tell the user about, or to signal: it is written after the lock was taken, so the number of a dead
holder may still stand there, and it counts only while that process has the file open.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from torchbft.node.storage.durable import storage_error
from torchbft.primitives.errors import StorageError

LOCK_NAME = "lock"

LOOKS, LOOK_SECONDS = 100, 0.01
"""Tries while the file is between two states: who asks for the holder shares the lock for an
instant, and a new holder needs another to write its number. A second is far more than either."""


def holder_of(folder: Path) -> int | None:
    """The process that holds a folder's lock; None if nobody does.

    Raises StorageError when it is held and the holder cannot be told, as from another container.
    """
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        for _ in range(LOOKS):
            if _lock(descriptor, fcntl.LOCK_SH):
                return None
            pid = _named(descriptor)
            if pid is not None:
                return pid
            time.sleep(LOOK_SECONDS)
    finally:
        os.close(descriptor)
    raise StorageError(
        "a process that cannot be seen from here uses the folder",
        where=str(folder),
        hint="look for it where the folder is shared with: another container, user or machine",
    )


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _named(descriptor: int) -> int | None:
    """The process whose number is in the file, if it has the file open."""
    text = os.pread(descriptor, 32, 0).strip()
    if not text.isdigit():
        return None
    pid, file = int(text), os.fstat(descriptor)
    try:
        links = list(os.scandir(f"/proc/{pid}/fd")) if Path("/proc/self/fd").exists() else None
    except OSError:
        return None
    if links is None:  # a system that does not show it
        return pid
    return pid if any(_is_file(link.path, file) for link in links) else None


def _is_file(path: str, file: os.stat_result) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.stat(path), file)
    return False


class FolderLock:
    """Holds ``flock`` on a file in the folder until ``release`` or the end of the process.

    The kernel frees it when the process dies, so a crash leaves no stale lock. Raises StorageError
    that names the process which holds it. A forked child shares the lock: fork before taking it.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK_NAME
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise storage_error(error, path, "locking the peer's folder") from error
        if not self._take():
            self.release()
            raise StorageError(
                f"the folder is in use by process {_told(folder)}",
                where=str(folder),
                hint="stop that process first: two with one key could sign two different votes",
            )
        with contextlib.suppress(OSError):  # on a full disk the lock holds all the same
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def _take(self) -> bool:
        """The lock; False when another holds it, rather than asks for its holder."""
        for _ in range(LOOKS):
            if _lock(self._descriptor, fcntl.LOCK_EX):
                return True
            if not _lock(self._descriptor, fcntl.LOCK_SH):
                return False
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            time.sleep(LOOK_SECONDS)
        return False

    def release(self) -> None:
        """Give the folder free. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _told(folder: Path) -> str:
    try:
        return str(holder_of(folder) or "(just gone: try again)")
    except StorageError:
        return "(unknown)"
