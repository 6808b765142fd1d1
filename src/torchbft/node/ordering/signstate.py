"""What a voting key signed last, durable before any signature leaves.

    file = slot (4096) slot (4096);  slot = length u32 | sha256 of body (32) | body

A signature is written to the slot that does not hold the last one, so that a crash inside the write
leaves the last one whole; the file keeps its size, so that one fdatasync is enough. The file is
made once in the life of a key. Without it nobody knows what the key signed, so a missing one is
never replaced: the key is rotated instead.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Annotated

import msgspec

from torchbft.node.storage.durable import replace_file, storage_error, write_all
from torchbft.primitives.digests import DIGEST_BYTES, sha256
from torchbft.primitives.errors import DecodeError, StorageError
from torchbft.primitives.wire import Bytes32, Count, Wire, decode, encode

SLOT_BYTES = 4096
"""A disk's sector at most: a torn write spoils one slot."""
SLOTS = 2
HEAD_BYTES = 4 + DIGEST_BYTES
MAX_SIGNED_BYTES = 512
"""Bytes under a signature: a proposal has 220 with all its fields."""
_LOST = (
    "nobody knows what this key signed; vote with another one: ask the members to rotate it, or"
    " restore the newest copy of this file if you are sure that it is the newest"
)


def state_path(home: Path, public: bytes) -> Path:
    """Where the state of a key lies: each has its own."""
    return home / f"signed-{public.hex()[:16]}.state"


class LastSigned(Wire, frozen=True):
    """The last signature: ``step`` 1 is a proposal, 2 a prevote, 3 a precommit, 0 none yet."""

    public: Bytes32
    chain_id: Annotated[str, msgspec.Meta(max_length=50)]
    sequence: Count
    height: Count
    round: Count
    step: Annotated[int, msgspec.Meta(ge=0, le=3)]
    signed: Annotated[bytes, msgspec.Meta(max_length=MAX_SIGNED_BYTES)]
    signature: Annotated[bytes, msgspec.Meta(max_length=64)]

    @property
    def slot(self) -> tuple[int, int, int]:
        """Height, round and step: one key signs one thing for each."""
        return self.height, self.round, self.step


class SignState:
    """The state of one key, open and locked. Raises StorageError if it is lost, damaged, of another
    key or chain, or in use by another process."""

    def __init__(self, path: Path, public: bytes, chain_id: str) -> None:
        self.path = path
        self._broken: StorageError | None = None
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise StorageError("the signing state is lost", where=str(path), hint=_LOST) from None
        except OSError as error:
            raise storage_error(error, path, "opening the signing state") from error
        try:
            self._lock()
            self.last = self._newest()
            if (self.last.public, self.last.chain_id) != (public, chain_id):
                raise StorageError(
                    "this is the signing state of another key or run",
                    where=str(path),
                    hint="put back the file that belongs here",
                )
        except BaseException:
            self.close()
            raise

    @staticmethod
    def create(path: Path, public: bytes, chain_id: str, height: int = 0) -> None:
        """Make the state of a key that never signed; ``height``: it will sign above only.

        Raises StorageError if there is one already.
        """
        if path.exists():
            raise StorageError("a signing state is there already", where=str(path), hint=_LOST)
        first = LastSigned(public, chain_id, 0, height, 0, 3 if height else 0, b"", b"")
        content = _slot(first).ljust(SLOTS * SLOT_BYTES, b"\0")
        replace_file(path, lambda at: _fill(at, content))

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(
                "another process signs with this key",
                where=str(self.path),
                hint="stop that one first: two could sign two different votes",
            ) from None

    def _newest(self) -> LastSigned:
        try:
            data = os.pread(self._descriptor, SLOTS * SLOT_BYTES, 0)
        except OSError as error:
            raise storage_error(error, self.path, "reading the signing state") from error
        found = [_read(data[at : at + SLOT_BYTES]) for at in range(0, len(data), SLOT_BYTES)]
        whole = [last for last in found if last is not None]
        if not whole:
            raise StorageError("the signing state is damaged", where=str(self.path), hint=_LOST)
        return max(whole, key=lambda last: last.sequence)

    def save(self, slot: tuple[int, int, int], signed: bytes, signature: bytes) -> None:
        """Make a signature the last one; durable on return. After an error nothing more is signed:
        what is on the disk is unknown until the state is opened again. Raises StorageError."""
        if self._broken is not None:
            raise self._broken
        last = LastSigned(
            self.last.public,
            self.last.chain_id,
            self.last.sequence + 1,
            *slot,
            signed,
            signature,
        )
        try:
            write_all(self._descriptor, _slot(last), last.sequence % SLOTS * SLOT_BYTES)
            os.fdatasync(self._descriptor)
        except OSError as error:
            self._broken = storage_error(error, self.path, "keeping a signature")
            raise self._broken from error
        self.last = last

    def close(self) -> None:
        """Give the state free. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _slot(last: LastSigned) -> bytes:
    body = encode(last)
    framed = len(body).to_bytes(4, "big") + sha256("signer/state", body) + body
    return framed.ljust(SLOT_BYTES, b"\0")


def _read(slot: bytes) -> LastSigned | None:
    length = int.from_bytes(slot[:4], "big")
    body = slot[HEAD_BYTES : HEAD_BYTES + length]
    if len(body) < length or slot[4:HEAD_BYTES] != sha256("signer/state", body):
        return None
    try:
        return decode(body, LastSigned)
    except DecodeError:
        return None


def _fill(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
