"""One data connection: frames for offers and requests, and payload bytes without copies.

    OFFER   pusher   -> receiver   I hold this payload of mine; small ones follow at once
    WANT    receiver -> holder     send it, from this offset
    START   holder   -> receiver   root, length, offset and all chunk digests; then DATA to the end
    DATA    holder   -> receiver   the next segment, whole chunks
    DONE    receiver -> pusher     stored durably
    REFUSE  either   -> either     not held, not wanted, or no longer; with the reason

Both directions work alike and independently, whoever dialled. In one direction transfers follow one
another; a START ends whatever was under way before it. Segments are received straight into their
buffer and sent straight out of one; at most ``SEGMENT_BUFFERS`` wait for the disk, then the
connection is not read from.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol, cast

import msgspec

from torchbft.node.transports.framing import HEAD, OversizedError, check_head, frame
from torchbft.node.transports.metering import Allowance, Meter, MeteredSocket, Plane
from torchbft.primitives.digests import CHUNK_BYTES, DIGEST_BYTES
from torchbft.primitives.errors import DecodeError
from torchbft.primitives.evidence import Fault
from torchbft.primitives.ids import PeerId
from torchbft.primitives.wire import Bytes32, Count, Wire, decode, encode

OFFER, WANT, START, DATA, DONE, REFUSE = 1, 2, 3, 4, 5, 6

SEGMENT_BYTES = 16 * CHUNK_BYTES
"""1 MiB: large enough that Python's work per segment vanishes, small enough for a core's cache."""

SEGMENT_BUFFERS = 2
"""Per receiving connection: one fills while the disk takes the other."""

PIECE_BYTES, PIECE_BYTES_TLS = 256 * 1024, 64 * 1024
"""Handed to the transport at once: about what a socket buffer takes; less where it is encrypted
first, so that the ciphertext stays in the core's cache."""

EAGER_BYTES = SEGMENT_BYTES
"""Payloads up to this follow their offer without a round trip; the waste, if unwanted, is small."""

SENDS_QUEUED = 64
"""Transfers waiting on one connection: one round of 64 members."""

DISCARD_RATE, DISCARD_BURST = 1e6, 64e6
"""Unwanted bytes read from one peer per second, and at once: re-sent offers after a restart."""

SMALL_BYTES = 512
SMALL_QUEUED = 1024
"""Small frames that wait for one peer: a round's offers and answers of 64 members, many times."""

DEAD_SECONDS = 10
"""Unacknowledged bytes or unanswered keep-alives end a connection after this long."""


class Offer(Wire, frozen=True):
    root: Bytes32
    length: Count
    round: Count


class Want(Wire, frozen=True):
    root: Bytes32
    offset: Count


class Start(Wire, frozen=True):
    root: Bytes32
    length: Count
    offset: Count
    chunks: bytes


class Done(Wire, frozen=True):
    root: Bytes32


class Refuse(Wire, frozen=True):
    root: Bytes32
    reason: Annotated[str, msgspec.Meta(max_length=200)]


def chunk_count(length: int) -> int:
    """Number of 64 KiB chunks of a payload."""
    return -(-length // CHUNK_BYTES)


def frame_limits(max_payload: int) -> dict[int, int]:
    """Greatest body of each kind, for payloads of at most ``max_payload`` bytes."""
    small = dict.fromkeys((OFFER, WANT, DONE, REFUSE), SMALL_BYTES)
    digests = chunk_count(max_payload) * DIGEST_BYTES
    return {**small, START: SMALL_BYTES + digests, DATA: SEGMENT_BYTES}


class Receiving(Protocol):
    """A transfer that a link receives: where it stands, and who takes its bytes."""

    length: int
    reached: int

    def segment(self, link: PayloadLink, data: memoryview, release: Callable[[], None]) -> None:
        """Take the next segment; call ``release`` when its buffer may be used again."""


class LinkOwner(Protocol):
    """What a link needs from the data plane."""

    meter: Meter
    limits: dict[int, int]

    def made(self, link: PayloadLink) -> None: ...
    def lost(self, link: PayloadLink) -> None: ...
    def offered(self, link: PayloadLink, offer: Offer) -> None: ...
    def wanted(self, link: PayloadLink, want: Want) -> None: ...
    def started(self, link: PayloadLink, start: Start) -> Receiving | None: ...
    def done(self, link: PayloadLink, done: Done) -> None: ...
    def refused(self, link: PayloadLink, refuse: Refuse) -> None: ...
    def misbehaved(self, link: PayloadLink, fault: Fault, reason: str) -> None: ...


@dataclass(slots=True)
class Sending:
    """A payload on its way out: the file, and the offset that was read up to."""

    root: bytes
    path: Path
    length: int
    offset: int
    chunks: list[bytes]
    descriptor: int = -1
    stopped: bool = False

    def start(self) -> bytes:
        """Open the file; the START frame. Raises OSError."""
        self.descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        chunks = b"".join(self.chunks)
        return frame(START, encode(Start(self.root, self.length, self.offset, chunks)))

    def read(self, buffer: memoryview) -> memoryview:
        """The next DATA frame, in the buffer; empty at the end. Raises OSError."""
        size = min(SEGMENT_BYTES, self.length - self.offset)
        if size == 0 or self.stopped:
            return buffer[:0]
        HEAD.pack_into(buffer, 0, DATA, size)
        framed = buffer[: HEAD.size + size]
        if os.preadv(self.descriptor, [framed[HEAD.size :]], self.offset) != size:
            raise OSError("the payload's file is shorter than it was")
        self.offset += size
        return framed

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class _Outgoing:
    """The sending half: small frames go between segments, transfers one after another.

    A turn of the loop sends one segment, so that votes never wait for a payload.
    """

    def __init__(self, write: Callable[[memoryview], None], failed: Callable[[Sending], None]):
        self._write, self._failed = write, failed
        self.piece = PIECE_BYTES
        self._loop = asyncio.get_running_loop()
        self._small: list[bytes] = []
        self._queue: deque[Sending] = deque()
        self._active: Sending | None = None
        self._segment = self._left = memoryview(b"")
        self.writable, self._scheduled = True, False

    def small(self, data: bytes) -> bool:
        """Queue a small frame; False when too many wait, as the peer does not read."""
        self._small.append(data)
        self.wake()
        return len(self._small) <= SMALL_QUEUED

    def transfer(self, sending: Sending) -> bool:
        """Queue a transfer; False when too many wait."""
        if len(self._queue) >= SENDS_QUEUED:
            return False
        self._queue.append(sending)
        self.wake()
        return True

    def stop(self, root: bytes) -> None:
        for sending in (self._active, *self._queue):
            if sending is not None and sending.root == root:
                sending.stopped = True

    def close(self) -> None:
        for sending in (self._active, *self._queue):
            if sending is not None:
                sending.close()
        self._active = None
        self._queue.clear()
        self._small.clear()
        self._segment = self._left = memoryview(b"")

    def wake(self) -> None:
        if not self._scheduled and self.writable:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        if not self._left.nbytes:
            self._left = self._next()
        while self._left.nbytes and self.writable:
            piece, self._left = self._left[: self.piece], self._left[self.piece :]
            self._write(piece)
        if self._left.nbytes or self._small or self._active or self._queue:
            self.wake()

    def _next(self) -> memoryview:
        """What to send next. The segment buffer is free: the transport's own buffer is empty."""
        if self._small:
            data = b"".join(self._small)
            self._small.clear()
            return memoryview(data)
        if self._active is None and self._queue:
            self._active = self._queue.popleft()
            return self._attempt(self._active, lambda sending: memoryview(sending.start()))
        if self._active is not None:
            if not self._segment.nbytes:
                self._segment = memoryview(bytearray(HEAD.size + SEGMENT_BYTES))
            return self._attempt(self._active, lambda sending: sending.read(self._segment))
        return memoryview(b"")

    def _attempt(self, sending: Sending, step: Callable[[Sending], memoryview]) -> memoryview:
        try:
            data = step(sending)
        except OSError:
            data = memoryview(b"")
            self._failed(sending)
        if not data.nbytes:
            sending.close()
            self._active = None
            if not self._queue:
                self._segment = data  # an idle connection holds no buffers
        return data


class PayloadLink(asyncio.BufferedProtocol):
    """An authenticated data connection to one peer."""

    def __init__(self, owner: LinkOwner, peer: PeerId) -> None:
        self._owner, self.peer = owner, peer
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._metered: MeteredSocket | None = None
        self.moved = 0
        """Bytes read and written so far: whether anything moves."""
        self.reason = ""
        self._unwanted = Allowance(DISCARD_RATE, DISCARD_BURST)
        self._outgoing = _Outgoing(self._write, self._cannot_read)
        self._head = memoryview(bytearray(HEAD.size))
        self._target, self._filled, self._kind = self._head, 0, -1
        self._pooled = False
        self._receiving: Receiving | None = None
        self._free: list[bytearray] = []
        self._lent = 0
        self._waiting_for_buffer = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Writable must mean that nothing is left in the transport, as the segment buffer is used
        # again: plain transports pause above the mark, TLS transports at it.
        tls = transport.get_extra_info("ssl_object") is not None
        self._transport.set_write_buffer_limits(high=1 if tls else 0, low=0)
        self._outgoing.piece = PIECE_BYTES_TLS if tls else PIECE_BYTES
        sock = transport.get_extra_info("socket")
        _detect_death(sock)
        self._metered = self._owner.meter.opened(Plane.PAYLOAD, sock)
        self._owner.made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.reason = self.reason or "the connection was lost"
        if self._metered is not None:
            self._owner.meter.closed(Plane.PAYLOAD, self._metered)
        self._outgoing.close()
        self._receiving = None
        self._owner.lost(self)

    def abort(self, reason: str) -> None:
        """End the connection at once; what was under way is resumed elsewhere."""
        self.reason = self.reason or reason
        if self._transport is not None:
            if self._metered is not None:
                self._metered.traffic()
            self._transport.abort()

    # Receiving

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._target[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        self.moved += nbytes
        if self._metered is not None:
            self._metered.read(nbytes)
        if self._filled < len(self._target) or self.reason:
            self._filled %= len(self._target)  # once closing, bytes fall into the same place
            return
        try:
            if self._target is self._head:
                self._begin(*HEAD.unpack(self._head))
            else:
                self._end()
        except OversizedError as error:
            self._owner.misbehaved(self, Fault.OVERSIZED, error.what)
        except DecodeError as error:
            self._owner.misbehaved(self, Fault.WITHHELD, error.what)

    def _aim(self, target: memoryview) -> None:
        """Receive into this from now on."""
        self._target, self._filled = target, 0

    def _begin(self, kind: int, length: int) -> None:
        """A head is complete: make room for its body."""
        check_head(kind, length, self._owner.limits)
        if length == 0:
            raise DecodeError(f"an empty frame of kind {kind}")
        self._kind, self._filled = kind, 0
        if kind == DATA and self._receiving is not None:
            self._expect_segment(self._receiving, length)
        else:
            self._aim(memoryview(bytearray(length)))

    def _expect_segment(self, receiving: Receiving, length: int) -> None:
        if length != min(SEGMENT_BYTES, receiving.length - receiving.reached):
            raise DecodeError(f"a segment of {length} bytes at offset {receiving.reached}")
        if length < SEGMENT_BYTES:
            self._aim(memoryview(bytearray(length)))
        elif self._lent < SEGMENT_BUFFERS:
            self._lend()
        else:
            self._waiting_for_buffer = True
            self._pause()

    def _lend(self) -> None:
        self._lent += 1
        self._pooled = True
        self._aim(memoryview(self._free.pop() if self._free else bytearray(SEGMENT_BYTES)))

    def _release(self, buffer: bytearray) -> None:
        """A full-size buffer is free again."""
        self._lent -= 1
        self._free.append(buffer)
        if self._waiting_for_buffer:
            self._waiting_for_buffer = False
            self._lend()
            self._resume()
        elif self._receiving is None:
            self._free.clear()  # an idle connection holds no buffers

    def _end(self) -> None:
        """A body is complete."""
        body, kind, pooled = self._target, self._kind, self._pooled
        self._aim(self._head)
        self._pooled = False
        if kind == DATA:
            buffer = cast(bytearray, body.obj)
            self._end_segment(body, partial(self._release, buffer) if pooled else _nothing)
        else:
            self._dispatch(kind, bytes(body))

    def _end_segment(self, body: memoryview, release: Callable[[], None]) -> None:
        receiving = self._receiving
        if receiving is None:
            release()
            self._discard(len(body))
            return
        if receiving.reached + len(body) == receiving.length:
            self._receiving = None
        receiving.segment(self, body, release)

    def _discard(self, nbytes: int) -> None:
        wait = self._unwanted.spend(nbytes, self._loop.time())
        if wait > 0:
            self._pause()
            self._loop.call_later(wait, self._resume)

    def _dispatch(self, kind: int, body: bytes) -> None:
        owner = self._owner
        if kind == START:
            start = decode(body, Start, limit=owner.limits[START])
            self._receiving = owner.started(self, start)
            if self._receiving is not None and start.offset == start.length:
                self._receiving = None
        elif kind == OFFER:
            owner.offered(self, decode(body, Offer))
        elif kind == WANT:
            owner.wanted(self, decode(body, Want))
        elif kind == DONE:
            owner.done(self, decode(body, Done))
        elif kind == REFUSE:
            owner.refused(self, decode(body, Refuse))

    def abandon(self, receiving: object) -> None:
        """Let what is left of a transfer fall on the floor."""
        if self._receiving is receiving:
            self._receiving = None

    def _pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _resume(self) -> None:
        open_ = self._transport is not None and not self._transport.is_closing()
        if self._transport is not None and open_ and not self._waiting_for_buffer:
            self._transport.resume_reading()

    # Sending

    def send(self, kind: int, message: Wire) -> None:
        """Send one small frame, between segments."""
        if not self._outgoing.small(frame(kind, encode(message))):
            self.abort("it does not read what it asks for")

    def serve(self, sending: Sending) -> None:
        """Send a payload after those that already wait."""
        if not self._outgoing.transfer(sending):
            self.send(REFUSE, Refuse(sending.root, "too many transfers wait"))

    def stop(self, root: bytes) -> None:
        """The receiver no longer wants it: end after the current segment."""
        self._outgoing.stop(root)

    def _cannot_read(self, sending: Sending) -> None:
        self.send(REFUSE, Refuse(sending.root, "its file cannot be read"))

    def pause_writing(self) -> None:
        self._outgoing.writable = False

    def resume_writing(self) -> None:
        self._outgoing.writable = True
        self._outgoing.wake()

    def _write(self, data: memoryview) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self.moved += len(data)
        if self._metered is not None:
            self._metered.wrote(len(data))
        self._transport.write(data)


def _nothing() -> None:
    """A segment's own buffer needs no release."""


def _detect_death(sock: socket.socket) -> None:
    """Let the kernel end a connection whose other end is gone without a word, where it can."""
    options = {"TCP_KEEPIDLE": DEAD_SECONDS // 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {**options, "TCP_USER_TIMEOUT": 1000 * DEAD_SECONDS}.items():
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
