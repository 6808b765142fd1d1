"""Payloads on disk, named by their root: what the ledger's digests point at.

    folder/ROUND/ROOT       a whole, checked, durable payload, kept for that round
    folder/incoming/ROOT-N  one that is still arriving; removed when the store is opened

A payload becomes visible under its root only by a rename after its bytes are durable, so ``has``
means: held, whole, and still there after a crash. That is what an attestation claims.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import threading
from collections import OrderedDict
from pathlib import Path

from torchbft.node.storage.durable import storage_error, sync_folder, write_all
from torchbft.primitives.digests import (
    DIGEST_BYTES,
    Buffer,
    chunk_digests,
    payload_root,
    root_of_chunks,
)
from torchbft.primitives.errors import StorageError
from torchbft.primitives.ids import Round

INCOMING = "incoming"
DIGEST_LISTS = 64
"""Chunk digest lists kept in memory: one round of a large run. 32 bytes per 64 KiB of payload."""

READ_BYTES = 1024 * 1024
"""Block in which a payload is read to be hashed or sent: whole chunks, and fits a core's cache."""


class IncomingPayload:
    """The file of a payload that is arriving: each byte written once, then finished or dropped.

    Not visible in the store before ``finish``, which refuses if a write failed or is missing.
    Raises StorageError on disk faults.
    """

    def __init__(self, store: PayloadStore, root: bytes, length: int) -> None:
        self._store, self._root, self._length = store, root, length
        self._written = 0
        self.path = store.folder / INCOMING / f"{root.hex()}-{next(store._serial)}"
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._descriptor, length)
        except OSError as error:
            raise storage_error(error, self.path, "receiving a payload") from error

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write checked bytes at their offset; not yet durable."""
        try:
            write_all(self._descriptor, data, offset)
        except OSError as error:
            raise storage_error(error, self.path, "receiving a payload") from error
        self._written += memoryview(data).nbytes

    def finish(self, round: Round, chunks: list[bytes]) -> None:
        """Make the payload durable and visible; its chunk digests, checked, are remembered."""
        if self._written != self._length:
            raise StorageError(
                f"{self._written} of {self._length} bytes were written", where=str(self.path)
            )
        try:
            os.fdatasync(self._descriptor)
            self._close()
            with self._store._lock:
                self._store._adopt(self.path, self._root, self._length, round)
        except OSError as error:
            raise storage_error(error, self.path, "storing a payload") from error
        self._store._remember(self._root, chunks)

    def drop(self) -> None:
        """Give up: remove what has arrived."""
        self._close()
        self.path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class PayloadStore:
    """A folder of payloads. Calls block on the disk, and may come from several threads.

    Opening removes unfinished files. All methods raise StorageError on disk faults; those that take
    a root raise it too when no such payload is held.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: dict[bytes, tuple[Round, int]] = {}
        self._kept: dict[bytes, Round] = {}
        """Later rounds that a payload is kept for; its file stays where it was put, for it may be
        open. Forgotten at a restart: then it is kept for the round of its folder."""
        self._chunks: OrderedDict[bytes, list[bytes]] = OrderedDict()
        self._serial = itertools.count()
        self._lock = threading.Lock()
        """Held while names change, so that no file is moved and removed at once."""
        try:
            shutil.rmtree(folder / INCOMING, ignore_errors=True)
            (folder / INCOMING).mkdir(parents=True)
            self._index()
        except OSError as error:
            raise storage_error(error, folder, "opening the payload store") from error

    def _index(self) -> None:
        for path in self.folder.glob("*/*"):
            if path.parent.name.isdigit() and len(path.name) == 2 * DIGEST_BYTES:
                held = (Round(int(path.parent.name)), path.stat().st_size)
                self._held[bytes.fromhex(path.name)] = held

    def _adopt(self, path: Path, root: bytes, length: int, round: Round) -> None:
        folder = self.folder / str(round)
        if not folder.exists():
            folder.mkdir(exist_ok=True)
            sync_folder(self.folder)
        os.replace(path, folder / root.hex())
        sync_folder(folder)
        self._held[root] = (round, length)

    def _remember(self, root: bytes, chunks: list[bytes]) -> None:
        with self._lock:
            self._chunks[root] = chunks
            if len(self._chunks) > DIGEST_LISTS:
                self._chunks.popitem(last=False)

    def put(self, payload: Buffer, round: Round) -> bytes:
        """Store a payload for a round, durably; returns its root. Again is cheap and harmless."""
        view = memoryview(payload).cast("B")
        chunks = chunk_digests(view)
        root = root_of_chunks(view.nbytes, chunks)
        if self.keep(root, round):
            return root
        incoming = IncomingPayload(self, root, view.nbytes)
        try:
            incoming.write(0, view)
            incoming.finish(round, chunks)
        except StorageError:
            incoming.drop()
            raise
        return root

    def keep(self, root: bytes, round: Round) -> bool:
        """Keep a held payload for a later round as well; False when it is not held."""
        with self._lock:
            held = self._held.get(root)
            if held is not None and held[0] < round:
                self._kept[root] = max(round, self._kept.get(root, round))
            return held is not None

    def receive(self, root: bytes, length: int) -> IncomingPayload:
        """Begin a payload that arrives in pieces."""
        return IncomingPayload(self, root, length)

    def known_chunks(self, root: bytes) -> list[bytes] | None:
        """The chunk digests, where they are in memory. Never touches the disk."""
        return self._chunks.get(root)

    def has(self, root: bytes) -> bool:
        """Whether the payload is held whole and durable. Never touches the disk."""
        return root in self._held

    def roots(self) -> dict[bytes, Round]:
        """Every payload held, with the last round it is kept for."""
        return {root: self._last(root) for root in list(self._held)}

    def _last(self, root: bytes) -> Round:
        return self._kept.get(root, self._held[root][0])

    def _found(self, root: bytes) -> tuple[Round, int]:
        held = self._held.get(root)
        if held is None:
            raise StorageError(f"payload {root.hex()[:16]}… is not held", where=str(self.folder))
        return held

    def path(self, root: bytes) -> Path:
        """The file that holds exactly the payload's bytes."""
        return self.folder / str(self._found(root)[0]) / root.hex()

    def length(self, root: bytes) -> int:
        """Bytes of a held payload."""
        return self._found(root)[1]

    def get(self, root: bytes) -> bytes:
        """The payload, checked against its root; a damaged file raises and is never returned."""
        path = self.path(root)
        try:
            payload = path.read_bytes()
        except OSError as error:
            raise storage_error(error, path, "reading a payload") from error
        if payload_root(payload) != root:
            raise _damaged(path)
        return payload

    def chunks(self, root: bytes) -> list[bytes]:
        """Digests of the payload's 64 KiB chunks; from memory, or from one pass over the file."""
        known = self._chunks.get(root)
        if known is not None:
            return known
        path, length = self.path(root), self.length(root)
        chunks: list[bytes] = []
        try:
            with path.open("rb") as file:
                while block := file.read(READ_BYTES):
                    chunks += chunk_digests(block)
        except OSError as error:
            raise storage_error(error, path, "reading a payload") from error
        if root_of_chunks(length, chunks) != root:
            raise _damaged(path)
        self._remember(root, chunks)
        return chunks

    def collect(self, before: Round) -> int:
        """Remove payloads whose last round is earlier; returns the bytes freed."""
        with self._lock:
            return self._collect(before)

    def _collect(self, before: Round) -> int:
        freed = 0
        for root, (_, length) in list(self._held.items()):
            if self._last(root) < before:
                path = self.path(root)
                del self._held[root]
                self._kept.pop(root, None)
                self._chunks.pop(root, None)
                path.unlink(missing_ok=True)
                freed += length
        for folder in self.folder.iterdir():
            if folder.name.isdigit() and int(folder.name) < before:
                with contextlib.suppress(OSError):  # something in it is kept for longer
                    folder.rmdir()
        return freed


def _damaged(path: Path) -> StorageError:
    return StorageError(
        "the payload's bytes do not match its root",
        where=str(path),
        hint="delete this file: the peer fetches the payload again from the others",
    )
