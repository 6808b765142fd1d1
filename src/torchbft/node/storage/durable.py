"""The few steps that make bytes survive a crash, and the one place that words disk errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from torchbft.primitives.errors import StorageError

_HINTS = {
    errno.ENOSPC: "free space on this disk and start again; what was durable is still there",
    errno.EDQUOT: "raise the quota or free space, and start again; what was durable is still there",
    errno.EROFS: "mount this disk writable, or choose another folder",
    errno.EACCES: "give this user the right to read and write here, or choose another folder",
    errno.EIO: "this disk fails: copy the peer's folder elsewhere before using it again",
}
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}


def storage_error(error: OSError, path: Path, doing: str) -> StorageError:
    """The one line for a disk error: what, where, what to do."""
    cause = _FULL.get(error.errno or 0, error.strerror or str(error))
    return StorageError(f"{doing} failed: {cause}", where=str(path), hint=_hint(error))


def _hint(error: OSError) -> str:
    return _HINTS.get(error.errno or 0, "check this path and its disk, then start again")


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write every byte at an offset; a short write (a disk filling up) is continued or raises."""
    view = memoryview(data)
    while view.nbytes:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def sync_folder(folder: Path) -> None:
    """Make created, renamed and removed names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, fill: Callable[[Path], None]) -> None:
    """Create or replace a file in one step: after a crash it is the old one or the new one, whole.

    fill: writes the new content to the path it is given. Raises StorageError.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        fill(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(error, path, "saving a file") from error
