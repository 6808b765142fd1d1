"""Clocks of members: told with a signature, and judged so that no f liars set one."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from torchbft.node.transports import clock
from torchbft.node.transports.clock import Reading, ask, off_by, readings, words
from torchbft.node.transports.endpoint import Contact, Endpoint
from torchbft.node.transports.introduction import introduction
from torchbft.node.transports.metering import Meter
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import Data, RunSpec, new_member

NAMES = tuple(PeerId(f"peer-{letter}") for letter in "abcd")
KEYS = {name: SigningKey.derive(bytes(32), name) for name in NAMES}
RUN = RunSpec(
    name="clocks",
    seed="22" * 32,
    members=tuple(
        new_member(name, KEYS[name], SigningKey.derive(bytes(32), f"{name}/voting"), port=1)
        for name in NAMES
    ),
    data=Data(samples=1),
)


def said(*offsets: float | None, run: RunSpec = RUN, round_trip: float = 0.0) -> float | None:
    """How far off we are if the others say this of their clocks."""
    found = [
        Reading(member, offset, round_trip)
        for member, offset in zip(run.members[1:], offsets, strict=False)
        if offset is not None
    ]
    return off_by(run, found)


@pytest.mark.parametrize(
    ("offsets", "off"),
    [
        ((0.1, -0.2, 3.0), None),
        ((9.9, 9.9, -9.9), None),
        ((3600.0, 0.1, 0.2), None),
        ((3600.0, None, None), None),
        ((3600.0, 3600.0, None), -3600.0),
        ((3600.0, 3601.0, 0.0), -3600.0),
        ((-61.0, -60.0, -62.0), 60.0),
        ((3600.0, -3600.0, 0.0), None),
        ((3600.0, -3600.0, None), None),
        ((), None),
    ],
)
def test_more_than_f_must_say_it_and_more_than_deny_it(
    offsets: tuple[float | None, ...], off: float | None
) -> None:
    assert said(*offsets) == off


def test_power_counts_and_not_heads() -> None:
    heavy = msgspec.structs.replace(RUN.members[1], power=4)
    run = msgspec.structs.replace(RUN, members=(RUN.members[0], heavy, *RUN.members[2:]))
    assert run.validator_faults.f == 2
    assert said(3600.0, 0.0, 0.0, run=run) == -3600.0
    assert said(0.0, 3600.0, 3600.0, run=run) is None


def test_a_long_way_is_no_wrong_clock() -> None:
    assert said(12.0, 12.0, 12.0, round_trip=5.0) is None
    assert said(12.0, 12.0, 12.0, round_trip=1.0) == -12.0


def test_it_is_said_in_words() -> None:
    assert words(-3600.2) == "3600 s behind the other members'"
    assert words(11.0) == "11 s ahead of the other members'"


async def listening(name: PeerId, key: SigningKey, run_id: bytes) -> tuple[Endpoint, int]:
    roster = {
        PeerId(member.name): Contact(member.host, member.port, bytes.fromhex(member.identity))
        for member in RUN.members
    }
    roster[name] = Contact("127.0.0.1", 0, key.public)
    endpoint = Endpoint(name, key, roster, run_id=run_id, meter=Meter())
    return endpoint, await endpoint.listen("127.0.0.1", 0)


def asked(
    run_id: bytes = RUN.run_id, key: SigningKey = KEYS[NAMES[1]], name: PeerId = NAMES[1]
) -> Reading | None:
    """What we learn of ``NAMES[1]`` from an endpoint that is this."""

    async def main() -> Reading | None:
        endpoint, port = await listening(name, key, run_id)
        member = msgspec.structs.replace(RUN.members[1], port=port)
        try:
            return await ask(member, RUN.run_id, KEYS[NAMES[0]])
        finally:
            await endpoint.close()

    return asyncio.run(main())


def test_a_node_tells_its_time_to_whoever_asks() -> None:
    found = asked()
    assert found is not None
    assert abs(found.offset) <= found.round_trip
    assert found.round_trip < clock.ASK_SECONDS


def test_an_hour_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = time.time_ns

    def theirs() -> int:
        return truth() + 3600 * 10**9 * (calls.append(None) or len(calls) == 2)

    calls: list[None] = []
    monkeypatch.setattr(time, "time_ns", theirs)
    found = asked()
    assert found is not None
    assert abs(found.offset - 3600) <= clock.ASK_SECONDS


@pytest.mark.parametrize(
    "other",
    [{"run_id": bytes(32)}, {"key": SigningKey.generate()}, {"name": NAMES[2]}],
    ids=["run", "key", "name"],
)
def test_an_answer_of_another_run_key_or_member_is_none(other: dict[str, object]) -> None:
    if "name" in other:
        other = {**other, "key": KEYS[NAMES[2]]}
    assert asked(**other) is None  # type: ignore[arg-type]


def test_who_is_not_there_or_says_something_else_is_passed_over() -> None:
    async def main() -> list[Reading]:
        def junk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(bytes(clock.TIME_BYTES + 64))
            writer.close()

        def short(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        servers = [await asyncio.start_server(each, "127.0.0.1", 0) for each in (junk, short)]
        ports = [server.sockets[0].getsockname()[1] for server in servers]
        members = [
            msgspec.structs.replace(member, port=port)
            for member, port in zip(RUN.members, (1, *ports, 1), strict=True)
        ]
        found = await readings(
            msgspec.structs.replace(RUN, members=tuple(members)), NAMES[0], KEYS[NAMES[0]]
        )
        for server in servers:
            server.close()
        return found

    assert asyncio.run(main()) == []


def test_strangers_are_told_nothing() -> None:
    async def main() -> None:
        endpoint, port = await listening(NAMES[1], KEYS[NAMES[1]], RUN.run_id)
        member = msgspec.structs.replace(RUN.members[1], port=port)
        assert await ask(member, RUN.run_id, SigningKey.generate()) is None
        assert endpoint.strangers == 1
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(introduction(KEYS[NAMES[0]], KEYS[NAMES[1]].public, clock.SERVICE) + b"short")
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        await endpoint.close()

    asyncio.run(main())
