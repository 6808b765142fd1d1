"""Payloads on disk, named by their root: what the ledger's digests point at.

    folder/ROUND/ROOT       a whole, checked, durable payload of that round
    folder/passing/ROOT     one of use for a while only: a copy of the agreed state
    folder/incoming/ROOT-N  one that is still arriving

What is passing or incoming is removed when the store is opened.

A payload becomes visible under its root only by a rename after its bytes are durable, so ``has``
means: held, whole, and still there after a crash. That is what an attestation claims.

``release`` lets go of old rounds: they are neither found nor served any more, and cost no memory.
The *files* of contributions stay as long as the run folder, for a verifier aggregates every round
again from them, perhaps years later, and needs one peer that kept them; when audit windows exist
they may end with those. Copies of the state prove nothing, since checkpoints are kept, and go.
"""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections import OrderedDict
from dataclasses import dataclass
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

INCOMING, PASSING = "incoming", "passing"
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

    def finish(self, round: Round, chunks: list[bytes], *, passing: bool = False) -> None:
        """Make the payload durable and visible; its chunk digests, checked, are remembered."""
        if self._written != self._length:
            raise StorageError(
                f"{self._written} of {self._length} bytes were written", where=str(self.path)
            )
        try:
            os.fdatasync(self._descriptor)
            self._close()
            with self._store._names:
                self._store._adopt(self.path, self._root, self._length, round, passing)
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


@dataclass(slots=True)
class _Held:
    path: Path
    length: int
    round: Round
    """The last one that it is kept for. Its file stays where it was put, for it may be open; after
    a restart it is kept for the round of its folder."""


class PayloadStore:
    """A folder of payloads. Calls block on the disk, and may come from several threads.

    All methods raise StorageError on disk faults; those that take
    a root raise it too when no such payload is held.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: dict[bytes, _Held] = {}
        self._chunks: OrderedDict[bytes, list[bytes]] = OrderedDict()
        self._serial = itertools.count()
        self._names = threading.Lock()
        """Held while files change their names, so that none is moved and removed at once."""
        self._lock = threading.Lock()
        """Held while what is known of them changes: never while the disk works."""
        try:
            for name in (INCOMING, PASSING):
                shutil.rmtree(folder / name, ignore_errors=True)
                (folder / name).mkdir(parents=True)
            self._index()
        except OSError as error:
            raise storage_error(error, folder, "opening the payload store") from error

    def _index(self) -> None:
        for path in self.folder.glob("*/*"):
            if path.parent.name.isdigit() and len(path.name) == 2 * DIGEST_BYTES:
                held = _Held(path, path.stat().st_size, Round(int(path.parent.name)))
                self._held[bytes.fromhex(path.name)] = held

    def _adopt(self, path: Path, root: bytes, length: int, round: Round, passing: bool) -> None:
        folder = self.folder / (PASSING if passing else str(round))
        if not folder.exists():
            folder.mkdir(exist_ok=True)
            sync_folder(self.folder)
        os.replace(path, folder / root.hex())
        sync_folder(folder)
        with self._lock:
            self._held[root] = _Held(folder / root.hex(), length, round)

    def _remember(self, root: bytes, chunks: list[bytes]) -> None:
        with self._lock:
            self._chunks[root] = chunks
            if len(self._chunks) > DIGEST_LISTS:
                self._chunks.popitem(last=False)

    def put(self, payload: Buffer, round: Round, *, passing: bool = False) -> bytes:
        """Store a payload for a round, durably; returns its root. Again is cheap and harmless.

        passing: it is of use for a while only, and its file goes with its round.
        """
        view = memoryview(payload).cast("B")
        chunks = chunk_digests(view)
        root = root_of_chunks(view.nbytes, chunks)
        if self.keep(root, round):
            return root
        incoming = IncomingPayload(self, root, view.nbytes)
        try:
            incoming.write(0, view)
            incoming.finish(round, chunks, passing=passing)
        except StorageError:
            incoming.drop()
            raise
        return root

    def keep(self, root: bytes, round: Round) -> bool:
        """Keep a held payload for a later round as well; False when it is not held. Never touches
        the disk."""
        with self._lock:
            held = self._held.get(root)
            if held is not None:
                held.round = max(round, held.round)
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
        return {root: held.round for root, held in list(self._held.items())}

    def _found(self, root: bytes) -> _Held:
        held = self._held.get(root)
        if held is None:
            raise StorageError(f"payload {root.hex()[:16]}… is not held", where=str(self.folder))
        return held

    def path(self, root: bytes) -> Path:
        """The file that holds exactly the payload's bytes."""
        return self._found(root).path

    def length(self, root: bytes) -> int:
        """Bytes of a held payload."""
        return self._found(root).length

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

    def release(self, before: Round) -> None:
        """Let go of payloads whose last round is earlier; the module says which files stay."""
        with self._names:
            with self._lock:
                old = {root: held for root, held in self._held.items() if held.round < before}
                for root in old:
                    del self._held[root]
                    self._chunks.pop(root, None)
            for held in old.values():
                if held.path.parent.name == PASSING:
                    _remove(held.path)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(error, path, "removing an old payload") from error


def _damaged(path: Path) -> StorageError:
    return StorageError(
        "the payload's bytes do not match its root",
        where=str(path),
        hint="delete this file: the peer fetches the payload again from the others",
    )
