"""A data connection's receiving half without sockets: what is kept of a transfer that ends early,
and what one peer may cost over all its connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from torchbft.node.transports import messages, metering
from torchbft.node.transports.framing import HEAD, frame
from torchbft.node.transports.messages import DATA, DONE, SEGMENT_BYTES, START, Done, Start
from torchbft.node.transports.metering import Meter, Quota
from torchbft.node.transports.transfer import PayloadLink, Receiving
from torchbft.primitives.digests import CHUNK_BYTES
from torchbft.primitives.ids import PeerId
from torchbft.primitives.wire import encode

ROOT, LENGTH = b"r" * 32, 2 * SEGMENT_BYTES
PEER = PeerId("peer")


class Transport(asyncio.Transport):
    """Notes whether it is read from."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__({"socket": sock})
        self.reading = True

    def write(self, data: Any) -> None: ...
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def abort(self) -> None: ...

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Sink(Receiving):
    """Takes segments and gives their buffers free at once."""

    def __init__(self) -> None:
        self.length, self.reached, self.got = LENGTH, 0, b""

    def segment(self, link: PayloadLink, data: memoryview, release: Callable[[], None]) -> None:
        self.reached += len(data)
        self.got += bytes(data)
        release()


class Plane:
    """What a link needs; every transfer goes to ``sink``."""

    def __init__(self) -> None:
        self.meter, self.limits = Meter(), messages.frame_limits(LENGTH)
        self.sink: Sink | None = Sink()
        self.told: list[object] = []
        self._quotas: dict[PeerId, Quota] = {}

    def quota(self, peer: PeerId) -> Quota:
        return self._quotas.setdefault(peer, Quota())

    def made(self, link: PayloadLink) -> None: ...
    def lost(self, link: PayloadLink) -> None: ...
    def misbehaved(self, link: PayloadLink, fault: object, reason: str) -> None:
        raise AssertionError(reason)

    def _note(self, link: PayloadLink, message: object) -> None:
        self.told.append(message)

    offered = wanted = done = refused = _note

    def started(self, link: PayloadLink, start: Start) -> Receiving | None:
        return self.sink

    def connect(self) -> tuple[PayloadLink, Transport]:
        link = PayloadLink(self, PEER)
        near, self.far = socket.socketpair()
        transport = Transport(near)
        link.connection_made(transport)
        return link, transport


@pytest.fixture
def plane() -> Plane:
    made: list[Plane] = []

    async def make() -> None:
        made.append(Plane())

    asyncio.run(make())
    return made[0]


def deliver(link: PayloadLink, data: bytes) -> None:
    view = memoryview(data)
    while view.nbytes:
        room = link.get_buffer(-1)
        taken = min(len(room), view.nbytes)
        room[:taken] = view[:taken]
        link.buffer_updated(taken)
        view = view[taken:]


BEGIN = frame(START, encode(Start(ROOT, LENGTH, 0, b"")))
BODY = bytes(range(256)) * (SEGMENT_BYTES // 256)
TICK = frame(DONE, encode(Done(ROOT)))


def in_loop(story: Callable[[], None]) -> None:
    async def run() -> None:
        story()

    asyncio.run(run())


def test_a_transfer_that_is_left_keeps_its_whole_chunks(plane: Plane) -> None:
    def story() -> None:
        link, _ = plane.connect()
        sink = plane.sink
        assert sink is not None
        half = 5 * CHUNK_BYTES + 17
        deliver(link, BEGIN + HEAD.pack(DATA, SEGMENT_BYTES) + BODY[:half])
        assert (sink.reached, link.partial(sink)) == (0, half)
        link.abandon(sink)
        assert sink.got == BODY[: 5 * CHUNK_BYTES]
        assert link.partial(sink) == 0
        link.abandon(sink)
        deliver(link, BODY[half:] + TICK)
        assert sink.got == BODY[: 5 * CHUNK_BYTES], "the rest falls on the floor"
        assert plane.told == [Done(ROOT)], "and the next frame is found"

    in_loop(story)


def test_small_frames_are_bounded_for_a_peer_and_not_for_a_connection(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metering, "FRAMES_BURST", 5.0)

    def story() -> None:
        first, transport = plane.connect()
        deliver(first, TICK * 5)
        assert transport.reading
        deliver(first, TICK * 3)
        assert not transport.reading
        first.connection_lost(None)
        second, again = plane.connect()
        assert again.reading
        deliver(second, TICK)
        assert not again.reading, "it finds its debt again"

    in_loop(story)


def test_a_paid_debt_and_only_that_lets_a_connection_be_read_again(plane: Plane) -> None:
    def story() -> None:
        link, transport = plane.connect()
        quota = plane.quota(PEER)
        link._spend(quota.unwanted, 10**9)
        link._spend(quota.frames, 10**6)
        link._rested()
        assert not transport.reading
        link._rested()
        assert transport.reading

    in_loop(story)


def test_announcements_that_nobody_waits_for_cost_as_unwanted_bytes(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metering, "DISCARD_BURST", float(len(BEGIN)))
    plane.sink = None

    def story() -> None:
        link, transport = plane.connect()
        deliver(link, BEGIN)
        assert transport.reading
        deliver(link, BEGIN)
        assert not transport.reading

    in_loop(story)
