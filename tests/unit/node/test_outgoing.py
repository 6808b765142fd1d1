"""The sending half, on a socket whose other end reads when told to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from torchbft.node.transports.framing import HEAD, FrameDecoder, frame
from torchbft.node.transports.messages import (
    DATA,
    DONE,
    REFUSE,
    SEGMENT_BYTES,
    START,
    Start,
    frame_limits,
)
from torchbft.node.transports.outgoing import SENDS_QUEUED, SMALL_QUEUED, Outgoing, Sending
from torchbft.primitives.wire import decode

LENGTH = 2 * SEGMENT_BYTES + 12_345
LIMITS = frame_limits(LENGTH)


class Pipe(asyncio.Protocol):
    """A real transport over a socket pair, as the owner of a sending half."""

    def __init__(self, direct: bool) -> None:
        self._direct = direct
        self.counted = 0
        self.unreadable: list[bytes] = []
        self.aborted = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=0, low=0)
        descriptor = transport.get_extra_info("socket").fileno()
        self.outgoing = Outgoing(self, descriptor if self._direct else None)

    def pause_writing(self) -> None:
        self.outgoing.writable = False

    def resume_writing(self) -> None:
        self.outgoing.writable = True
        self.outgoing.wake()

    def write(self, data: memoryview) -> None:
        self.wrote(len(data))
        self.transport.write(bytes(data))

    def wrote(self, count: int) -> None:
        self.counted += count

    def cannot_read(self, sending: Sending) -> None:
        self.unreadable.append(sending.root)

    def abort(self, reason: str) -> None:
        self.aborted = reason
        self.transport.abort()


class Rig:
    def __init__(self, pipe: Pipe, far: socket.socket) -> None:
        self.pipe, self.far = pipe, far
        self.decoder = FrameDecoder(LIMITS)
        self.frames: list[tuple[int, bytes]] = []

    async def read_until(self, count: int) -> list[tuple[int, bytes]]:
        loop = asyncio.get_running_loop()
        while len(self.frames) < count:
            self.frames += self.decoder.feed(await loop.sock_recv(self.far, 100_000))
        return self.frames


def with_rig(direct: bool, story: Callable[[Rig], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        near, far = socket.socketpair()
        far.setblocking(False)
        near.setblocking(False)
        pipe = Pipe(direct)
        await asyncio.get_running_loop().create_connection(lambda: pipe, sock=near)
        async with asyncio.timeout(20):
            await story(Rig(pipe, far))
        pipe.outgoing.close()
        pipe.transport.abort()
        far.close()

    asyncio.run(run())


def sending(folder: Path, root: bytes, length: int = LENGTH, offset: int = 0) -> Sending:
    path = folder / root.hex()
    path.write_bytes(root * (length // len(root) + 1))
    with path.open("rb+") as file:
        file.truncate(length)
    return Sending(root, path, length, offset, [bytes(32)])


direct = pytest.mark.parametrize("direct", [True, False], ids=["sendfile", "through a buffer"])
A, B = b"a" * 32, b"b" * 32


@direct
def test_a_transfer_is_its_start_and_its_segments(tmp_path: Path, direct: bool) -> None:
    async def story(rig: Rig) -> None:
        job = sending(tmp_path, A)
        assert rig.pipe.outgoing.transfer(job)
        frames = await rig.read_until(4)
        assert [kind for kind, _ in frames] == [START, DATA, DATA, DATA]
        assert decode(frames[0][1], Start, limit=LIMITS[START]).length == LENGTH
        assert b"".join(body for _, body in frames[1:]) == job.path.read_bytes()
        while job.descriptor >= 0:
            await asyncio.sleep(0)
        assert rig.pipe.counted == sum(HEAD.size + len(body) for _, body in frames)
        assert not rig.pipe.outgoing._buffer.nbytes, "an idle connection holds no buffer"

    with_rig(direct, story)


@direct
def test_transfers_follow_one_another_from_their_offsets(tmp_path: Path, direct: bool) -> None:
    async def story(rig: Rig) -> None:
        rig.pipe.outgoing.transfer(sending(tmp_path, A, offset=2 * SEGMENT_BYTES))
        rig.pipe.outgoing.transfer(sending(tmp_path, B, length=10))
        rig.pipe.outgoing.transfer(sending(tmp_path, b"c" * 32, length=0))
        frames = await rig.read_until(5)
        assert [kind for kind, _ in frames] == [START, DATA, START, DATA, START]
        assert [len(body) for kind, body in frames if kind == DATA] == [12_345, 10]

    with_rig(direct, story)


@direct
def test_small_frames_go_between_segments(tmp_path: Path, direct: bool) -> None:
    """An answer need not wait for the end of a long payload."""

    async def story(rig: Rig) -> None:
        rig.pipe.outgoing.transfer(sending(tmp_path, A))
        await rig.read_until(1)
        assert rig.pipe.outgoing.small(frame(DONE, b"soon"))
        kinds = [kind for kind, _ in await rig.read_until(5)]
        assert sorted(kinds) == sorted([START, DATA, DATA, DATA, DONE])
        assert kinds[-1] == DATA

    with_rig(direct, story)


@direct
def test_a_stopped_transfer_ends_after_its_segment(tmp_path: Path, direct: bool) -> None:
    async def story(rig: Rig) -> None:
        job = sending(tmp_path, A)
        rig.pipe.outgoing.transfer(job)
        while rig.pipe.outgoing._active is not job or job.offset == 0:
            await asyncio.sleep(0)
        rig.pipe.outgoing.stop(A)
        rig.pipe.outgoing.transfer(sending(tmp_path, B, length=5))
        frames = await rig.read_until(4)
        assert [kind for kind, _ in frames] == [START, DATA, START, DATA]
        assert frames[3][1] == b"b" * 5

    with_rig(direct, story)


@direct
def test_a_file_that_is_gone_is_told_and_the_next_goes_out(tmp_path: Path, direct: bool) -> None:
    async def story(rig: Rig) -> None:
        gone = sending(tmp_path, A)
        gone.path.unlink()
        rig.pipe.outgoing.transfer(gone)
        rig.pipe.outgoing.transfer(sending(tmp_path, B, length=5))
        assert [kind for kind, _ in await rig.read_until(2)] == [START, DATA]
        assert rig.pipe.unreadable == [A]

    with_rig(direct, story)


def test_a_file_cut_short_before_a_segment_is_told(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        short = sending(tmp_path, A, length=100)
        short.path.write_bytes(b"x" * 60)
        rig.pipe.outgoing.transfer(short)
        while not rig.pipe.unreadable:
            await asyncio.sleep(0)
        assert rig.pipe.aborted == ""

    with_rig(False, story)


def test_a_file_cut_short_within_a_segment_ends_the_connection(tmp_path: Path) -> None:
    """The segment's length is already said: nothing else could be told from its bytes."""

    async def story(rig: Rig) -> None:
        short = sending(tmp_path, A, length=100)
        short.path.write_bytes(b"x" * 60)
        rig.pipe.outgoing.transfer(short)
        while not rig.pipe.aborted:
            await asyncio.sleep(0)
        assert "cannot be sent" in rig.pipe.aborted

    with_rig(True, story)


def test_what_waits_for_a_peer_is_bounded(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.pipe.outgoing.writable = False
        jobs = [sending(tmp_path, A, length=1) for _ in range(SENDS_QUEUED + 1)]
        taken = [rig.pipe.outgoing.transfer(job) for job in jobs]
        assert taken == [True] * SENDS_QUEUED + [False]
        small = [rig.pipe.outgoing.small(frame(REFUSE, b"")) for _ in range(SMALL_QUEUED + 1)]
        assert small == [True] * SMALL_QUEUED + [False]

    with_rig(True, story)


@direct
def test_what_was_not_sent_is_told_once(tmp_path: Path, direct: bool) -> None:
    async def story(rig: Rig) -> None:
        unsent: list[int] = []
        whole, cut, waiting = (sending(tmp_path, root) for root in (A, B, b"c" * 32))
        for job in (whole, cut, waiting):
            job.unsent = unsent.append
            assert rig.pipe.outgoing.transfer(job)
        await rig.read_until(4)
        while not unsent:
            await asyncio.sleep(0)
        assert unsent == [0]
        await rig.read_until(5)
        rig.pipe.outgoing.stop(B)
        rig.pipe.outgoing.close()
        assert sorted(unsent) == [0, LENGTH - cut.offset, LENGTH]
        assert cut.offset < LENGTH
        assert not rig.pipe.outgoing.transfer(waiting), "a closed connection takes none"

    with_rig(direct, story)
