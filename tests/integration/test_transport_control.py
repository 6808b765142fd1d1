"""The control channel over real sockets on loopback: identity, bounds, restarts (C16, C18, C30).

Every wait is for an event, bounded by LIMIT; nothing sleeps and nothing measures time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from torchbft.node.transports import control as control_module
from torchbft.node.transports.certificates import client_context
from torchbft.node.transports.control import BYE, HELLO, MESSAGE, ControlChannel, Hello
from torchbft.node.transports.endpoint import CONTROL, Contact, Endpoint, UnreachableError
from torchbft.node.transports.framing import HEAD, frame
from torchbft.node.transports.introduction import introduction
from torchbft.node.transports.metering import Meter, Plane
from torchbft.primitives.errors import ConfigError, MisuseError
from torchbft.primitives.evidence import Fault
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.wire import MAX_CONTROL_BYTES, WIRE_VERSION, encode

LIMIT = 20.0
"""Seconds that any wait may take before the test fails: far more than a busy machine needs."""

RUN = bytes(32)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LIMIT):
            await test()

    asyncio.run(bounded())


def key_of(name: str) -> SigningKey:
    return SigningKey.derive(bytes(32), name)


@pytest.fixture(autouse=True)
def _no_head_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "SECOND_DIALER_WAIT", 0.05)


class Member:
    """One peer's endpoint and channel, recording what reaches it."""

    def __init__(self, name: str, roster: dict[PeerId, Contact], run_id: bytes = RUN) -> None:
        self.name = PeerId(name)
        self.meter = Meter()
        self.endpoint = Endpoint(self.name, key_of(name), roster, run_id=run_id, meter=self.meter)
        self.messages: asyncio.Queue[tuple[PeerId, bytes]] = asyncio.Queue()
        self.peers: asyncio.Queue[tuple[PeerId, bool]] = asyncio.Queue()
        self.faults: asyncio.Queue[tuple[PeerId, Fault | None, str]] = asyncio.Queue()
        self.channel = ControlChannel(
            self.endpoint,
            lambda peer, message: self.messages.put_nowait((peer, message)),
            lambda peer, connected: self.peers.put_nowait((peer, connected)),
            lambda peer, fault, reason: self.faults.put_nowait((peer, fault, reason)),
        )

    async def close(self) -> None:
        await self.channel.close()
        await self.endpoint.close()


async def swarm(*names: str, host: str = "127.0.0.1") -> dict[str, Member]:
    """Listening members that know each other, not yet connected."""
    blank = {PeerId(name): Contact(host, 0, key_of(name).public) for name in names}
    members = {name: Member(name, blank) for name in names}
    ports = {name: await member.endpoint.listen(host, 0) for name, member in members.items()}
    roster = {PeerId(n): Contact(host, ports[n], key_of(n).public) for n in names}
    for member in members.values():
        member.endpoint.update_roster(roster)
    return members


async def close_all(members: dict[str, Member]) -> None:
    await asyncio.gather(*(member.close() for member in members.values()))


async def until(holds: Callable[[], bool], wake: Callable[[], Awaitable[Any]]) -> None:
    while not holds():
        await wake()


def test_every_pair_of_a_swarm_talks_over_one_connection() -> None:
    async def story() -> None:
        members = await swarm("a", "b", "c", "d")
        for member in members.values():
            member.channel.connect_all()
        for name, member in members.items():
            await until(lambda m=member: len(m.channel.connected()) == 3, member.peers.get)  # type: ignore[misc]
            member.channel.broadcast(b"from " + name.encode())
        for member in members.values():
            got = {await member.messages.get() for _ in range(3)}
            assert got == {(p, b"from " + p.encode()) for p in members if p != member.name}
            assert set(member.channel.status().values()) == {"connected"}
            assert set(member.channel._live.values()) <= member.channel._links
            assert len(member.channel._live) == 3
            assert member.channel.dropped() == {}
        await close_all(members)

    run(story)


def test_messages_keep_their_order_and_size() -> None:
    async def story() -> None:
        members = await swarm("a", "b")
        for member in members.values():
            member.channel.connect_all()
        await members["a"].peers.get()
        sizes = [0, 1, 70_000, 2, control_module.WRITE_BYTES, MAX_CONTROL_BYTES, 3]
        sent = [os.urandom(size) for size in sizes]
        for message in sent:
            members["a"].channel.send(PeerId("b"), message)
        assert [await members["b"].messages.get() for _ in sent] == [("a", m) for m in sent]
        await close_all(members)

    run(story)


def test_messages_sent_before_the_connection_wait_and_then_arrive() -> None:
    async def story() -> None:
        members = await swarm("a", "b")
        members["b"].channel.send(PeerId("a"), b"early")
        members["a"].channel.connect_all()
        assert await members["a"].messages.get() == ("b", b"early")
        await close_all(members)

    run(story)


def test_the_higher_name_connects_too_when_the_lower_cannot_dial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_module, "SECOND_DIALER_WAIT", 0.01)

    async def story() -> None:
        members = await swarm("a", "b")
        members["b"].channel.connect_all()
        assert await members["a"].peers.get() == ("b", True)
        await close_all(members)

    run(story)


def test_simultaneous_dials_leave_the_same_single_connection_at_both_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_module, "SECOND_DIALER_WAIT", 0.0)

    async def story() -> None:
        members = await swarm("a", "b")
        for member in members.values():
            member.channel.connect_all()
        for member in members.values():
            await member.peers.get()
        a, b = (members[name].channel for name in "ab")
        while len(a._links) != 1 or len(b._links) != 1:
            await asyncio.sleep(0)
        assert a._live[PeerId("b")].dialled != b._live[PeerId("a")].dialled
        assert members["a"].peers.empty()
        assert members["b"].peers.empty()
        a.send(PeerId("b"), b"still there")
        assert await members["b"].messages.get() == ("a", b"still there")
        await close_all(members)

    run(story)


def test_c18_a_killed_and_restarted_member_replaces_its_stale_connection() -> None:
    """The old process's connection is cut off without a word: nobody closes it."""

    async def story() -> None:
        members = await swarm("a", "b")
        a, b = members["a"], members["b"]
        a.channel.connect_all()
        b.channel.connect_all()
        assert await a.peers.get() == ("b", True)
        stale = b.channel._live[PeerId("a")]
        assert stale._transport is not None
        stale._transport.pause_reading()  # the dead end: neither answers nor closes
        again = Member("b", b.endpoint.roster)
        port = a.endpoint.roster[PeerId("b")].port
        await b.endpoint.close()
        await again.endpoint.listen("127.0.0.1", port)
        again.channel.connect_all()
        assert await a.peers.get() == ("b", False)
        assert await a.peers.get() == ("b", True)
        a.channel.send(PeerId("b"), b"welcome back")
        assert await again.messages.get() == ("a", b"welcome back")
        assert a.channel.connected() == {"b"}
        await again.close()
        await close_all(members)

    run(story)


CHILD = """
import asyncio, sys
from torchbft.node.transports.control import ControlChannel
from torchbft.node.transports.endpoint import Contact, Endpoint
from torchbft.node.transports.metering import Meter
from torchbft.primitives.keys import SigningKey
key = lambda name: SigningKey.derive(bytes(32), name)
async def main():
    roster = {"a": Contact("127.0.0.1", int(sys.argv[1]), key("a").public),
              "b": Contact("", 0, key("b").public)}
    endpoint = Endpoint("b", key("b"), roster, run_id=bytes(32), meter=Meter())
    channel = ControlChannel(endpoint, lambda peer, m: channel.send(peer, b"echo " + m))
    channel.connect_all()
    await asyncio.Event().wait()
asyncio.run(main())
"""


def start_child(port: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", CHILD, str(port)])


def test_c16_a_frozen_process_is_found_dead_and_c18_a_killed_one_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGSTOP sends nothing and closes nothing: only silence tells. SIGKILL, then a new process."""
    monkeypatch.setattr(control_module, "HEARTBEAT_SECONDS", 0.05)

    async def story() -> None:
        members = await swarm("a", "b")
        a = members["a"]
        await members["b"].close()
        a.channel.connect_all()
        child = start_child(a.endpoint.roster[PeerId("a")].port)
        try:
            assert await a.peers.get() == ("b", True)
            child.send_signal(signal.SIGSTOP)
            monkeypatch.setattr(control_module, "IDLE_SECONDS", 0.3)
            assert await a.peers.get() == ("b", False)
            assert "silent" in a.channel.status()[PeerId("b")]
            monkeypatch.setattr(control_module, "IDLE_SECONDS", 10.0)
            child.kill()
            child.wait()
            child = start_child(a.endpoint.roster[PeerId("a")].port)
            assert await a.peers.get() == ("b", True)
            a.channel.send(PeerId("b"), b"you again")
            assert await a.messages.get() == ("b", b"echo you again")
        finally:
            child.kill()
            child.wait()
        await a.close()

    run(story)


# Strangers, impostors and noise


def recorded(dialer: str, listener: str) -> bytes:
    """A member's introduction, which somebody on the path may send again."""
    return introduction(key_of(dialer), key_of(listener).public, 1)


async def raw_tls(member: Member, context: ssl.SSLContext, hello: bytes) -> asyncio.StreamReader:
    """Connect to a member with an introduction and a TLS context of one's own; the reader sees how
    that ends."""
    port = member.endpoint._sockets[0].getsockname()[1]
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(hello)
    reader, writer = await asyncio.open_connection(
        sock=sock, ssl=context, server_hostname="torchbft"
    )
    writer.write(frame(HELLO, encode(Hello(WIRE_VERSION, RUN, bytes(16), "stranger"))))
    return reader


async def ends(reader: asyncio.StreamReader) -> bool:
    """Whether the other side cut the connection without a byte of its protocol."""
    try:
        return await reader.read(1) == b""
    except OSError:
        return True


@pytest.mark.parametrize("claimed", ["m", "a"])
def test_a_stranger_with_a_good_looking_certificate_is_refused(claimed: str) -> None:
    """Its own key, under its own name or a member's; all fields and the issuer are right."""

    async def story() -> None:
        members = await swarm("a", "b")
        b = members["b"]
        roster = {name: contact.public for name, contact in b.endpoint.roster.items()}
        context = client_context(PeerId(claimed), key_of("m"), roster, CONTROL)
        assert await ends(await raw_tls(b, context, recorded("a", "b")))
        while not b.endpoint.strangers:
            await asyncio.sleep(0)
        assert "not in the roster" in b.endpoint.last_stranger or "TLS" in b.endpoint.last_stranger
        assert b.channel.connected() == set()
        assert b.peers.empty()
        await close_all(members)

    run(story)


def test_a_stranger_without_a_certificate_is_refused() -> None:
    async def story() -> None:
        members = await swarm("a", "b")
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        assert await ends(await raw_tls(members["b"], context, recorded("a", "b")))
        assert members["b"].channel.connected() == set()
        await close_all(members)

    run(story)


def test_a_member_cannot_be_taken_for_another_member() -> None:
    """c dials b truthfully and arrives as c; at a's address it cannot pose as a either."""

    async def story() -> None:
        members = await swarm("a", "b", "c")
        a, b, c = (members[name] for name in "abc")
        c.channel.connect_all()
        b.channel.connect_all()
        assert await until(lambda: "c" in b.channel.connected(), b.peers.get) is None
        c.channel.send(PeerId("b"), b"I am a")
        assert await b.messages.get() == ("c", b"I am a")
        wrong = dict(b.endpoint.roster)
        wrong[PeerId("a")] = Contact(
            "127.0.0.1", wrong[PeerId("c")].port, wrong[PeerId("a")].public
        )
        b.endpoint.update_roster(wrong)
        with pytest.raises(UnreachableError, match="is it a, and is our key"):
            await b.endpoint.dial(PeerId("a"), CONTROL, lambda peer: asyncio.Protocol())
        assert a.channel.connected() <= {"b", "c"}
        await close_all(members)

    run(story)


NOISE = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x00\x05hello",
    b"\x16" * 4096,
    introduction(key_of("m"), key_of("a").public, 1),
    introduction(key_of("b"), key_of("b").public, 1),
    recorded("b", "a")[:-1] + b"\0",
    b"torchbft-clear/1" + bytes(64),
    bytes(range(256)) * 64,
]


def test_noise_at_the_port_hurts_nobody() -> None:
    async def story() -> None:
        members = await swarm("a", "b")
        a = members["a"]
        port = a.endpoint.roster[PeerId("a")].port
        for noise in NOISE:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(noise)
            writer.write_eof()
            with contextlib.suppress(OSError):
                await reader.read()
            writer.close()
        while a.endpoint.strangers < len(NOISE):
            await asyncio.sleep(0)
        for member in members.values():
            member.channel.connect_all()
        assert await a.peers.get() == ("b", True)
        await close_all(members)

    run(story)


@pytest.mark.parametrize("kind", ["silent", "noisy", "half", "recorded"])
def test_strangers_in_bulk_put_no_member_out(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """While b is in the middle of its handshake, strangers come in any number, and stay: they take
    no place from it, even those that replay another member's introduction."""
    monkeypatch.setattr("torchbft.node.transports.endpoint.MAX_PENDING", 4)
    monkeypatch.setattr("torchbft.node.transports.endpoint.PENDING_PER_MEMBER", 2)
    hello = recorded("c", "a")
    said = {"silent": b"", "noisy": b"\x16" * 500, "half": hello[:50], "recorded": hello}[kind]

    async def story() -> None:
        members = await swarm("a", "b", "c")
        endpoint = members["a"].endpoint
        port = endpoint.roster[PeerId("a")].port
        in_flight = await asyncio.open_connection("127.0.0.1", port)
        in_flight[1].write(recorded("b", "a"))
        while not endpoint._places.get(key_of("b").public):
            await asyncio.sleep(0)
        (place,) = endpoint._places[key_of("b").public]
        strangers = []
        for _ in range(40):
            strangers.append(await asyncio.open_connection("127.0.0.1", port))
            strangers[-1][1].write(said)
        members["b"].channel.connect_all()
        b = members["b"]
        await until(lambda: "a" in b.channel.connected(), b.peers.get)
        assert not place.done(), "its first handshake still has its place"
        assert len(endpoint._pending) <= 4
        assert all(len(places) <= 2 for places in endpoint._places.values())
        for _, writer in [in_flight, *strangers]:
            writer.close()
        await close_all(members)

    run(story)


def test_silent_strangers_do_not_keep_members_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """More connections that never speak than there are places: the oldest gives way."""
    monkeypatch.setattr("torchbft.node.transports.endpoint.MAX_PENDING", 4)

    async def story() -> None:
        members = await swarm("a", "b")
        port = members["a"].endpoint.roster[PeerId("a")].port
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
        for member in members.values():
            member.channel.connect_all()
        assert await members["a"].peers.get() == ("b", True)
        assert len(members["a"].endpoint._pending) <= 4
        for _, writer in silent:
            writer.close()
        await close_all(members)

    run(story)


# Members that break the rules


async def rogue(members: dict[str, Member], data: bytes) -> None:
    """b, a true member, opens a control connection to a and sends these bytes."""

    class Sender(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transport.write(data)  # type: ignore[attr-defined]

    await members["b"].endpoint.dial(PeerId("a"), CONTROL, lambda peer: Sender())


GREETING = frame(HELLO, encode(Hello(WIRE_VERSION, RUN, bytes(16), "rogue")))


@pytest.mark.parametrize(
    ("data", "fault", "reason"),
    [
        (GREETING + HEAD.pack(MESSAGE, MAX_CONTROL_BYTES + 1), Fault.OVERSIZED, "4194305 bytes"),
        (GREETING + HEAD.pack(MESSAGE, 2**32 - 1), Fault.OVERSIZED, "at most 4194304"),
        (HEAD.pack(HELLO, 2**31), Fault.OVERSIZED, "at most 256"),
        (GREETING + HEAD.pack(77, 0), None, "unknown kind 77"),
        (GREETING + GREETING, None, "second hello"),
        (frame(MESSAGE, b"before hello"), None, "before the hello"),
        (frame(HELLO, b"\xc1"), None, "not a Hello"),
        (
            frame(HELLO, encode(Hello(WIRE_VERSION, b"\1" * 32, bytes(16), "x"))),
            None,
            "another run file",
        ),
        (frame(HELLO, encode(Hello(9, RUN, bytes(16), "x"))), None, "wire version 9"),
    ],
)
def test_a_member_that_breaks_the_rules_is_cut_off_with_the_reason(
    data: bytes, fault: Fault | None, reason: str
) -> None:
    async def story() -> None:
        members = await swarm("a", "b")
        a = members["a"]
        await rogue(members, data)
        peer, found, said = await a.faults.get()
        assert (peer, found) == ("b", fault)
        assert reason in said
        assert reason in a.channel.status()[PeerId("b")]
        assert a.channel.connected() == set()
        assert a.messages.empty()
        await close_all(members)

    run(story)


def test_the_other_side_of_a_wrong_run_file_is_told_so() -> None:
    async def story() -> None:
        members = await swarm("a", "b")
        await members["b"].close()
        other = Member("b", members["a"].endpoint.roster, run_id=b"\7" * 32)
        other.channel.connect_all()
        await other.faults.get()
        assert "another run file" in other.channel.status()[PeerId("a")]
        await other.close()
        await members["a"].close()

    run(story)


def test_a_flood_is_slowed_and_the_flooded_stays_responsive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_module, "MESSAGES_BURST", 10.0)

    async def story() -> None:
        members = await swarm("a", "b", "c")
        a = members["a"]
        await rogue(members, GREETING + frame(MESSAGE, b"x") * 50_000)
        for name in "ac":
            members[name].channel.connect_all()
        await until(lambda: "c" in a.channel.connected(), a.peers.get)
        members["c"].channel.send(PeerId("a"), b"me too")
        while (await a.messages.get())[0] != "c":
            pass
        assert "b" in a.channel.connected()
        assert a.messages.qsize() < 50_000
        await close_all(members)

    run(story)


def test_a_flood_is_slowed_for_its_peer_and_not_for_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_module, "MESSAGES_BURST", 10.0)
    monkeypatch.setattr(control_module, "MESSAGES_PER_SECOND", 1e-6)

    async def story() -> None:
        members = await swarm("a", "b")
        channel = members["a"].channel
        await rogue(members, GREETING + frame(MESSAGE, b"x") * 20)
        for _ in range(20):
            await members["a"].messages.get()
        next(iter(channel._links)).abort("cut")
        await until(lambda: not channel.connected(), members["a"].peers.get)
        await rogue(members, GREETING + frame(MESSAGE, b"y"))
        assert await members["a"].messages.get() == ("b", b"y")
        (again,) = channel._links
        assert again._transport is not None
        assert not again._transport.is_reading(), "it finds its debt again"
        await close_all(members)

    run(story)


def test_a_queue_to_a_peer_that_does_not_read_is_bounded_and_counted() -> None:
    async def story() -> None:
        members = await swarm("a", "b")
        a, b = members["a"], members["b"]
        a.channel.connect_all()
        b.channel.connect_all()
        await a.peers.get()
        await b.peers.get()
        transport = b.channel._live[PeerId("a")]._transport
        assert transport is not None
        transport.pause_reading()
        message = bytes(MAX_CONTROL_BYTES // 4)
        while not a.channel.dropped():
            a.channel.send(PeerId("b"), message)
            await asyncio.sleep(0)
        assert a.channel._outboxes[PeerId("b")]._bytes <= control_module.QUEUE_BYTES
        a.channel.send(PeerId("b"), message)
        assert a.channel.dropped()[PeerId("b")] >= 2
        transport.resume_reading()
        assert await b.messages.get() == ("a", message)
        await close_all(members)

    run(story)


def test_our_own_misuse_raises() -> None:
    async def story() -> None:
        members = await swarm("a", "b")
        a = members["a"]
        for use in (lambda m: a.channel.send(PeerId("b"), m), a.channel.broadcast):
            with pytest.raises(MisuseError):
                use(bytes(MAX_CONTROL_BYTES + 1))
        with pytest.raises(MisuseError, match="not in the roster"):
            Endpoint(PeerId("z"), key_of("z"), a.endpoint.roster, run_id=RUN, meter=Meter())
        twins = {PeerId(name): Contact("", 0, key_of("a").public) for name in "ab"}
        with pytest.raises(MisuseError, match="one key"):
            Endpoint(PeerId("a"), key_of("a"), twins, run_id=RUN, meter=Meter())
        await close_all(members)

    run(story)


def test_members_that_join_and_leave_change_nothing_for_the_others() -> None:
    """C15: a fifth party is one more line in the roster; nobody hands certificates around."""

    async def story() -> None:
        members = await swarm("a", "b")
        a, b = members["a"], members["b"]
        for member in (a, b):
            member.channel.connect_all()
        await a.peers.get()
        kept = a.channel._live[PeerId("b")]
        roster = {**a.endpoint.roster, PeerId("c"): Contact("", 0, key_of("c").public)}
        c = members["c"] = Member("c", roster)
        for member in (a, b):
            member.endpoint.update_roster(roster)
            member.channel.connect_all()
        c.channel.connect_all()
        assert await a.peers.get() == ("c", True)
        assert a.channel._live[PeerId("b")] is kept
        a.endpoint.update_roster({n: r for n, r in roster.items() if n != "c"})
        a.channel.connect_all()
        assert await a.peers.get() == ("c", False)
        assert a.channel._live[PeerId("b")] is kept
        await close_all(members)

    run(story)


# Addresses (C30)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6), "localhost", "127.0.1.1"]
)
def test_c30_ipv4_ipv6_and_names_all_work(host: str) -> None:
    async def story() -> None:
        members = await swarm("a", "b", host=host)
        for member in members.values():
            member.channel.connect_all()
        assert await members["a"].peers.get() == ("b", True)
        await close_all(members)

    run(story)


def link_local() -> str | None:
    """An IPv6 link-local address of this machine, with its scope, if there is one."""
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, _, _, scope, _, device = line.split()
        if scope == "20":
            return ":".join(digits[i : i + 4] for i in range(0, 32, 4)) + f"%{device}"
    return None


@pytest.mark.skipif(link_local() is None, reason="no IPv6 link-local address on this machine")
def test_c30_an_ipv6_link_local_address_with_its_scope_works() -> None:
    async def story() -> None:
        members = await swarm("a", "b", host=link_local() or "")
        for member in members.values():
            member.channel.connect_all()
        assert await members["a"].peers.get() == ("b", True)
        await close_all(members)

    run(story)


@needs_ipv6
@pytest.mark.parametrize("listen", ["", "*", "::"])
def test_c30_listening_everywhere_answers_ipv4_and_ipv6_on_one_port(listen: str) -> None:
    async def story() -> None:
        roster = {PeerId(n): Contact("", 0, key_of(n).public) for n in "abc"}
        a = Member("a", roster)
        port = await a.endpoint.listen(listen, 0)
        members = {"a": a}
        for name, host in (("b", "127.0.0.1"), ("c", "::1")):
            theirs = {**roster, PeerId("a"): Contact(host, port, key_of("a").public)}
            members[name] = Member(name, theirs)
            members[name].channel.connect_all()
        arrived = {await a.peers.get() for _ in "bc"}
        assert arrived == {("b", True), ("c", True)}
        await close_all(members)

    run(story)


def test_c30_a_port_in_use_names_the_process_that_holds_it() -> None:
    async def story() -> None:
        members = await swarm("a")
        port = members["a"].endpoint.roster[PeerId("a")].port
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} ") as refused:
            await members["a"].endpoint.listen("127.0.0.1", port)
        assert f"127.0.0.1:{port}" in str(refused.value)
        assert "--listen" in refused.value.hint
        await close_all(members)

    run(story)


@pytest.mark.parametrize(
    ("host", "words"),
    [("no-such-host.invalid", "does not resolve"), ("192.0.2.1", "cannot listen here")],
)
def test_c30_an_address_that_is_not_ours_is_one_clear_line(host: str, words: str) -> None:
    async def story() -> None:
        members = await swarm("a")
        with pytest.raises(ConfigError, match=words) as refused:
            await members["a"].endpoint.listen(host, 0)
        assert host in str(refused.value)
        await close_all(members)

    run(story)


def test_an_absent_peer_a_wrong_port_and_another_service_are_told_apart() -> None:
    async def story() -> None:
        members = await swarm("a", "b", "c", "d")
        a = members["a"]
        dead = socket.create_server(("127.0.0.1", 0))
        free = dead.getsockname()[1]
        dead.close()
        roster = dict(a.endpoint.roster)
        for name, host, port in (
            ("b", "127.0.0.1", free),
            ("c", "no-such-host.invalid", 1),
            ("d", "", 0),
        ):
            roster[PeerId(name)] = Contact(host, port, key_of(name).public)
        a.endpoint.update_roster(roster)
        for name, words in (
            ("b", f"b at 127.0.0.1:{free}: nothing listens there"),
            ("c", "does not resolve"),
            ("d", "it must dial us"),
        ):
            with pytest.raises(UnreachableError, match=words):
                await a.endpoint.dial(PeerId(name), CONTROL, lambda peer: asyncio.Protocol())
        await close_all(members)

    run(story)


def test_a_member_whose_key_the_others_do_not_have_is_told_so() -> None:
    """Not in the roster, or its key was changed: the dialler learns it, with the reason."""

    async def story() -> None:
        members = await swarm("a", "b")
        roster = dict(members["a"].endpoint.roster)
        roster[PeerId("m")] = Contact("", 0, key_of("m").public)
        outsider = Member("m", roster)
        outsider.channel.connect_all()
        while "is our key in its roster" not in outsider.channel.status()[PeerId("a")]:
            await asyncio.sleep(0)
        assert outsider.peers.empty()
        await outsider.close()
        await close_all(members)

    run(story)


# Metering


def test_bytes_are_measured_at_the_socket_with_tls_in_them() -> None:
    async def story() -> None:
        members = await swarm("a", "b")
        a, b = members["a"], members["b"]
        for member in members.values():
            member.channel.connect_all()
        await a.peers.get()
        before, theirs_before = a.meter.total(Plane.CONTROL), b.meter.total(Plane.CONTROL)
        a.channel.send(PeerId("b"), bytes(100_000))
        await b.messages.get()
        after, theirs = a.meter.total(Plane.CONTROL), b.meter.total(Plane.CONTROL)
        assert 100_005 < theirs.received - theirs_before.received < 102_000
        assert after.sent - before.sent > 100_005, "repeats count as sent"
        await close_all(members)
        assert a.meter.total(Plane.CONTROL).sent >= after.sent
        assert a.meter.total(Plane.PAYLOAD).sent == 0
        assert a.meter.source == "kernel (TCP_INFO)"

    run(story)


def test_congestion_control_is_set_on_each_socket_and_recorded() -> None:
    async def story() -> None:
        roster = {PeerId(n): Contact("127.0.0.1", 0, key_of(n).public) for n in "ab"}
        meter = Meter()
        for name in ("reno", "no-such-control"):
            endpoint = Endpoint(
                PeerId("a"), key_of("a"), roster, run_id=RUN, meter=meter, congestion=name
            )
            if name == "reno":
                port = await endpoint.listen("127.0.0.1", 0)
                b = Member(
                    "b", {**roster, PeerId("a"): Contact("127.0.0.1", port, key_of("a").public)}
                )
                a = ControlChannel(endpoint, lambda peer, message: None)
                b.channel.connect_all()
                assert await b.peers.get() == ("a", True)
                assert meter.congestion == {"reno"}
                await a.close()
                await b.close()
            else:
                with pytest.raises(ConfigError, match="no-such-control"):
                    await endpoint.listen("127.0.0.1", 0)
            await endpoint.close()

    run(story)


def test_farewells_are_short_frames() -> None:
    """A reason from the other side is bounded and only ever shown, never interpreted."""

    async def story() -> None:
        members = await swarm("a", "b")
        a = members["a"]
        await rogue(members, GREETING + frame(BYE, b"\xff" * 256))
        assert await a.peers.get() == ("b", True)
        assert await a.peers.get() == ("b", False)
        assert struct.calcsize(HEAD.format) == 5
        await close_all(members)

    run(story)
