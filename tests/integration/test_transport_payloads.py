"""The data plane over real sockets on loopback: whole or not at all (C09, C17, C24).

Every wait is for an event, bounded by LIMIT; nothing sleeps and nothing measures time.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from torchbft.node.storage.payloads import PayloadStore
from torchbft.node.transports import data as data_module
from torchbft.node.transports import endpoint as endpoint_module
from torchbft.node.transports import holders as holders_module
from torchbft.node.transports import messages, metering
from torchbft.node.transports.challenge import prove_as_dialer
from torchbft.node.transports.data import ROUNDS_SERVED, DataPlane
from torchbft.node.transports.endpoint import (
    PAYLOADS,
    PAYLOADS_CLEAR,
    Contact,
    Endpoint,
    UnreachableError,
)
from torchbft.node.transports.framing import HEAD, frame
from torchbft.node.transports.introduction import introduction
from torchbft.node.transports.messages import (
    DATA,
    OFFER,
    SEGMENT_BYTES,
    START,
    WANT,
    Offer,
    Start,
    Want,
)
from torchbft.node.transports.metering import Meter, Plane
from torchbft.primitives.digests import (
    CHUNK_BYTES,
    chunk_digests,
    payload_root,
    root_of_chunks,
)
from torchbft.primitives.errors import StorageError
from torchbft.primitives.evidence import Fault
from torchbft.primitives.ids import PeerId, Round
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.wire import encode

LIMIT = 30.0
"""Seconds that any wait may take before the test fails: far more than a busy machine needs."""

RUN = bytes(32)
MAX = 8 * 1024 * 1024
A, B, C, D = (PeerId(name) for name in "abcd")


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LIMIT):
            await story()

    asyncio.run(bounded())


def key_of(name: str) -> SigningKey:
    return SigningKey.derive(bytes(32), name)


def payload(size: int, seed: int = 0) -> bytes:
    """Bytes of which no two chunks are equal."""
    return random.Random(seed).randbytes(size)


class Member:
    """One peer's endpoint, store and data plane, recording what is reported."""

    def __init__(
        self, name: PeerId, roster: dict[PeerId, Contact], folder: Path, encrypt: bool
    ) -> None:
        self.name, self.meter = name, Meter()
        self.endpoint = Endpoint(name, key_of(name), roster, run_id=RUN, meter=self.meter)
        self.store = PayloadStore(folder / name)
        self.stored: asyncio.Queue[tuple[PeerId | None, bytes]] = asyncio.Queue()
        self.faults: asyncio.Queue[tuple[PeerId, Fault, str]] = asyncio.Queue()
        self.disk_errors: asyncio.Queue[StorageError] = asyncio.Queue()
        self.plane = DataPlane(
            self.endpoint,
            self.store,
            encrypt=encrypt,
            max_payload=MAX,
            on_stored=lambda peer, root: self.stored.put_nowait((peer, root)),
            on_fault=lambda peer, fault, reason: self.faults.put_nowait((peer, fault, reason)),
            on_disk_error=self.disk_errors.put_nowait,
        )

    @property
    def port(self) -> int:
        return int(self.endpoint._sockets[0].getsockname()[1])

    def meets(self, peer: PeerId, port: int) -> None:
        """Learn another port for a peer."""
        contact = Contact("127.0.0.1", port, key_of(peer).public)
        self.endpoint.update_roster({**self.endpoint.roster, peer: contact})


@asynccontextmanager
async def swarm(folder: Path, *names: PeerId, encrypt: bool = False) -> AsyncIterator[list[Member]]:
    roster = {name: Contact("127.0.0.1", 0, key_of(name).public) for name in names}
    members = [Member(name, roster, folder, encrypt) for name in names]
    for member in members:
        await member.endpoint.listen("127.0.0.1", 0)
    for member in members:
        for other in members:
            member.meets(other.name, other.port)
    try:
        yield members
    finally:
        await asyncio.gather(*(member.plane.close() for member in members))
        await asyncio.gather(*(member.endpoint.close() for member in members))


both = pytest.mark.parametrize("encrypt", [True, False], ids=["encrypted", "clear"])
SIZES = [0, 1, CHUNK_BYTES, SEGMENT_BYTES, SEGMENT_BYTES + 1, 3 * SEGMENT_BYTES + CHUNK_BYTES + 7]


@both
def test_what_is_pushed_is_held_durably_by_all(tmp_path: Path, encrypt: bool) -> None:
    async def story() -> None:
        async with swarm(tmp_path, A, B, C, encrypt=encrypt) as (a, b, c):
            for number, size in enumerate(SIZES):
                data = payload(size, number)
                root = a.store.put(data, Round(number))
                a.plane.push(root, [A, B, C], (Round(number), A))
                for member in (b, c):
                    member.plane.advance(Round(number))
                    assert await member.stored.get() == (A, root)
                    assert member.store.get(root) == data
                    assert member.store.roots()[root] == number
                while a.plane.delivered(root) != {B, C}:
                    await asyncio.sleep(0)
            assert a.stored.empty()
            assert PayloadStore(tmp_path / "b").roots() == b.store.roots()

    run(story)


@both
def test_what_the_ledger_names_is_fetched_from_whoever_holds_it(
    tmp_path: Path, encrypt: bool
) -> None:
    async def story() -> None:
        async with swarm(tmp_path, A, B, C, encrypt=encrypt) as (a, b, c):
            for number, size in enumerate(SIZES):
                data = payload(size, number)
                root = a.store.put(data, Round(1))
                c.plane.fetch(root, size, [B, A], (Round(1), A))  # B does not hold it
                assert await c.stored.get() == (A, root)
                assert c.store.get(root) == data
            assert b.store.roots() == {}
            assert c.faults.empty()

    run(story)


def test_all_push_to_all_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(tmp_path, A, B, C, D) as members:
            roots = set()
            for seed, member in enumerate(members):
                root = member.store.put(payload(2 * SEGMENT_BYTES + 5, seed), Round(1))
                roots.add(root)
                member.plane.push(root, [A, B, C, D], (Round(1), member.name))
            for member in members:
                for _ in range(3):
                    await member.stored.get()
                assert set(member.store.roots()) == roots

    run(story)


def test_a_fetch_begun_before_anyone_holds_the_payload_ends_when_one_does(tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(tmp_path, A, B) as (a, b):
            data = payload(CHUNK_BYTES * 3)
            root = payload_root(data)
            b.plane.fetch(root, len(data), [A], (Round(1), A))
            while not a.plane._links.get(B):
                await asyncio.sleep(0)
            a.store.put(data, Round(1))
            assert await b.stored.get() == (A, root)

    run(story)


def test_a_held_payload_is_reported_at_once_and_kept_for_the_later_round(tmp_path: Path) -> None:
    """Two authors with the same bytes: sent twice, stored once, reported for both."""

    async def story() -> None:
        async with swarm(tmp_path, A, B, C) as (a, b, c):
            data = payload(1000)
            root = a.store.put(data, Round(1))
            c.store.put(data, Round(1))
            a.plane.push(root, [B], (Round(1), A))
            assert await b.stored.get() == (A, root)
            c.plane.push(root, [B], (Round(2), C))
            assert await b.stored.get() == (C, root)
            b.plane.fetch(root, len(data), [A], (Round(3), A))
            assert await b.stored.get() == (None, root)
            assert b.store.roots() == {root: 3}

    run(story)


# Connections that break (C17, C24)


class Cut:
    """A proxy to a port that passes ``limit`` bytes of answers on its first connection, then
    breaks it: closes it, or falls silent. Later connections pass whole. Counts the answers."""

    def __init__(self, port: int, limit: int, *, silent: bool = False) -> None:
        self._port, self._limit, self._silent = port, limit, silent
        self.answered: list[int] = []
        self.broken = asyncio.Event()

    async def __aenter__(self) -> Cut:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        number = len(self.answered)
        self.answered.append(0)
        asking = asyncio.create_task(self._pass(reader, up_writer, None, number))
        await self._pass(upstream, writer, None if number else self._limit, number)
        if self._silent and not number:
            self.broken.set()
            await asking
        asking.cancel()
        for side in (writer, up_writer):
            side.close()
        self.broken.set()

    async def _pass(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        limit: int | None,
        number: int,
    ) -> None:
        passed = 0
        try:
            while piece := await source.read(65536):
                piece = piece if limit is None else piece[: limit - passed]
                passed += len(piece)
                sink.write(piece)
                await sink.drain()
                if sink is not source and limit is not None and passed >= limit:
                    break
        except OSError:
            pass
        if limit is not None or number:
            self.answered[number] += passed


HANDSHAKE = 32 + 64
"""Answer bytes of the challenge in clear."""

LONG = 4 * SEGMENT_BYTES + 3 * CHUNK_BYTES + 11


def announcement(size: int) -> int:
    digests = b"x" * 32 * messages.chunk_count(size)
    return len(frame(START, encode(Start(bytes(32), size, 0, digests))))


@pytest.mark.parametrize(
    ("place", "segments"),
    [("0", 0), ("1", 0), ("first chunk", 0), ("half", 2), ("last but one", 4)],
)
def test_c17_a_connection_cut_at_any_byte_is_resumed_from_the_segment_reached(
    tmp_path: Path, place: str, segments: int
) -> None:
    async def story() -> None:
        async with swarm(tmp_path, A, B) as (a, b):
            data = payload(LONG)
            root = a.store.put(data, Round(1))
            whole = HANDSHAKE + announcement(LONG) + LONG + 5 * HEAD.size
            at = {
                "0": HANDSHAKE,
                "1": HANDSHAKE + 1,
                "first chunk": HANDSHAKE + announcement(LONG) + CHUNK_BYTES,
                "half": HANDSHAKE + announcement(LONG) + LONG // 2 + SEGMENT_BYTES // 4,
                "last but one": whole - 1,
            }[place]
            offsets: list[int] = []
            refusal = a.plane._refusal
            a.plane._refusal = (  # type: ignore[method-assign]
                lambda peer, want: offsets.append(want.offset) or refusal(peer, want)
            )
            async with Cut(a.port, at) as cut:
                b.meets(A, cut.port)
                b.plane.fetch(root, len(data), [A], (Round(1), A))
                assert await b.stored.get() == (A, root)
            assert b.store.get(root) == data
            assert len(cut.answered) == 2, "the first connection was cut, the second was not"
            assert offsets[-1] == segments * SEGMENT_BYTES
            assert b.faults.empty()

    run(story)


@pytest.mark.parametrize("silent", [False, True], ids=["closes", "falls silent"])
def test_c24_a_holder_that_dies_at_half_is_replaced_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    monkeypatch.setattr(data_module, "STALL_SECONDS", 0.3)

    async def story() -> None:
        async with swarm(tmp_path, A, B, C) as (a, b, c):
            data = payload(LONG)
            root = a.store.put(data, Round(1))
            c.store.put(data, Round(1))
            asked: list[int] = []
            refusal = c.plane._refusal
            c.plane._refusal = (  # type: ignore[method-assign]
                lambda peer, want: asked.append(want.offset) or refusal(peer, want)
            )
            async with Cut(a.port, HANDSHAKE + LONG // 2, silent=silent) as cut:
                b.meets(A, cut.port)
                b.plane.fetch(root, len(data), [A], (Round(1), A))
                await cut.broken.wait()
                b.meets(A, 1)  # and it never comes back
                b.plane.fetch(root, len(data), [C], (Round(1), A))
                assert await b.stored.get() == (C, root)
            assert b.store.get(root) == data
            assert len(asked) == 1
            assert asked[0] >= 2 * SEGMENT_BYTES, "what had come from a was kept"

    run(story)


def test_c24_a_push_whose_sender_dies_is_finished_by_a_fetch(tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(tmp_path, A, B, C) as (a, b, c):
            data = payload(LONG)
            root = a.store.put(data, Round(1))
            c.store.put(data, Round(1))
            a.plane.push(root, [B], (Round(1), A))
            while not any(arrival.reached for arrival in b.plane._arrivals.values()):
                await asyncio.sleep(0)
            await a.plane.close()
            b.plane.fetch(root, len(data), [A, C], (Round(1), A))
            assert await b.stored.get() == (C, root)
            assert b.store.get(root) == data

    run(story)


def test_a_pusher_finds_a_receiver_that_comes_late(tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(tmp_path, A, B) as (a, b):
            port = b.port
            await b.endpoint.close()
            root = a.store.put(payload(100), Round(1))
            a.plane.push(root, [B], (Round(1), A))
            while not a.plane._dials:
                await asyncio.sleep(0)
            await asyncio.wait(list(a.plane._dials.values()))
            await b.endpoint.listen("127.0.0.1", port)
            assert await b.stored.get() == (A, root)

    run(story)


# Peers that lie


def damage(member: Member, root: bytes, at: int) -> None:
    """Change a byte of a held payload; its digests in memory stay the true ones."""
    member.store.chunks(root)
    path = member.store.path(root)
    whole = bytearray(path.read_bytes())
    whole[at] ^= 1
    path.write_bytes(whole)


@both
def test_a_wrong_chunk_is_refused_reported_and_fetched_from_another(
    tmp_path: Path, encrypt: bool
) -> None:
    async def story() -> None:
        async with swarm(tmp_path, A, B, C, encrypt=encrypt) as (a, b, c):
            data = payload(LONG)
            root = a.store.put(data, Round(1))
            c.store.put(data, Round(1))
            damage(a, root, 2 * SEGMENT_BYTES + 5)
            b.plane.fetch(root, len(data), [A], (Round(1), A))
            peer, fault, reason = await b.faults.get()
            assert (peer, fault) == (A, Fault.WITHHELD)
            assert f"after {2 * SEGMENT_BYTES} do not match" in reason
            b.plane.fetch(root, len(data), [C], (Round(1), A))
            assert await b.stored.get() == (C, root)
            assert b.store.get(root) == data
            assert b.faults.empty(), "the liar was not asked for this payload again"

    run(story)


def test_false_digests_are_refused_before_a_byte_of_payload(tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(tmp_path, A, B) as (a, b):
            data = payload(LONG)
            root = a.store.put(data, Round(1))
            a.store._chunks[root] = chunk_digests(payload(LONG, seed=9))
            b.plane.fetch(root, len(data), [A], (Round(1), A))
            peer, _, reason = await b.faults.get()
            assert peer == A
            assert "do not match the payload's root" in reason
            assert not b.store.has(root)

    run(story)


def test_an_oversized_payload_is_refused_and_its_author_reported_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(tmp_path, A, B) as (a, b):
            root = a.store.put(bytes(MAX + 1), Round(1))
            for _ in range(3):
                a.plane.push(root, [B], (Round(1), A))
                await asyncio.gather(*a.plane._pushes.values())
            peer, fault, reason = await b.faults.get()
            assert (peer, fault) == (A, Fault.OVERSIZED)
            assert str(MAX + 1) in reason
            assert b.faults.empty()
            assert a.plane.delivered(root) == set()
            assert b.store.roots() == {}

    run(story)


async def refusals(pusher: Member, to: Member, labels: list[int]) -> list[str]:
    """Push a different payload for each round; what the receiver said to each ("" = stored)."""
    answers = []
    for number, round in enumerate(labels):
        root = pusher.store.put(payload(50, number), Round(round))
        link = await pusher.plane._link(to.name)
        answers.append(await pusher.plane._offer(link, Offer(root, 50, round)))
    return answers


def test_one_payload_for_each_round_near_ours_is_taken_unasked(tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(tmp_path, A, B) as (a, b):
            b.plane.advance(Round(10))
            answers = await refusals(a, b, [10, 10, 7, 8, 12, 13, 2**40])
            far = "is far from ours"
            assert answers[0] == answers[3] == answers[4] == ""
            assert answers[1] == "another payload came for this round"
            assert all(far in answers[i] for i in (2, 5, 6))
            assert len(b.store.roots()) == 3
            second = payload_root(payload(50, 1))
            b.plane.fetch(second, 50, [A], (Round(10), A))
            while (await b.stored.get())[1] != second:
                pass

    run(story)


def test_before_our_first_round_only_a_few_pushes_are_taken(tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(tmp_path, A, B) as (a, b):
            answers = await refusals(a, b, [5, 10**9, 3, 8, 77, 78])
            assert answers[:4] == [""] * 4
            assert all("before the first round" in answer for answer in answers[4:])
            b.plane.advance(Round(77))
            assert await refusals(a, b, [77]) == [""]

    run(story)


def test_a_holder_serves_a_payload_only_so_often(tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(tmp_path, A, B) as (a, _):
            root = a.store.put(payload(100), Round(1))
            said = [a.plane._refusal(B, Want(root, 0)) for _ in range(12)]
            assert said == [""] * 9 + ["asked for too often"] * 3
            assert a.plane._refusal(C, Want(root, 0)) == ""
            assert a.plane._refusal(C, Want(bytes(32), 0)) == "not held"
            for offset in (1, 101, 2**62):
                assert a.plane._refusal(C, Want(root, offset)) == "no such offset"

    run(story)


class Raw(asyncio.Protocol):
    """A member's data connection in the hands of somebody who writes what he likes."""

    def __init__(self) -> None:
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def write(self, data: bytes) -> None:
        self.transport.write(data)  # type: ignore[attr-defined]

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


ROOT = payload_root(b"x" * 200)


@both
@pytest.mark.parametrize(
    ("data", "fault", "words"),
    [
        (HEAD.pack(DATA, SEGMENT_BYTES + 1), Fault.OVERSIZED, "at most 1048576"),
        (HEAD.pack(START, 2**32 - 1), Fault.OVERSIZED, "at most"),
        (HEAD.pack(OFFER, 513), Fault.OVERSIZED, "at most 512"),
        (HEAD.pack(99, 1), Fault.WITHHELD, "unknown kind 99"),
        (HEAD.pack(DATA, 0), Fault.WITHHELD, "empty frame"),
        (frame(WANT, b"\xc1" * 5), Fault.WITHHELD, "not a Want"),
        (frame(START, encode(Start(ROOT, 200, 0, b""))[:-1]), Fault.WITHHELD, "not a Start"),
        (
            frame(OFFER, encode(Offer(ROOT, 200, 1)))
            + frame(START, encode(Start(ROOT, 200, 0, b"")))
            + frame(DATA, b"x"),
            Fault.WITHHELD,
            "number of chunks",
        ),
        (
            frame(OFFER, encode(Offer(ROOT, 200, 1)))
            + frame(START, encode(Start(ROOT, 200, 0, b"".join(chunk_digests(b"x" * 200)))))
            + frame(DATA, b"x" * 199),
            Fault.WITHHELD,
            "a segment of 199 bytes",
        ),
    ],
)
def test_a_member_that_breaks_the_rules_is_cut_off_with_the_reason(
    tmp_path: Path, data: bytes, fault: Fault, words: str, encrypt: bool
) -> None:
    async def story() -> None:
        async with swarm(tmp_path, A, B, encrypt=encrypt) as (a, b):
            service = PAYLOADS if encrypt else PAYLOADS_CLEAR
            raw = Raw()
            await a.endpoint.dial(B, service, lambda peer: raw)
            raw.write(data)
            peer, found, reason = await b.faults.get()
            assert (peer, found) == (A, fault)
            assert words in reason
            await raw.lost.wait()
            assert b.store.roots() == {}

    run(story)


def test_bytes_that_nobody_asked_for_fall_on_the_floor_and_slow_their_sender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metering, "DISCARD_BURST", 100.0)

    async def story() -> None:
        async with swarm(tmp_path, A, B) as (a, b):
            raw = Raw()
            await a.endpoint.dial(B, PAYLOADS_CLEAR, lambda peer: raw)
            raw.write(
                frame(START, encode(Start(ROOT, 200, 0, bytes(32)))) + frame(DATA, b"y" * 200)
            )
            while not b.plane._links.get(A):
                await asyncio.sleep(0)
            link = b.plane._links[A][0]
            while link._transport is None or link._transport.is_reading():  # type: ignore[attr-defined]
                await asyncio.sleep(0)
            root = a.store.put(payload(300), Round(1))
            a.plane.push(root, [B], (Round(1), A))
            assert await b.stored.get() == (A, root)
            assert b.faults.empty()

    run(story)


async def drip(raw: Raw, until: asyncio.Future[Any]) -> None:
    """A byte now and then, so that something always moves."""
    while not until.done():
        raw.write(b"x")
        await asyncio.wait({until}, timeout=0.02)


@pytest.mark.parametrize("size", [SEGMENT_BYTES, LONG], ids=["eager", "long"])
@both
def test_a_push_that_trickles_in_does_not_hold_up_a_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, encrypt: bool
) -> None:
    """a pushes a byte now and then; the ledger names its payload, which c holds."""
    monkeypatch.setattr(holders_module, "SPELL_SECONDS", 0.2)

    async def story() -> None:
        async with swarm(tmp_path, A, B, C, encrypt=encrypt) as (a, b, c):
            data = payload(size)
            root = c.store.put(data, Round(1))
            chunks = b"".join(chunk_digests(data))
            raw = Raw()
            await a.endpoint.dial(B, PAYLOADS if encrypt else PAYLOADS_CLEAR, lambda peer: raw)
            raw.write(
                frame(OFFER, encode(Offer(root, size, 1)))
                + frame(START, encode(Start(root, size, 0, chunks)))
                + HEAD.pack(DATA, SEGMENT_BYTES)
                + data[: 2 * CHUNK_BYTES + 100]
            )
            stored = asyncio.ensure_future(b.stored.get())
            dripping = asyncio.create_task(drip(raw, stored))
            while not any(arrival.came() for arrival in b.plane._arrivals.values()):
                await asyncio.sleep(0)
            b.plane.fetch(root, size, [A, C], (Round(1), A))
            assert await stored == (C, root)
            await dripping
            assert b.store.get(root) == data

    run(story)


def test_while_a_fetch_is_on_no_pusher_takes_its_place_by_itself(tmp_path: Path) -> None:
    """Else one that was left for its slowness would begin again, chunk by chunk."""

    async def story() -> None:
        async with swarm(tmp_path, A, B) as (a, b):
            raw = Raw()
            await a.endpoint.dial(B, PAYLOADS_CLEAR, lambda peer: raw)
            raw.write(frame(OFFER, encode(Offer(ROOT, LONG, 1))))
            while not b.plane._arrivals:
                await asyncio.sleep(0)
            (arrival,) = b.plane._arrivals.values()
            arrival.end(False)
            b.plane.idle(arrival)
            assert arrival.link in arrival.pushers, "without a fetch the push goes on"
            b.plane.fetch(ROOT, LONG, [], (Round(1), A))
            arrival.end(False)
            b.plane.idle(arrival)
            assert arrival.link is None
            assert arrival.holders.choose(0.0, ()) == A, "but it is asked in its turn"

    run(story)


def test_one_slow_holder_does_not_change_what_the_network_has_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders_module, "SPELL_SECONDS", 0.2)

    async def story() -> None:
        async with swarm(tmp_path, A, B, C) as (a, b, c):
            data = payload(LONG)
            root = c.store.put(data, Round(1))
            a.store.put(data, Round(1))
            b.plane._best_rate = 1e12
            async with Cut(a.port, HANDSHAKE + LONG // 2, silent=True) as cut:
                b.meets(A, cut.port)
                b.plane.fetch(root, LONG, [A], (Round(1), A))
                await cut.broken.wait()
                b.plane.fetch(root, LONG, [A, C], (Round(1), A))
                assert await b.stored.get() == (C, root)
            assert b.plane._best_rate >= data_module.BEST_MEMORY * 1e12

    run(story)


def test_a_peer_that_comes_back_again_and_again_is_not_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even to a handshake, while the others are."""
    monkeypatch.setattr(endpoint_module, "HANDSHAKES_BURST", 3.0)
    monkeypatch.setattr(endpoint_module, "HANDSHAKES_RATE", 1e-6)

    async def story() -> None:
        async with swarm(tmp_path, A, B, C) as (a, b, c):
            for _ in range(4):
                await a.endpoint.dial(B, PAYLOADS_CLEAR, lambda peer: Raw())
            with pytest.raises(UnreachableError):
                await a.endpoint.dial(B, PAYLOADS_CLEAR, lambda peer: Raw())
            while "again and again" not in b.endpoint.last_stranger:
                await asyncio.sleep(0)
            await c.endpoint.dial(B, PAYLOADS_CLEAR, lambda peer: Raw())

    run(story)


def test_our_disk_is_read_for_a_peer_within_its_allowance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests that are not in memory cost a pass over the file: little for who asks."""
    monkeypatch.setattr(metering, "READ_BURST", 250.0)
    monkeypatch.setattr(metering, "READ_RATE", 1.0)

    async def story() -> None:
        async with swarm(tmp_path, A) as (a,):
            roots = [a.store.put(payload(100, seed), Round(1)) for seed in range(6)]
            a.store._chunks.clear()
            said = [a.plane._refusal(B, Want(root, 0)) for root in roots]
            assert said == [""] * 3 + ["asked for too much at once"] * 3
            assert a.plane._refusal(C, Want(roots[0], 0)) == ""
            a.store.chunks(roots[5])
            assert a.plane._refusal(B, Want(roots[5], 0)) == "", "they are in memory"

    run(story)


def test_what_was_not_sent_does_not_count_as_served(tmp_path: Path) -> None:
    """Who leaves a slow holder and comes back is still served."""

    async def story() -> None:
        async with swarm(tmp_path, A, B) as (a, b):
            root = a.store.put(payload(LONG), Round(1))
            head = messages.SMALL_BYTES + 32 * messages.chunk_count(LONG)
            await b.plane._link(A)
            while not a.plane._links.get(B):
                await asyncio.sleep(0)
            link = a.plane._links[B][0]
            assert a.plane._refusal(B, Want(root, 0)) == ""
            assert a.plane._served[B, root] == LONG + head
            await a.plane._serve(link, Want(root, 0))
            link.abort("left")
            while a.plane._links[B]:
                await asyncio.sleep(0)
            assert a.plane._served[B, root] < LONG + head

    run(story)


def test_the_models_bound_holds_for_pushes_once_it_is_known(tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(tmp_path, A, B) as (a, b):
            big, small = (a.store.put(payload(n), Round(1)) for n in (MAX // 2, 1000))
            raw = Raw()
            await a.endpoint.dial(B, PAYLOADS_CLEAR, lambda peer: raw)
            raw.write(frame(OFFER, encode(Offer(big, MAX // 2, 1))))
            b.plane.fetch(bytes(32), MAX, [A], (Round(1), B))
            while len(b.plane._arrivals) < 2:
                await asyncio.sleep(0)
            b.plane.limit(1000)
            assert [arrival.length for arrival in b.plane._arrivals.values()] == [MAX]
            assert b.plane.limits[START] == messages.frame_limits(MAX)[START], "a fetch goes on"
            b.plane.cancel(Round(1))
            b.plane.limit(2**40)
            assert b.plane.max_payload == 1000, "the run file's bound stays a bound"
            assert b.plane.limits[START] == messages.frame_limits(1000)[START]
            a.plane.push(big, [B], (Round(2), A))
            assert (await b.faults.get())[:2] == (A, Fault.OVERSIZED)
            a.plane.push(small, [B], (Round(3), A))
            assert await b.stored.get() == (A, small)

    run(story)


# Who is at the other end, in clear


def test_in_clear_strangers_and_impostors_are_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(tmp_path, A, B) as (a, b):
            attempts = [
                ("m", key_of("m")),  # a stranger under its own name
                ("a", key_of("m")),  # a stranger under a member's name
                ("b", key_of("b")),  # a copy of the listener itself
            ]
            for number, (name, key) in enumerate(attempts):
                with pytest.raises(UnreachableError):
                    await outsider(b, PeerId(name), key, tmp_path)
                while b.endpoint.strangers <= number:
                    await asyncio.sleep(0)
            assert not b.plane._links
            root = a.store.put(payload(10), Round(1))
            a.plane.push(root, [B], (Round(1), A))
            assert await b.stored.get() == (A, root)

    async def outsider(b: Member, name: PeerId, key: SigningKey, folder: Path) -> None:
        loop = asyncio.get_running_loop()
        reader, writer = await asyncio.open_connection("127.0.0.1", b.port)
        sock = writer.transport.get_extra_info("socket").dup()
        writer.transport.pause_reading()
        try:
            hello = introduction(key_of("a"), key_of("b").public, 3)  # recorded on the path
            await loop.sock_sendall(sock, hello)
            await prove_as_dialer(sock, name, key, RUN, B, key_of("b").public)
            if await loop.sock_recv(sock, 1) == b"":
                raise UnreachableError("closed")
        except Exception as error:
            raise UnreachableError(str(error)) from error
        finally:
            sock.close()
            writer.close()
            del reader

    run(story)


def test_in_clear_a_listener_that_is_not_the_member_is_found_out(tmp_path: Path) -> None:
    """The port leads to c, which answers truthfully as c, and cannot answer as a."""

    async def story() -> None:
        async with swarm(tmp_path, A, B, C) as (_, b, c):
            b.meets(A, c.port)
            with pytest.raises(UnreachableError, match="is it a, and is our key"):
                await b.endpoint.dial(A, PAYLOADS_CLEAR, lambda peer: Raw())

    run(story)


def test_a_run_in_clear_and_an_encrypted_one_do_not_talk(tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(tmp_path, A, encrypt=True) as (a,):
            roster = {**a.endpoint.roster, B: Contact("", 0, key_of("b").public)}
            a.endpoint.update_roster(roster)
            b = Member(B, roster, tmp_path, encrypt=False)
            with pytest.raises(UnreachableError):
                await b.endpoint.dial(A, PAYLOADS_CLEAR, lambda peer: Raw())
            assert "not served here" in a.endpoint.last_stranger
            await b.plane.close()

    run(story)


# The end of a round, a full disk, bounded memory


def test_what_is_cancelled_or_old_stops_and_leaves_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(tmp_path, A, B) as (a, b):
            b.plane.fetch(bytes(32), 10**6, [A], (Round(5), A))
            b.plane.fetch(b"\1" * 32, 10**6, [A], (Round(6), A))
            kept = a.store.put(payload(20), Round(6))
            old = a.store.put(payload(30), Round(5))
            a.plane.push(old, [PeerId("z")], (Round(5), A))
            b.plane.cancel(Round(5))
            assert [label.round for v in b.plane._arrivals.values() for label in v.labels] == [6]
            b.plane.cancel(Round(6), author=B)
            assert len(b.plane._arrivals) == 1
            b.plane.cancel(Round(6), author=A)
            assert not b.plane._arrivals
            a.plane.advance(Round(6 + ROUNDS_SERVED))
            while a.store.has(old) or a.plane._pushes:
                await asyncio.sleep(0)
            assert a.store.has(kept)

    run(story)


def test_many_rounds_cost_no_memory_and_their_contributions_stay_on_disk(tmp_path: Path) -> None:
    """Each round: a push, one that nobody takes, a fetch that nobody answers, a copy of the state,
    and an offer that is never followed up."""
    rounds = 3 * ROUNDS_SERVED

    async def story() -> None:
        async with swarm(tmp_path, A, B, C) as (a, b, c):
            raw = Raw()
            await c.endpoint.dial(B, PAYLOADS_CLEAR, lambda peer: raw)
            for number in range(rounds):
                own = a.store.put(payload(100, number), Round(number))
                copy = a.store.put(payload(200, number), Round(number), passing=True)
                b.plane.advance(Round(number))
                raw.write(frame(OFFER, encode(Offer(bytes(32), 10**6, number + 1))))
                a.plane.push(own, [B, PeerId("z")], (Round(number), A))
                b.plane.fetch(number.to_bytes(32, "big"), 50, [A], (Round(number), A))
                b.plane.fetch(copy, 200, [A], (Round(0), A), passing=True)
                assert {(await b.stored.get())[1] for _ in range(2)} == {own, copy}
            for member in (a, b):
                plane, store = member.plane, member.store
                while len(store._held) > 2 * ROUNDS_SERVED + 2 or len(plane._served) > len(
                    store._held
                ):
                    await asyncio.sleep(0)
                assert len(plane._delivered) <= ROUNDS_SERVED + 1
                assert len(plane._pushed) <= 2 * (data_module.ROUNDS_BEHIND + 2)
                assert len(plane._arrivals) <= 2 * (data_module.ROUNDS_BEHIND + 2)
                assert len(plane._pushes) <= 2 * (data_module.ROUNDS_BEHIND + 1)
                assert len(plane._answers) <= 2 * (data_module.ROUNDS_BEHIND + 1)
                for number in range(rounds):
                    root = payload_root(payload(100, number))
                    assert (store.folder / str(number) / root.hex()).exists()
            assert len(list((b.store.folder / "passing").iterdir())) <= ROUNDS_SERVED + 1
            assert len(list((b.store.folder / "incoming").iterdir())) == 0

    run(story)


def test_a_cancelled_transfer_leaves_no_file_and_the_connection_usable(tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(tmp_path, A, B) as (a, b):
            root = a.store.put(payload(MAX), Round(1))
            other = a.store.put(payload(2 * SEGMENT_BYTES, seed=3), Round(1))
            b.plane.fetch(root, MAX, [A], (Round(1), A))
            while not any(arrival.reached for arrival in b.plane._arrivals.values()):
                await asyncio.sleep(0)
            b.plane.cancel(Round(1))
            b.plane.fetch(other, 2 * SEGMENT_BYTES, [A], (Round(2), A))
            assert await b.stored.get() == (A, other)
            assert not b.store.has(root)
            assert list((tmp_path / "b" / "incoming").iterdir()) == []
            assert len(b.plane._links[A]) == 1
            assert a.faults.empty()

    run(story)


def test_a_full_disk_is_reported_and_the_transfer_succeeds_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with swarm(tmp_path, A, B) as (a, b):
            data = payload(LONG)
            root = a.store.put(data, Round(1))
            real, left = os.pwrite, [2]

            def filling(descriptor: int, view: memoryview, offset: int) -> int:
                left[0] -= 1
                if -3 < left[0] < 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return real(descriptor, view, offset)

            monkeypatch.setattr("torchbft.node.storage.durable.os.pwrite", filling)
            b.plane.fetch(root, len(data), [A], (Round(1), A))
            assert "the disk is full" in str(await b.disk_errors.get())
            assert await b.stored.get() == (A, root)
            assert b.store.get(root) == data
            assert b.faults.empty(), "a full disk is nobody's fault"

    run(story)


FETCHER = """
import asyncio, resource, sys
from pathlib import Path
from torchbft.node.storage.payloads import PayloadStore
from torchbft.node.transports.data import DataPlane
from torchbft.node.transports.endpoint import Contact, Endpoint
from torchbft.node.transports.metering import Meter
from torchbft.primitives.keys import SigningKey

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

async def main(port, root, length, folder, encrypt):
    key = lambda name: SigningKey.derive(bytes(32), name)
    roster = {"a": Contact("127.0.0.1", port, key("a").public),
              "b": Contact("", 0, key("b").public)}
    endpoint = Endpoint("b", key("b"), roster, run_id=bytes(32), meter=Meter())
    stored = asyncio.get_running_loop().create_future()
    plane = DataPlane(endpoint, PayloadStore(Path(folder)), encrypt=encrypt, max_payload=length,
                      on_stored=lambda peer, root: stored.set_result(peer))
    before = peak()
    plane.fetch(root, length, ["a"], (1, "a"))
    await stored
    print(peak() - before)
    await plane.close()

asyncio.run(main(int(sys.argv[1]), bytes.fromhex(sys.argv[2]), int(sys.argv[3]), sys.argv[4],
                 sys.argv[5] == "True"))
"""


@both
def test_c09_a_payload_far_larger_than_any_buffer_needs_little_memory(
    tmp_path: Path, encrypt: bool
) -> None:
    """96 MiB of sparse zeros; the receiver's peak memory grows by a few segments only."""
    length = 96 * 1024 * 1024

    async def story() -> None:
        async with swarm(tmp_path, A, B, encrypt=encrypt) as (a, _):
            chunks = chunk_digests(bytes(SEGMENT_BYTES)) * (length // SEGMENT_BYTES)
            root = root_of_chunks(length, chunks)
            folder = tmp_path / "a" / "1"
            folder.mkdir()
            with (folder / root.hex()).open("wb") as file:
                file.truncate(length)
            a.store._index()
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                FETCHER,
                *(str(a.port), root.hex(), str(length), str(tmp_path / "child"), str(encrypt)),
                stdout=subprocess.PIPE,
            )
            out, _ = await child.communicate()
            assert child.returncode == 0
            assert int(out) < 16, f"peak memory grew by {int(out)} MiB"
            assert PayloadStore(tmp_path / "child").length(root) == length

    run(story)


@both
def test_bytes_of_payloads_are_measured_apart_from_control(tmp_path: Path, encrypt: bool) -> None:
    async def story() -> None:
        async with swarm(tmp_path, A, B, encrypt=encrypt) as (a, b):
            size = 3 * SEGMENT_BYTES
            root = a.store.put(payload(size), Round(1))
            b.plane.fetch(root, size, [A], (Round(1), A))
            await b.stored.get()
            received = b.meter.total(Plane.PAYLOAD).received
            assert size < received < size * 1.01 + 8000
            assert b.meter.total(Plane.CONTROL).received == 0
            assert a.meter.total(Plane.PAYLOAD).sent >= received, "repeats count as sent"

    run(story)
