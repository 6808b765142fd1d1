"""An append-only log of records that tells a torn tail from damage.

    file   = magic (16) record*
    record = length u32 | crc32(chain, length) u32 | body | chain' (32)
    chain' = sha256(chain, body); the first chain is sha256(magic)

The length has a check of its own, so that damage to it is not taken for a torn tail: a record is
*torn* when the file ends before the record does, and *corrupt* when its bytes are all there and do
not fit. A torn tail is what a crash leaves of a write; it was never acknowledged, and is dropped at
opening. Corruption is never repaired. The chain covers the order of records and every byte. A file
cut exactly between two records cannot be told from a shorter log; the ledger's certificates can.
"""

from __future__ import annotations

import os
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, overload

from torchbft.node.storage.durable import storage_error, sync_folder, write_all
from torchbft.primitives.digests import DIGEST_BYTES, sha256
from torchbft.primitives.errors import CorruptLogError, MisuseError, StorageError

MAGIC = b"torchbft-log/1\r\n"
HEAD_BYTES = 8
MAX_RECORD_BYTES = 16 * 1024 * 1024
"""A finalized block (1 MiB) and its certificate, with room; bounds memory when reading."""

_CHAIN_START = sha256("log/start", MAGIC)


def _head(chain: bytes, length: int) -> bytes:
    size = length.to_bytes(4, "big")
    return size + zlib.crc32(size, zlib.crc32(chain)).to_bytes(4, "big")


class _Torn(Exception):
    """The file ends inside a record."""


class _Scan:
    """Walks a log from its start. ``offset`` and ``chain`` stand after the last good record."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self.offset, self.chain = 0, _CHAIN_START

    def _exactly(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise _Torn
        return data

    def _corrupt(self, what: str) -> CorruptLogError:
        return CorruptLogError(what, where=str(self._path), offset=self.offset)

    def magic(self) -> None:
        data = self._file.read(len(MAGIC))
        if not MAGIC.startswith(data):
            raise self._corrupt("this is not a torchbft log, or its first bytes are damaged")
        if len(data) < len(MAGIC):
            raise _Torn
        self.offset = len(MAGIC)

    def record(self) -> bytes | None:
        """The next record, None at the end. Raises _Torn or CorruptLogError."""
        head = self._file.read(HEAD_BYTES)
        if not head:
            return None
        if not any(head) and self._only_zeros_follow():
            raise _Torn  # space that the file system reserved and a crash left unwritten
        if len(head) < HEAD_BYTES:
            raise _Torn
        length = int.from_bytes(head[:4], "big")
        if head != _head(self.chain, length) or length > MAX_RECORD_BYTES:
            raise self._corrupt("a record's length is damaged")
        body = self._exactly(length)
        chain = self._exactly(DIGEST_BYTES)
        if chain != sha256("log/record", self.chain, body):
            raise self._corrupt("a record is damaged")
        self.chain = chain
        self.offset += HEAD_BYTES + length + DIGEST_BYTES
        return body

    def _only_zeros_follow(self) -> bool:
        while block := self._file.read(1 << 16):
            if any(block):
                return False
        return True


def read_log(path: Path, *, strict: bool = True) -> Iterator[bytes]:
    """The records of a log, in order, checked one by one; the file is only read.

    strict: a torn tail is an error too (a finished log has none). Raises CorruptLogError with the
    offset of the first bad record, or StorageError when the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            scan = _Scan(file, path)
            try:
                scan.magic()
                while (record := scan.record()) is not None:
                    yield record
            except _Torn:
                if strict:
                    raise CorruptLogError(
                        "the last record is incomplete", where=str(path), offset=scan.offset
                    ) from None
    except OSError as error:
        raise storage_error(error, path, "reading a log") from error


class AppendLog(Sequence[bytes]):
    """A log open for appending: one writer, which the folder's lock guarantees.

    A sequence of its records, which are read from the disk and checked anew each time; only their
    places are in memory, 8 bytes each. ``dropped`` is the size in bytes of a torn tail that opening
    removed. Opening raises CorruptLogError on damage, and StorageError when the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places = array("Q")
        self._broken: StorageError | None = None
        try:
            fresh = not path.exists()
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if fresh:
                sync_folder(path.parent)
        except OSError as error:
            raise storage_error(error, path, "opening a log") from error
        try:
            self.dropped = self._recover()
        except BaseException:
            self.close()
            raise

    def _recover(self) -> int:
        """Find the end of the good records and cut what a crash left behind it."""
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            scan = _Scan(file, self.path)
            try:
                scan.magic()
                place = scan.offset
                while scan.record() is not None:
                    self._places.append(place)
                    place = scan.offset
            except _Torn:
                pass
        self._size, self._chain = scan.offset, scan.chain
        torn = os.fstat(self._descriptor).st_size - self._size
        if torn or not self._size:
            self._cut()
        return torn

    def _cut(self) -> None:
        try:
            os.ftruncate(self._descriptor, self._size)
            if not self._size:
                write_all(self._descriptor, MAGIC, 0)
                self._size = len(MAGIC)
            os.fsync(self._descriptor)
        except OSError as error:
            raise storage_error(error, self.path, "opening a log") from error

    def append(self, record: bytes) -> None:
        """Write a record; durable after ``sync``. On StorageError the log is as it was before."""
        if len(record) > MAX_RECORD_BYTES:
            raise MisuseError(f"a record of {len(record)} bytes; at most {MAX_RECORD_BYTES}")
        self._usable()
        chain = sha256("log/record", self._chain, record)
        framed = b"".join((_head(self._chain, len(record)), record, chain))
        try:
            write_all(self._descriptor, framed, self._size)
        except OSError as error:
            failure = storage_error(error, self.path, "writing a record")
            self._take_back(failure)
            raise failure from error
        self._places.append(self._size)
        self._size += len(framed)
        self._chain = chain

    def _usable(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _take_back(self, failure: StorageError) -> None:
        """Remove a half-written record; where even that fails, refuse to write after it."""
        try:
            os.ftruncate(self._descriptor, self._size)
        except OSError:
            self._broken = failure

    def sync(self) -> None:
        """Make every appended record durable (fdatasync).

        After a failed sync the kernel may have dropped the dirty pages, and a second sync would
        report success over lost bytes; so the log refuses all further use until it is reopened.
        """
        self._usable()
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            self._broken = storage_error(error, self.path, "making a log durable")
            raise self._broken from error

    def __iter__(self) -> Iterator[bytes]:
        """The records as they stand on the disk, in order."""
        return read_log(self.path)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        """Records by position. Raises IndexError, CorruptLogError or StorageError."""
        if isinstance(index, slice):
            return [self._read(place) for place in self._places[index]]
        return self._read(self._places[index])

    def _read(self, place: int) -> bytes:
        """The record at an offset; the chain before it stands right before it."""
        try:
            with self.path.open("rb") as file:
                scan = _Scan(file, self.path)
                scan.magic()
                if place > scan.offset:
                    file.seek(place - DIGEST_BYTES)
                    scan.offset, scan.chain = place, file.read(DIGEST_BYTES)
                record = scan.record()
        except _Torn:
            record = None
        except OSError as error:
            raise storage_error(error, self.path, "reading a log") from error
        if record is None:
            raise CorruptLogError("the log was cut", where=str(self.path), offset=place)
        return record

    def close(self) -> None:
        """Close the file; does not sync. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
