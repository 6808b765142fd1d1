"""Any bytes, cut anywhere, on any kind of connection: values or one error, and bounded memory."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from torchbft.node.transports import messages
from torchbft.node.transports.framing import HEAD, FrameDecoder, frame
from torchbft.node.transports.messages import (
    DATA,
    DONE,
    OFFER,
    REFUSE,
    START,
    WANT,
    Done,
    Offer,
    Refuse,
    Start,
    Want,
)
from torchbft.node.transports.metering import Meter, Quota
from torchbft.node.transports.transfer import PayloadLink, Receiving
from torchbft.primitives.errors import DecodeError
from torchbft.primitives.evidence import Fault
from torchbft.primitives.ids import PeerId
from torchbft.primitives.wire import encode

LIMITS = {0: 16, 1: 100, 3: 0}
ROOT = b"r" * 32


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400), st.lists(st.integers(0, 10**6), max_size=8))
def test_any_stream_gives_frames_or_one_error(data: bytes, cuts: list[int]) -> None:
    decoder, frames = FrameDecoder(LIMITS), []
    try:
        for piece in pieces(data, cuts):
            frames += decoder.feed(piece)
            assert decoder.unfinished() <= HEAD.size + max(LIMITS.values())
    except DecodeError:
        return
    assert (
        b"".join(frame(kind, body) for kind, body in frames)
        == data[: len(data) - decoder.unfinished()]
    )


class Transport(asyncio.Transport):
    """Keeps what is written; answers as a socket would."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__({"socket": sock})
        self.written = bytearray()
        self.aborted = False

    def write(self, data: Any) -> None:
        self.written += data

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Sink(Receiving):
    def __init__(self, length: int) -> None:
        self.length, self.reached, self.got = length, 0, b""

    def segment(self, link: PayloadLink, data: memoryview, release: Callable[[], None]) -> None:
        self.reached += len(data)
        self.got += bytes(data)
        release()


class Owner:
    """Takes every offer of up to a kilobyte; counts what it is told."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.limits = {**messages.frame_limits(4096), DATA: 1024}
        self.told: list[object] = []
        self.faults: list[tuple[Fault, str]] = []
        self.sink: Sink | None = None
        self._quota = Quota()

    def quota(self, peer: PeerId) -> Quota:
        return self._quota

    def made(self, link: PayloadLink) -> None: ...
    def lost(self, link: PayloadLink) -> None: ...

    def _note(self, link: PayloadLink, message: object) -> None:
        self.told.append(message)

    offered = wanted = done = refused = _note

    def started(self, link: PayloadLink, start: Start) -> Receiving | None:
        self.told.append(start)
        if start.length > 1024 or start.offset > start.length:
            return None
        self.sink = Sink(start.length)
        self.sink.reached = start.offset
        return self.sink

    def misbehaved(self, link: PayloadLink, fault: Fault, reason: str) -> None:
        self.faults.append((fault, reason))
        link.abort(reason)


def deliver(data: bytes, cuts: list[int]) -> Owner:
    """Feed a data connection as a transport would."""

    async def story() -> Owner:
        owner = Owner()
        link = PayloadLink(owner, PeerId("peer"))
        near, far = socket.socketpair()
        link.connection_made(Transport(near))
        for piece in pieces(data, cuts):
            view = memoryview(piece)
            while view.nbytes and not link.reason:
                room = link.get_buffer(-1)
                assert 0 < len(room) <= max(owner.limits.values())
                taken = min(len(room), view.nbytes)
                room[:taken] = view[:taken]
                link.buffer_updated(taken)
                view = view[taken:]
        link.connection_lost(None)
        near.close()
        far.close()
        return owner

    return asyncio.run(story())


MESSAGES = st.one_of(
    st.builds(
        lambda length, round: frame(OFFER, encode(Offer(ROOT, length, round))),
        st.integers(0, 2**62),
        st.integers(0, 2**62),
    ),
    st.builds(lambda at: frame(WANT, encode(Want(ROOT, at))), st.integers(0, 2**62)),
    st.builds(
        lambda length, at, chunks: frame(START, encode(Start(ROOT, length, at, chunks))),
        st.integers(0, 2000),
        st.integers(0, 2000),
        st.binary(max_size=64),
    ),
    st.builds(lambda data: frame(DATA, data), st.binary(min_size=1, max_size=1024)),
    st.just(frame(DONE, encode(Done(ROOT)))),
    st.builds(lambda why: frame(REFUSE, encode(Refuse(ROOT, why))), st.text(max_size=40)),
    st.builds(HEAD.pack, st.integers(0, 255), st.integers(0, 2**32 - 1)),
    st.builds(frame, st.integers(0, 8), st.binary(max_size=80)),
    st.binary(max_size=40),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(MESSAGES, max_size=8), st.lists(st.integers(0, 10**6), max_size=8))
def test_a_data_connection_survives_any_frames(parts: list[bytes], cuts: list[int]) -> None:
    """Messages reach the owner whole and typed, or the connection ends with one named fault."""
    owner = deliver(b"".join(parts), cuts)
    assert len(owner.faults) <= 1
    assert all(isinstance(message, msgspec.Struct) for message in owner.told)
    if owner.sink is not None:
        assert owner.sink.reached <= owner.sink.length


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=1, max_size=1024), st.lists(st.integers(0, 10**6), max_size=12))
def test_a_payload_arrives_the_same_however_the_stream_is_cut(data: bytes, cuts: list[int]) -> None:
    start = frame(START, encode(Start(ROOT, len(data), 0, b"")))
    owner = deliver(start + frame(DATA, data) + frame(DONE, encode(Done(ROOT))), cuts)
    assert owner.faults == []
    assert owner.sink is not None
    assert owner.sink.got == data
    assert owner.told[-1] == Done(ROOT)
