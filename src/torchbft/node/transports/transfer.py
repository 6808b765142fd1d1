"""One data connection: the receiving half, and the two halves' common end.

Both directions work alike and independently, whoever dialled; ``messages.py`` has what is said. In
one direction transfers follow one another; a START ends whatever was under way before it. Segments
are received straight into their buffers; at most ``SEGMENT_BUFFERS`` are being checked and written,
then the connection is not read from.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

from torchbft.node.transports.framing import HEAD, OversizedError, check_head, frame
from torchbft.node.transports.messages import (
    DATA,
    DONE,
    OFFER,
    REFUSE,
    SEGMENT_BYTES,
    START,
    WANT,
    Done,
    Offer,
    Refuse,
    Start,
    Want,
)
from torchbft.node.transports.metering import Allowance, Meter, MeteredSocket, Plane, Quota
from torchbft.node.transports.outgoing import Outgoing, Sending
from torchbft.primitives.digests import CHUNK_BYTES
from torchbft.primitives.errors import DecodeError
from torchbft.primitives.evidence import Fault
from torchbft.primitives.ids import PeerId
from torchbft.primitives.wire import Wire, decode, encode

SEGMENT_BUFFERS = 2
"""Per receiving connection: one fills while the disk takes the other."""

CIPHERTEXT_BYTES = 256 * 1024
"""Kept ready to send on an encrypted connection."""

DEAD_SECONDS = 10
"""Unacknowledged bytes or unanswered keep-alives end a connection after this long."""


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

    def quota(self, peer: PeerId) -> Quota: ...
    def made(self, link: PayloadLink) -> None: ...
    def lost(self, link: PayloadLink) -> None: ...
    def offered(self, link: PayloadLink, offer: Offer) -> None: ...
    def wanted(self, link: PayloadLink, want: Want) -> None: ...
    def started(self, link: PayloadLink, start: Start) -> Receiving | None: ...
    def done(self, link: PayloadLink, done: Done) -> None: ...
    def refused(self, link: PayloadLink, refuse: Refuse) -> None: ...
    def misbehaved(self, link: PayloadLink, fault: Fault, reason: str) -> None: ...


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
        self._quota = owner.quota(peer)
        self._rests = 0
        """Debts of its peer for which this connection is not read from."""
        self._outgoing: Outgoing | None = None
        self._head = memoryview(bytearray(HEAD.size))
        self._target, self._filled, self._kind = self._head, 0, -1
        self._pooled = False
        self._receiving: Receiving | None = None
        self._free: list[bytearray] = []
        self._lent = 0
        self._waiting_for_buffer = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # In clear, writable must mean that the transport holds nothing: file bytes pass it by. TLS
        # has taken what it was given into its ciphertext, and goes on better with some in store.
        tls = transport.get_extra_info("ssl_object") is not None
        self._transport.set_write_buffer_limits(high=CIPHERTEXT_BYTES if tls else 0, low=0)
        sock = transport.get_extra_info("socket")
        self._outgoing = Outgoing(self, None if tls else sock.fileno())
        _detect_death(sock)
        self._metered = self._owner.meter.opened(Plane.PAYLOAD, sock)
        self._owner.made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.reason = self.reason or "the connection was lost"
        if self._metered is not None:
            self._owner.meter.closed(Plane.PAYLOAD, self._metered)
        if self._outgoing is not None:
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

    def _lease(self) -> Callable[[], None]:
        """What gives the current buffer free, for whoever takes it over."""
        pooled, self._pooled = self._pooled, False
        return partial(self._release, cast(bytearray, self._target.obj)) if pooled else _nothing

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
        body, kind, release = self._target, self._kind, self._lease()
        self._aim(self._head)
        if kind == DATA:
            self._end_segment(body, release)
        else:
            self._dispatch(kind, bytes(body))

    def _end_segment(self, body: memoryview, release: Callable[[], None]) -> None:
        receiving = self._receiving
        if receiving is None:
            release()
            self._spend(self._quota.unwanted, len(body))
            return
        if receiving.reached + len(body) == receiving.length:
            self._receiving = None
        receiving.segment(self, body, release)

    def _spend(self, allowance: Allowance, amount: int) -> None:
        wait = allowance.spend(amount, self._loop.time())
        if wait > 0:
            self._rests += 1
            self._pause()
            self._loop.call_later(wait, self._rested)

    def _rested(self) -> None:
        self._rests -= 1
        self._resume()

    def _dispatch(self, kind: int, body: bytes) -> None:
        owner = self._owner
        self._spend(self._quota.frames, 1)
        if kind == START:
            start = decode(body, Start, limit=owner.limits[START])
            self._receiving = owner.started(self, start)
            if self._receiving is None:
                self._spend(self._quota.unwanted, len(body))
            elif start.offset == start.length:
                self._receiving = None
        elif kind == OFFER:
            owner.offered(self, decode(body, Offer))
        elif kind == WANT:
            owner.wanted(self, decode(body, Want))
        elif kind == DONE:
            owner.done(self, decode(body, Done))
        elif kind == REFUSE:
            owner.refused(self, decode(body, Refuse))

    def partial(self, receiving: Receiving) -> int:
        """Bytes of a transfer's segment that is still arriving."""
        arriving = self._receiving is receiving and self._kind == DATA
        return self._filled if arriving and self._target is not self._head else 0

    def abandon(self, receiving: Receiving) -> None:
        """Hand over the whole chunks of a segment that is still arriving, so that nothing of a slow
        line is lost; let what is left of the transfer fall on the floor."""
        if self._receiving is not receiving:
            return
        whole = self.partial(receiving) // CHUNK_BYTES * CHUNK_BYTES
        self._receiving = None
        if whole:
            body, rest, release = self._target, len(self._target) - self._filled, self._lease()
            self._aim(memoryview(bytearray(rest)))
            receiving.segment(self, body[:whole], release)

    def _pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _resume(self) -> None:
        open_ = self._transport is not None and not self._transport.is_closing()
        if self._transport is not None and open_ and not (self._waiting_for_buffer or self._rests):
            self._transport.resume_reading()

    # Sending

    def send(self, kind: int, message: Wire) -> None:
        """Send one small frame, between segments."""
        if self._outgoing is not None and not self._outgoing.small(frame(kind, encode(message))):
            self.abort("it does not read what it asks for")

    def serve(self, sending: Sending) -> None:
        """Send a payload after those that already wait."""
        if self._outgoing is None or not self._outgoing.transfer(sending):
            sending.close()
            self.send(REFUSE, Refuse(sending.root, "too many transfers wait"))

    def stop(self, root: bytes) -> None:
        """The receiver no longer wants it: end after the current segment."""
        if self._outgoing is not None:
            self._outgoing.stop(root)

    def cannot_read(self, sending: Sending) -> None:
        self.send(REFUSE, Refuse(sending.root, "its file cannot be read"))

    def pause_writing(self) -> None:
        if self._outgoing is not None:
            self._outgoing.writable = False

    def resume_writing(self) -> None:
        if self._outgoing is not None:
            self._outgoing.writable = True
            self._outgoing.wake()

    def write(self, data: memoryview) -> None:
        """For the sending half: through the transport."""
        if self._transport is not None and not self._transport.is_closing():
            self.wrote(len(data))
            self._transport.write(data)

    def wrote(self, count: int) -> None:
        """For the sending half: bytes went out."""
        self.moved += count
        if self._metered is not None:
            self._metered.wrote(count)


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
