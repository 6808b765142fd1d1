"""The control channel: one live connection per pair of members for small messages.

Both members dial; the one with the lower name at once, the other after a moment. Of two live
connections between the same two processes the one that the lower name dialled stays, so both ends
keep the same. A peer that restarted says so by a new instance number, and its new connection
replaces what is left of the old (case C18).

Delivery is best effort: protocol machines send again. ``send`` never blocks; each peer has a
bounded queue whose messages expire, and what does not fit is dropped and counted. A peer that sends
more than its allowance is not read from until it is within it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections import deque
from collections.abc import Callable
from typing import Annotated, cast

import msgspec

from torchbft import __version__
from torchbft.node.transports.endpoint import CONTROL, Endpoint, UnreachableError
from torchbft.node.transports.framing import READ_BYTES, FrameDecoder, OversizedError, frame
from torchbft.node.transports.metering import Allowance, MeteredSocket, Plane
from torchbft.primitives.errors import DecodeError, MisuseError
from torchbft.primitives.evidence import Fault
from torchbft.primitives.ids import PeerId
from torchbft.primitives.wire import (
    MAX_CONTROL_BYTES,
    WIRE_VERSION,
    Bytes32,
    Wire,
    decode,
    encode,
)

HELLO, MESSAGE, PING, BYE = 0, 1, 2, 3
MAX_HELLO_BYTES = 256
MAX_BYE_BYTES = 256
LIMITS = {HELLO: MAX_HELLO_BYTES, MESSAGE: MAX_CONTROL_BYTES, PING: 0, BYE: MAX_BYE_BYTES}

QUEUE_MESSAGES = 4096
"""Per peer: a block's votes of 64 members, many times over."""

QUEUE_BYTES = 2 * MAX_CONTROL_BYTES
"""Per peer: the largest message, and one more while it leaves."""

QUEUE_SECONDS = 10.0
"""A message that waited longer is stale: its machine has sent it again or moved on."""

WRITE_BYTES = 256 * 1024
"""Handed to the transport at once, and where it asks us to pause."""

MESSAGES_PER_SECOND, MESSAGES_BURST = 5_000.0, 10_000.0
BYTES_PER_SECOND, BYTES_BURST = 16e6, 64e6
"""Read from one peer: several times what a run of 64 members sends, a fraction of what we can."""

HEARTBEAT_SECONDS = 2.0
IDLE_SECONDS = 10.0
"""Five heartbeats unheard: the connection is dead, whatever TCP believes."""

FIRST_WAIT, LONGEST_WAIT = 0.05, 5.0
"""Back-off between dials: a restarted peer is found at once, an absent one costs little."""

SECOND_DIALER_WAIT = 1.0
"""Head start of the lower name; the higher dials too, for it may be the only one who can."""

MISBEHAVED_WAIT = 5.0
"""No connection from or to a peer that broke the protocol or runs another run file."""

LINKS_PER_PEER = 4
"""Both dials, and both of the instance before a restart; beyond it the oldest gives way."""


class Hello(Wire, frozen=True):
    """First frame of each side: what must agree before anything else is said."""

    version: int
    run_id: Bytes32
    instance: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    software: Annotated[str, msgspec.Meta(max_length=64)]


class _Outbox:
    """Frames waiting for one peer, bounded in number, bytes and age."""

    def __init__(self) -> None:
        self._frames: deque[tuple[float, bytes]] = deque()
        self._bytes = 0
        self.dropped = 0

    def put(self, data: bytes, now: float) -> None:
        while self._frames and self._frames[0][0] < now - QUEUE_SECONDS:
            self._take()
            self.dropped += 1
        if len(self._frames) >= QUEUE_MESSAGES or self._bytes + len(data) > QUEUE_BYTES:
            self.dropped += 1
            return
        self._frames.append((now, data))
        self._bytes += len(data)

    def _take(self) -> bytes:
        data = self._frames.popleft()[1]
        self._bytes -= len(data)
        return data

    def batch(self, now: float) -> bytes:
        """Fresh frames up to WRITE_BYTES, at least one; empty when nothing waits."""
        taken: list[bytes] = []
        size = 0
        while self._frames and (not taken or size + len(self._frames[0][1]) <= WRITE_BYTES):
            fresh = self._frames[0][0] >= now - QUEUE_SECONDS
            data = self._take()
            if fresh:
                taken.append(data)
                size += len(data)
            else:
                self.dropped += 1
        return b"".join(taken)


class _Link(asyncio.BufferedProtocol):
    """One authenticated connection; live once both sides have said hello."""

    def __init__(self, channel: ControlChannel, peer: PeerId, dialled: bool) -> None:
        self._channel, self.peer, self.dialled = channel, peer, dialled
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._metered: MeteredSocket | None = None
        self._decoder = FrameDecoder(LIMITS)
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._messages, self._bytes = channel.allowances(peer)
        self.hello: Hello | None = None
        self.writable = True
        self.made = self.heard = self.wrote = self._loop.time()
        self.closed = asyncio.Event()
        self.reason = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BYTES)
        sock = transport.get_extra_info("socket")
        self._metered = self._channel.endpoint.meter.opened(Plane.CONTROL, sock)
        self.write(frame(HELLO, encode(self._channel.hello)))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self.reason:
            return  # closing: nothing more counts, and silence lets the sweep abort it
        self.heard = self._loop.time()
        if self._metered is not None:
            self._metered.read(nbytes)
        try:
            frames = self._decoder.feed(self._buffer[:nbytes])
            for kind, body in frames:
                if self.reason:
                    return
                self._take(kind, body)
        except OversizedError as error:
            self._channel.misbehaved(self, Fault.OVERSIZED, error.what)
            return
        except DecodeError as error:
            self._channel.misbehaved(self, None, error.what)
            return
        self._spend(len(frames), nbytes)

    def _take(self, kind: int, body: bytes) -> None:
        if kind == HELLO:
            if self.hello is not None:
                raise DecodeError("a second hello on one connection")
            self.hello = decode(body, Hello, limit=MAX_HELLO_BYTES)
            self._channel.greeted(self, self.hello)
        elif self.hello is None:
            raise DecodeError("a frame before the hello")
        elif kind == MESSAGE:
            self._channel.received(self, body)
        elif kind == BYE:
            reason = body.decode("utf-8", "replace") or "it closed the connection"
            self._channel.leave(self, reason)

    def _spend(self, frames: int, nbytes: int) -> None:
        wait = max(self._messages.spend(frames, self.heard), self._bytes.spend(nbytes, self.heard))
        if wait > 0 and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            self._loop.call_later(wait, self._resume)

    def _resume(self) -> None:
        self.heard = self._loop.time()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def write(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self.wrote = self._loop.time()
        if self._metered is not None:
            self._metered.wrote(len(data))
        self._transport.write(data)

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        self._channel.flush(self.peer)

    def close(self, reason: str, farewell: str = "") -> None:
        """Close, with a last frame that tells the peer why, if there is something to tell."""
        if self.reason or self._transport is None:
            return
        self.reason = reason
        if farewell:
            self.write(frame(BYE, farewell.encode()[:MAX_BYE_BYTES]))
        if self._metered is not None:
            self._metered.traffic()
        self._transport.close()

    def abort(self, reason: str) -> None:
        self.reason = self.reason or reason
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.reason = self.reason or _why_lost(exc, greeted=self.hello is not None)
        if self._metered is not None:
            self._channel.endpoint.meter.closed(Plane.CONTROL, self._metered)
        self.closed.set()
        self._channel.lost(self)


def _why_lost(error: Exception | None, *, greeted: bool) -> str:
    if not greeted:
        return "it closed the connection before a hello: is our key in its roster?"
    if error is None:
        return "it closed the connection"
    return f"the connection broke ({error.__class__.__name__})"


class ControlChannel:
    """Messages of at most ``MAX_CONTROL_BYTES`` between members, authenticated and encrypted.

    on_message(peer, bytes): a message arrived; called on the loop, must not block.
    on_peer(peer, connected): a peer became reachable, or ceased to be; after a peer's restart both
    are called, so that what it lost can be sent again.
    on_fault(peer, fault or None, reason): an authenticated peer broke the channel's rules.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        on_message: Callable[[PeerId, bytes], None],
        on_peer: Callable[[PeerId, bool], None] = lambda peer, connected: None,
        on_fault: Callable[[PeerId, Fault | None, str], None] = lambda peer, fault, reason: None,
    ) -> None:
        self.endpoint = endpoint
        self._on_message, self._on_peer, self._on_fault = on_message, on_peer, on_fault
        self._loop = asyncio.get_running_loop()
        instance = secrets.token_bytes(16)
        self.hello = Hello(WIRE_VERSION, endpoint.run_id, instance, f"torchbft {__version__}")
        self._live: dict[PeerId, _Link] = {}
        self._links: set[_Link] = set()
        self._outboxes: dict[PeerId, _Outbox] = {}
        self._flushing: set[PeerId] = set()
        self._keepers: dict[PeerId, asyncio.Task[None]] = {}
        self._reasons: dict[PeerId, str] = {}
        self._misbehaved: dict[PeerId, float] = {}
        self._arrivals: dict[PeerId, asyncio.Event] = {}
        self._allowances: dict[PeerId, tuple[Allowance, Allowance]] = {}
        self._closing = False
        self._sweeper = self._loop.call_later(HEARTBEAT_SECONDS, self._sweep)
        endpoint.serve(CONTROL, lambda peer: self._new_link(peer, dialled=False))

    # What the host calls

    def connect_all(self) -> None:
        """Keep a connection to every member of the roster, from now until ``close``.

        Call it again after the endpoint's roster changed: members that left are dropped.
        """
        peers = {peer for peer in self.endpoint.roster if peer != self.endpoint.me}
        for peer in set(self._keepers) - peers:
            self._keepers.pop(peer).cancel()
            self._outboxes.pop(peer, None)
            self._reasons.pop(peer, None)
        for link in list(self._links):
            if link.peer not in peers:
                link.close("it left the roster", "you left the roster")
        for peer in sorted(peers - set(self._keepers)):
            self._keepers[peer] = self._loop.create_task(self._keep(peer))

    def send(self, peer: PeerId, message: bytes) -> None:
        """Send when possible. Never blocks or fails; a full queue drops the message."""
        if len(message) > MAX_CONTROL_BYTES:
            raise MisuseError(f"a message of {len(message)} bytes; at most {MAX_CONTROL_BYTES}")
        self._queue(peer, frame(MESSAGE, message))

    def broadcast(self, message: bytes) -> None:
        """Send to every other member of the roster."""
        if len(message) > MAX_CONTROL_BYTES:
            raise MisuseError(f"a message of {len(message)} bytes; at most {MAX_CONTROL_BYTES}")
        data = frame(MESSAGE, message)
        for peer in self.endpoint.roster:
            if peer != self.endpoint.me:
                self._queue(peer, data)

    def connected(self) -> set[PeerId]:
        """Members with a live connection."""
        return set(self._live)

    def status(self) -> dict[PeerId, str]:
        """For each other member "connected", or one line that says why not."""
        others = (peer for peer in self.endpoint.roster if peer != self.endpoint.me)
        return {
            peer: "connected" if peer in self._live else self._reasons.get(peer, "not tried yet")
            for peer in others
        }

    def dropped(self) -> dict[PeerId, int]:
        """Messages that did not fit a peer's queue or grew stale in it."""
        return {peer: outbox.dropped for peer, outbox in self._outboxes.items() if outbox.dropped}

    async def close(self) -> None:
        """Say goodbye and close all connections. May be called twice."""
        self._closing = True
        self._sweeper.cancel()
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        self._keepers.clear()
        links = list(self._links)
        for link in links:
            link.close("we left", "it left")
        for link in links:
            try:
                await asyncio.wait_for(link.closed.wait(), FIRST_WAIT * 20)
            except TimeoutError:
                link.abort("we left")

    # Sending

    def _queue(self, peer: PeerId, data: bytes) -> None:
        if self._closing or peer not in self.endpoint.roster:
            return
        outbox = self._outboxes.get(peer)
        if outbox is None:
            outbox = self._outboxes[peer] = _Outbox()
        outbox.put(data, self._loop.time())
        if peer in self._live and peer not in self._flushing:
            self._flushing.add(peer)
            self._loop.call_soon(self.flush, peer)

    def flush(self, peer: PeerId) -> None:
        """Hand queued frames to the peer's transport until it asks to pause."""
        self._flushing.discard(peer)
        link, outbox = self._live.get(peer), self._outboxes.get(peer)
        while link is not None and outbox is not None and link.writable:
            data = outbox.batch(self._loop.time())
            if not data:
                return
            link.write(data)

    # What links report

    def _new_link(self, peer: PeerId, *, dialled: bool) -> _Link | None:
        if self._closing or self._misbehaved.get(peer, 0.0) > self._loop.time():
            return None
        mine = [link for link in self._links if link.peer == peer]
        if len(mine) >= LINKS_PER_PEER:
            min(mine, key=lambda link: link.made).abort("too many connections")
        link = _Link(self, peer, dialled)
        self._links.add(link)
        return link

    def allowances(self, peer: PeerId) -> tuple[Allowance, Allowance]:
        """Messages and bytes that may be read from a peer: on all its connections together."""
        fresh = (
            Allowance(MESSAGES_PER_SECOND, MESSAGES_BURST),
            Allowance(BYTES_PER_SECOND, BYTES_BURST),
        )
        return self._allowances.setdefault(peer, fresh)

    def greeted(self, link: _Link, hello: Hello) -> None:
        """Both ends are known: check that they run one run, and settle which connection stays."""
        if hello.version != WIRE_VERSION:
            reason = f"it speaks wire version {hello.version}, we {WIRE_VERSION} ({hello.software})"
            return self.misbehaved(link, None, reason)
        if hello.run_id != self.endpoint.run_id:
            theirs, ours = hello.run_id.hex()[:12], self.endpoint.run_id.hex()[:12]
            return self.misbehaved(link, None, f"it has another run file ({theirs}… not {ours}…)")
        before = self._live.get(link.peer)
        if before is None or before.hello is None:
            self._join(link)
        elif before.hello.instance != hello.instance:
            self.leave(before, "it restarted")
            self._join(link)
        elif self._by_lower_name(before) and not self._by_lower_name(link):
            link.close("a second connection", "a second connection")
        else:
            self._live[link.peer] = link
            before.close("replaced", "replaced")
        return None

    def _by_lower_name(self, link: _Link) -> bool:
        return link.dialled == (self.endpoint.me < link.peer)

    def _join(self, link: _Link) -> None:
        self._live[link.peer] = link
        self._reasons.pop(link.peer, None)
        self._arrivals.setdefault(link.peer, asyncio.Event()).set()
        self._on_peer(link.peer, True)
        self.flush(link.peer)

    def leave(self, link: _Link, reason: str, farewell: str = "") -> None:
        """Close a connection; if it was the live one, its peer is gone from now on."""
        if self._live.get(link.peer) is link:
            del self._live[link.peer]
            self._reasons[link.peer] = reason
            self._arrivals.setdefault(link.peer, asyncio.Event()).clear()
            self._on_peer(link.peer, False)
        link.close(reason, farewell)

    def received(self, link: _Link, message: bytes) -> None:
        """A message on any connection of a member: authentic, whichever connection stays."""
        self._on_message(link.peer, message)

    def misbehaved(self, link: _Link, fault: Fault | None, reason: str) -> None:
        """A member broke the channel's rules: report it, tell it, and let it cool down."""
        self._misbehaved[link.peer] = self._loop.time() + MISBEHAVED_WAIT
        self._reasons[link.peer] = reason
        self._on_fault(link.peer, fault, reason)
        self.leave(link, reason, f"refused: {reason}")

    def lost(self, link: _Link) -> None:
        """A connection ended, whoever ended it."""
        self._links.discard(link)
        if self._live.get(link.peer) is link:
            self.leave(link, link.reason)
        elif link.peer not in self._live:
            self._reasons[link.peer] = link.reason

    # Keeping connections

    async def _keep(self, peer: PeerId) -> None:
        """Dial a member whenever it is not connected, with growing pauses."""
        wait = FIRST_WAIT
        arrival = self._arrivals.setdefault(peer, asyncio.Event())
        if peer < self.endpoint.me:
            await _within(arrival, SECOND_DIALER_WAIT)
        while not self._closing:
            link = self._live.get(peer)
            if link is None:
                await self._try(peer, arrival)
            else:
                await link.closed.wait()
                if self._loop.time() - link.made > LONGEST_WAIT:
                    wait = FIRST_WAIT
            if peer not in self._live:
                cooling = self._misbehaved.get(peer, 0.0) - self._loop.time()
                await _within(arrival, max(cooling, wait * random.uniform(0.75, 1.25)))
                wait = min(2 * wait, LONGEST_WAIT)

    async def _try(self, peer: PeerId, arrival: asyncio.Event) -> None:
        """One dial, and a moment for the hello."""
        try:
            link = await self.endpoint.dial(
                peer, CONTROL, lambda name: self._new_link(name, dialled=True)
            )
        except UnreachableError as error:
            self._reasons[peer] = str(error)
            return
        lost = self._loop.create_task(cast(_Link, link).closed.wait())
        here = self._loop.create_task(arrival.wait())
        try:
            await asyncio.wait(
                {lost, here}, timeout=IDLE_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            lost.cancel()
            here.cancel()

    def _sweep(self) -> None:
        """Heartbeats, and the end of connections that are dead or never said hello."""
        now = self._loop.time()
        for link in list(self._links):
            if now - link.heard > IDLE_SECONDS:
                link.abort(f"it was silent for {IDLE_SECONDS:g} s")
            elif now - link.wrote >= HEARTBEAT_SECONDS and link.writable:
                link.write(frame(PING))
        self._sweeper = self._loop.call_later(HEARTBEAT_SECONDS, self._sweep)


async def _within(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, but not longer."""
    if seconds > 0:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), seconds)
