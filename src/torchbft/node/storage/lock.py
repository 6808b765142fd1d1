"""One process per peer folder: a second one could sign a slot twice."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from torchbft.node.storage.durable import storage_error
from torchbft.primitives.errors import StorageError

LOCK_NAME = "lock"


def holder_of(folder: Path) -> int | None:
    """The process that holds a folder's lock; None if nobody does."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        text = os.pread(descriptor, 32, 0).strip()
        return int(text) if text.isdigit() else None
    finally:
        os.close(descriptor)


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
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip()
            self.release()
            raise StorageError(
                f"the folder is in use by process {holder or '(unknown)'}",
                where=str(folder),
                hint="stop that process first: two with one key could sign two different votes",
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Give the folder free. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
