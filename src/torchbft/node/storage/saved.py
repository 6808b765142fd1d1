"""One value that is replaced whole: after a crash the file holds the old one or the new one.

    file = magic (16) sha256(value) (32) value

The digest tells a damaged file from a good one; a half-written one is never seen under this name.
"""

from __future__ import annotations

from pathlib import Path

from torchbft.node.storage.durable import replace_file, storage_error
from torchbft.primitives.digests import DIGEST_BYTES, sha256
from torchbft.primitives.errors import StorageError

MAGIC = b"torchbft-value/1"
MAX_VALUE_BYTES = 32 * 1024 * 1024
"""A ledger state of 64 members (16 MiB), with room; bounds memory when reading."""


def save_value(path: Path, value: bytes) -> None:
    """Replace the value, durably. Raises StorageError, and the old value is still there."""
    content = MAGIC + sha256("saved/value", value) + value

    def fill(temporary: Path) -> None:
        temporary.write_bytes(content)

    replace_file(path, fill)


def load_value(path: Path, hint: str) -> bytes | None:
    """The value; None where none was saved yet. Raises StorageError, with ``hint`` if the file is
    damaged."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_VALUE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(error, path, "reading a file") from error
    start = len(MAGIC) + DIGEST_BYTES
    value = content[start:]
    if len(content) > MAX_VALUE_BYTES or content[:start] != MAGIC + sha256("saved/value", value):
        raise StorageError("this file is damaged", where=str(path), hint=hint)
    return value
