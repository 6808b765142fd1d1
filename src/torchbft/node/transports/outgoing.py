"""The sending half of a data connection: small frames between segments, one transfer at a time.

In clear a segment goes from the file to the socket inside the kernel (``sendfile``); encrypted it
is read into one buffer and handed to TLS in pieces. Python's event loop gives no notice of room in
a socket that belongs to a transport, so when ``sendfile`` finds the socket full one piece goes
through the transport, which keeps it and calls ``resume_writing`` when it has left.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torchbft.node.transports.framing import HEAD, frame
from torchbft.node.transports.messages import DATA, SEGMENT_BYTES, START, Start
from torchbft.primitives.wire import encode

PIECE_BYTES = 64 * 1024
"""Handed to the transport at once: its copy, and the ciphertext, stay in the core's cache."""

SENDS_QUEUED = 64
"""Transfers waiting on one connection: one round of 64 members."""

SMALL_QUEUED = 1024
"""Small frames that wait for one peer: a round's offers and answers of 64 members, many times."""


@dataclass(slots=True)
class Sending:
    """A payload on its way out: the file, and the offset up to which segments were begun."""

    root: bytes
    path: Path
    length: int
    offset: int
    chunks: list[bytes]
    unsent: Callable[[int], None] = lambda count: None
    """Told once, at the end, how many bytes were not sent."""
    descriptor: int = -1
    stopped: bool = False

    def start(self) -> bytes:
        """Open the file; the START frame. Raises OSError."""
        self.descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        chunks = b"".join(self.chunks)
        return frame(START, encode(Start(self.root, self.length, self.offset, chunks)))

    def segment(self) -> int:
        """Begin the next segment: its size, 0 at the end."""
        size = 0 if self.stopped else min(SEGMENT_BYTES, self.length - self.offset)
        self.offset += size
        return size

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self.unsent(self.length - self.offset)
        self.unsent = lambda count: None


class OutgoingOwner(Protocol):
    """What the sending half needs from its connection."""

    def write(self, data: memoryview) -> None: ...
    def wrote(self, count: int) -> None: ...
    def cannot_read(self, sending: Sending) -> None: ...
    def abort(self, reason: str) -> None: ...


class Outgoing:
    """Sends for one connection. A turn of the loop sends one segment, so that votes never wait.

    socket: the descriptor to send files on directly; None where bytes must pass through TLS.
    ``writable``: in clear, the transport's own buffer is empty; encrypted, there is room in it.
    """

    def __init__(self, owner: OutgoingOwner, socket: int | None) -> None:
        self._owner, self._socket = owner, socket
        self._loop = asyncio.get_running_loop()
        self._small: list[bytes] = []
        self._queue: deque[Sending] = deque()
        self._active: Sending | None = None
        self._buffer = self._left = memoryview(b"")
        self._body = 0
        """Bytes of the active transfer's segment that are still to go from its file."""
        self.writable, self._scheduled, self._closed = True, False, False

    def small(self, data: bytes) -> bool:
        """Queue a small frame; False when too many wait, as the peer does not read."""
        self._small.append(data)
        self.wake()
        return len(self._small) <= SMALL_QUEUED

    def transfer(self, sending: Sending) -> bool:
        """Queue a transfer; False when too many wait."""
        if self._closed or len(self._queue) >= SENDS_QUEUED:
            return False
        self._queue.append(sending)
        self.wake()
        return True

    def stop(self, root: bytes) -> None:
        """End a transfer after its current segment."""
        for sending in (self._active, *self._queue):
            if sending is not None and sending.root == root:
                sending.stopped = True

    def close(self) -> None:
        """The connection is gone."""
        self._closed = True
        for sending in (self._active, *self._queue):
            if sending is not None:
                sending.close()
        self._active = None
        self._queue.clear()
        self._small.clear()
        self._buffer = self._left = memoryview(b"")

    def wake(self) -> None:
        """Go on sending in the loop's next turn."""
        if not self._scheduled and self.writable and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        if self._closed:
            return
        if not self._left.nbytes and not self._body:
            self._left = self._next()
        while self.writable and (self._left.nbytes or self._body):
            if self._left.nbytes:
                piece, self._left = self._left[:PIECE_BYTES], self._left[PIECE_BYTES:]
                self._owner.write(piece)
            elif not self._send_file():
                return
        if self._left.nbytes or self._body or self._small or self._active or self._queue:
            self.wake()

    def _next(self) -> memoryview:
        """What to write next. The buffer is free: TLS takes what it is given at once."""
        if self._small:
            data = b"".join(self._small)
            self._small.clear()
            return memoryview(data)
        try:
            if self._active is not None:
                return self._next_segment(self._active)
            if self._queue:
                self._active = self._queue.popleft()
                return memoryview(self._active.start())
        except OSError:
            if self._active is not None:
                self._owner.cannot_read(self._active)
                self._end()
        return memoryview(b"")

    def _next_segment(self, sending: Sending) -> memoryview:
        size = sending.segment()
        if size == 0:
            self._end()
            return memoryview(b"")
        head = HEAD.pack(DATA, size)
        if self._socket is not None:
            self._body = size
            return memoryview(head)
        if not self._buffer.nbytes:
            self._buffer = memoryview(bytearray(HEAD.size + SEGMENT_BYTES))
        framed = self._buffer[: HEAD.size + size]
        framed[: HEAD.size] = head
        if os.preadv(sending.descriptor, [framed[HEAD.size :]], sending.offset - size) != size:
            raise OSError("the payload's file is shorter than it was")
        return framed

    def _end(self) -> None:
        if self._active is not None:
            self._active.close()
        self._active = None
        if not self._queue:
            self._buffer = memoryview(b"")  # an idle connection holds no buffers

    def _send_file(self) -> bool:
        """Send file bytes of the segment that was begun; False when the connection must end."""
        sending = self._active
        if sending is None or self._socket is None:
            return False
        at = sending.offset - self._body
        try:
            sent = os.sendfile(self._socket, sending.descriptor, at, self._body)
            self._owner.wrote(sent)
        except BlockingIOError:
            piece = os.pread(sending.descriptor, min(PIECE_BYTES, self._body), at)
            sent = len(piece)
            self._owner.write(memoryview(piece))
        except OSError:
            sent = 0
        self._body -= sent
        if sent == 0:
            self._owner.abort("a segment that was begun cannot be sent")
        return sent > 0
