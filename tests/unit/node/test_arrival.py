"""One payload on its way in, without sockets: order, lies, disk faults, and what survives them."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from torchbft.node.storage import durable
from torchbft.node.storage.payloads import PayloadStore
from torchbft.node.transports.arrival import Arrival
from torchbft.node.transports.messages import SEGMENT_BYTES, Start
from torchbft.node.transports.transfer import PayloadLink
from torchbft.primitives.digests import CHUNK_BYTES, chunk_digests, payload_root
from torchbft.primitives.errors import StorageError
from torchbft.primitives.ids import PeerId, Round

DATA = bytes(range(256)) * (3 * SEGMENT_BYTES // 256) + b"tail"
ROOT = payload_root(DATA)
CHUNKS = b"".join(chunk_digests(DATA))


class Owner:
    """Records what the arrival reports."""

    def __init__(self) -> None:
        self.lies: list[str] = []
        self.disk: list[StorageError] = []
        self.completed = 0
        self.idles = 0

    def lied(self, arrival: Arrival, link: PayloadLink, reason: str) -> None:
        self.lies.append(reason)

    def disk_failed(self, arrival: Arrival, error: StorageError) -> None:
        self.disk.append(error)

    def complete(self, arrival: Arrival) -> None:
        self.completed += 1

    def idle(self, arrival: Arrival) -> None:
        self.idles += 1


class Link:
    """Stands for a connection: only remembers that the rest of a transfer was let go."""

    peer = PeerId("peer")

    def __init__(self) -> None:
        self.abandoned = 0

    def abandon(self, receiving: object) -> None:
        self.abandoned += 1


class Case:
    """An arrival with a real store and thread, and helpers to feed it."""

    def __init__(self, folder: Path, executor: ThreadPoolExecutor, length: int = len(DATA)) -> None:
        self.store, self.owner, self.link = PayloadStore(folder), Owner(), Link()
        self.arrival = Arrival(ROOT, length, self.store, executor, self.owner)
        self.released = 0

    def begin(self) -> None:
        self.arrival.begin(cast(PayloadLink, self.link))
        start = Start(ROOT, len(DATA), self.arrival.reached, CHUNKS)
        assert self.arrival.takes(start) is None

    def feed(self, data: bytes) -> None:
        self.arrival.segment(cast(PayloadLink, self.link), memoryview(data), self._release)

    def feed_rest(self) -> None:
        for at in range(self.arrival.reached, len(DATA), SEGMENT_BYTES):
            self.feed(DATA[at : at + SEGMENT_BYTES])

    def _release(self) -> None:
        self.released += 1

    async def settle(self) -> None:
        await asyncio.wait_for(self.arrival.settled.wait(), 20)


def with_case(folder: Path, story: Callable[[Case], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        with ThreadPoolExecutor(1) as executor:
            await story(Case(folder, executor))

    asyncio.run(run())


def test_all_segments_make_the_payload_and_its_end_is_reported_once(tmp_path: Path) -> None:
    async def story(case: Case) -> None:
        case.begin()
        case.feed_rest()
        assert case.arrival.storing
        assert not case.arrival.free()
        await case.settle()
        assert (case.owner.completed, case.owner.idles, case.released) == (1, 0, 4)
        case.arrival.finish(Round(3))
        assert case.store.get(ROOT) == DATA
        assert case.store.roots() == {ROOT: 3}

    with_case(tmp_path, story)


def test_a_wrong_chunk_ends_the_attempt_and_what_came_before_it_stays(tmp_path: Path) -> None:
    async def story(case: Case) -> None:
        case.begin()
        attempt = case.arrival.attempt
        case.feed(DATA[:SEGMENT_BYTES])
        wrong = bytearray(DATA[SEGMENT_BYTES : 2 * SEGMENT_BYTES])
        wrong[5 * CHUNK_BYTES] ^= 1
        case.feed(bytes(wrong))
        case.feed(DATA[2 * SEGMENT_BYTES : 3 * SEGMENT_BYTES])  # on its way already
        case.feed(DATA[3 * SEGMENT_BYTES :])
        await case.settle()
        assert case.owner.lies == [f"its bytes after {SEGMENT_BYTES} do not match their digest"]
        assert attempt is not None
        assert attempt.result() is False
        assert case.arrival.reached == SEGMENT_BYTES
        assert (case.owner.completed, case.released) == (0, 4)
        assert case.arrival.free()
        case.begin()
        case.feed_rest()
        await case.settle()
        case.arrival.finish(Round(1))
        assert case.store.get(ROOT) == DATA

    with_case(tmp_path, story)


def test_a_new_attempt_waits_until_the_old_bytes_are_checked(tmp_path: Path) -> None:
    async def story(case: Case) -> None:
        case.begin()
        case.feed(DATA[:SEGMENT_BYTES])
        case.arrival.end(False)
        assert case.link.abandoned == 1
        assert not case.arrival.free(), "bytes are still being checked"
        await case.settle()
        assert case.arrival.free()
        assert case.owner.idles == 1
        assert case.arrival.reached == SEGMENT_BYTES

    with_case(tmp_path, story)


def test_after_a_disk_fault_everything_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(case: Case) -> None:
        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        case.begin()
        case.feed(DATA[:SEGMENT_BYTES])
        await case.settle()
        monkeypatch.setattr(durable.os, "pwrite", full)
        case.feed_rest()
        await case.settle()
        monkeypatch.undo()
        assert len(case.owner.disk) == 1, "what came after the fault was not even tried"
        assert "the disk is full" in str(case.owner.disk[0])
        assert case.owner.completed == 0
        case.arrival.restart()
        assert case.arrival.reached == 0
        assert list((tmp_path / "incoming").iterdir()) == []
        case.begin()
        case.feed_rest()
        await case.settle()
        case.arrival.finish(Round(1))
        assert case.store.get(ROOT) == DATA

    with_case(tmp_path, story)


def test_a_payload_with_a_missing_write_is_never_made_visible(tmp_path: Path) -> None:
    store = PayloadStore(tmp_path)
    incoming = store.receive(ROOT, len(DATA))
    incoming.write(0, DATA[:SEGMENT_BYTES])
    with pytest.raises(StorageError, match=f"{SEGMENT_BYTES} of {len(DATA)} bytes"):
        incoming.finish(Round(1), [])
    assert not store.has(ROOT)


@pytest.mark.parametrize(
    "start",
    [
        Start(ROOT, len(DATA) + 1, 0, CHUNKS),
        Start(ROOT, len(DATA), CHUNK_BYTES, CHUNKS),
        Start(ROOT, len(DATA), 0, CHUNKS[:-32]),
        Start(ROOT, len(DATA), 0, CHUNKS + bytes(32)),
        Start(ROOT, len(DATA), 0, CHUNKS[32:] + CHUNKS[:32]),
        Start(ROOT, len(DATA), 0, b""),
    ],
)
def test_only_the_payloads_own_digests_and_place_are_taken(tmp_path: Path, start: Start) -> None:
    async def story(case: Case) -> None:
        assert case.arrival.takes(start) is not None
        assert case.arrival.chunks == []

    with_case(tmp_path, story)


def test_what_is_dropped_leaves_no_file(tmp_path: Path) -> None:
    async def story(case: Case) -> None:
        case.begin()
        case.feed(DATA[:SEGMENT_BYTES])
        await case.settle()
        assert len(list((tmp_path / "incoming").iterdir())) == 1
        case.arrival.drop_file()
        case.feed(DATA[SEGMENT_BYTES : 2 * SEGMENT_BYTES])  # was already on its way
        await case.settle()
        assert list((tmp_path / "incoming").iterdir()) == []

    with_case(tmp_path, story)
