"""The application behind its socket: frames, order, bounds, faults; engines that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_engine import MAX_BLOCK, Chain, Connection, Died, Node, Site, genesis_call
from hypothesis import given
from hypothesis import strategies as st
from round_world import World

from torchbft.node.ordering import abci_server
from torchbft.node.ordering.abci_server import (
    MAX_CONNECTIONS,
    MAX_WAITING,
    AbciServer,
)
from torchbft.node.ordering.delimited import MAX_REQUEST_BYTES, Frames, framed
from torchbft.node.ordering.proto import abci_pb2 as pb
from torchbft.primitives.errors import DecodeError, StorageError

ECHO = pb.Request(echo=pb.Echo(message="hello"))


class Played(World):
    """A world that follows what a chain ordered."""

    def readies(self) -> list[bytes]:
        return [self.ready(name) for name in self.names]

    def commits(self) -> list[bytes]:
        return [self.commit(name, 0) for name in self.names]


@pytest.fixture
def world() -> Played:
    return Played(4)


@pytest.fixture
def chain(world: Played, tmp_path: Path) -> Chain:
    return Chain([Site(world.genesis, tmp_path / name) for name in world.names])


@pytest.fixture
def site(world: Played, tmp_path: Path) -> Site:
    return Site(world.genesis, tmp_path / "alone")


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 120.0))  # type: ignore[arg-type]


async def block_of(chain: Chain, txs: Sequence[bytes]) -> list[bytes]:
    for tx in txs:
        assert set(await chain.submit(tx)) == {0}
    return await chain.order()


# --- frames ---------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=400), max_size=6), st.lists(st.integers(1, 50), max_size=40))
def test_messages_come_out_whole_however_the_stream_is_cut(
    bodies: list[bytes], cuts: list[int]
) -> None:
    messages = [pb.Request(check_tx=pb.RequestCheckTx(tx=body)) for body in bodies]
    stream, frames, found = b"".join(map(framed, messages)), Frames(), list[bytes]()
    for size in [*cuts, len(stream)]:
        piece, stream = stream[:size], stream[size:]
        found += frames.feed(piece)
    found += frames.feed(stream)
    assert [pb.Request.FromString(body) for body in found] == messages


@given(st.binary(max_size=60))
def test_no_bytes_make_frames_raise_anything_else(data: bytes) -> None:
    try:
        for body in Frames().feed(data):
            assert len(body) < len(data)
    except DecodeError:
        assert data[:1] >= b"\x80" or any(byte >= 0x80 for byte in data)


@pytest.mark.parametrize(
    "head", [b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff\x01", b"\x80\x80\x80\x80", b"\x81\x80\x80\x02"]
)
def test_a_length_beyond_the_bound_is_refused_before_a_byte_of_it_is_kept(head: bytes) -> None:
    with pytest.raises(DecodeError, match="more than"):
        list(Frames().feed(head))


def test_the_longest_message_passes() -> None:
    body = pb.Request(check_tx=pb.RequestCheckTx(tx=bytes(MAX_REQUEST_BYTES - 16)))
    frames, data = Frames(), framed(body)
    assert list(frames.feed(data[:-1])) == []
    (found,) = frames.feed(data[-1:])
    assert pb.Request.FromString(found) == body


# --- one connection -------------------------------------------------------------------------------


def test_answers_leave_in_the_order_of_the_questions(site: Site) -> None:
    async def story() -> None:
        await site.up()
        link = await Connection.open(site.address)
        asked = [pb.Request(echo=pb.Echo(message=str(number))) for number in range(200)]
        for request in asked:
            link.send(request, pb.Request(flush=pb.Empty()))
        for request in asked:
            assert (await link.receive()).echo == request.echo
            assert (await link.receive()).WhichOneof("value") == "flush"
        link.close()
        await site.down()

    run(story)
    assert site.faults == []


@pytest.mark.parametrize(
    "junk",
    [
        b"\xff\xff\xff\xff\xff",
        b"\x05hello",
        b"\x00",
        b"\x02\xaa\x01",
        framed(pb.Request()),
        b"\x04\x0a\x02\x0a\xff",
    ],
)
def test_what_is_no_request_ends_its_connection_with_an_exception(site: Site, junk: bytes) -> None:
    async def story() -> None:
        await site.up()
        bad, good = [await Connection.open(site.address) for _ in range(2)]
        bad.send(ECHO)
        assert (await bad.receive()).echo.message == "hello"
        bad.write(junk)
        assert (await bad.receive()).exception.error
        with pytest.raises(Died):
            await bad.receive()
        good.send(ECHO)
        assert (await good.receive()).echo.message == "hello"
        good.close()
        await site.down()

    run(story)
    assert [type(fault) for fault in site.faults] == [DecodeError]


def test_a_request_of_a_call_that_is_not_ours_is_told_so(site: Site) -> None:
    """Vote extensions: field 18 of the specification's request."""

    async def story() -> None:
        await site.up()
        link = await Connection.open(site.address)
        link.write(b"\x03\x92\x01\x00")
        assert "no known kind" in (await link.receive()).exception.error
        await site.down()

    run(story)


def test_a_connection_that_breaks_off_in_a_message_is_no_fault(site: Site) -> None:
    async def story() -> None:
        await site.up()
        for cut in range(1, len(framed(ECHO))):
            link = await Connection.open(site.address)
            link.write(framed(ECHO)[:cut])
            link.close()
        link = await Connection.open(site.address)
        link.send(ECHO)
        assert (await link.receive()).echo.message == "hello"
        await site.down()

    run(story)
    assert site.faults == []


# --- connections ----------------------------------------------------------------------------------


def test_four_are_served_as_many_wait_and_more_are_turned_away(site: Site) -> None:
    async def story() -> None:
        await site.up()
        links = [
            await Connection.open(site.address) for _ in range(MAX_CONNECTIONS + MAX_WAITING + 1)
        ]
        served, waiting, refused = links[:MAX_CONNECTIONS], links[MAX_CONNECTIONS:-1], links[-1]
        for link in served:
            link.send(ECHO)
            await link.receive()
        with pytest.raises((Died, ConnectionError)):
            await refused.receive()
        for link in waiting:
            link.send(ECHO)
        for _ in range(3):
            served[0].send(ECHO)
            await served[0].receive()
        assert not any(link.has_answer() for link in waiting)
        for link in served:  # the old engine is dead: the new one's connections take the places
            link.close()
        for link in waiting:
            assert (await link.receive()).echo.message == "hello"
            link.close()
        await site.down()

    run(story)


def test_an_engine_may_come_back_any_number_of_times(site: Site) -> None:
    async def story() -> None:
        await site.up()
        for _ in range(5):
            node = Node(site)
            await node.up([])
            node.die()
        await site.down()

    run(story)
    assert site.faults == []


def test_a_socket_that_a_crash_left_is_replaced_and_none_is_left_behind(site: Site) -> None:
    async def story() -> None:
        site.folder.mkdir()
        (site.folder / "abci").write_text("left behind")
        await site.up()
        link = await Connection.open(site.address)
        link.send(ECHO)
        await link.receive()
        await site.down()
        await site.down()

    run(story)
    assert list(site.folder.iterdir()) == []


def test_a_socket_that_cannot_be_opened_is_told_with_its_path(tmp_path: Path) -> None:
    async def story() -> None:
        async def answer(request: pb.Request) -> pb.Response:
            return pb.Response()

        with pytest.raises(StorageError, match="opening a socket failed") as caught:
            await AbciServer(answer, lambda error: None).open(str(tmp_path / "no" / "abci"))
        assert str(tmp_path) in str(caught.value)

    run(story)


def test_where_there_are_no_such_sockets_loopback_serves(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loopback:
        def __getattr__(self, name: str) -> Any:
            if name == "start_unix_server":
                raise AttributeError(name)
            return getattr(asyncio, name)

    monkeypatch.setattr(abci_server, "asyncio", Loopback())

    async def story() -> None:
        await site.up()
        host, _, port = site.address.removeprefix("tcp://").partition(":")
        assert host == "127.0.0.1"
        link = Connection(*await asyncio.open_connection(host, int(port)))
        link.send(ECHO)
        assert (await link.receive()).echo.message == "hello"
        link.close()
        await site.down()

    run(story)


# --- the chain's life -----------------------------------------------------------------------------


def test_four_applications_take_the_same_blocks(chain: Chain, world: Played) -> None:
    async def story() -> None:
        await chain.start()
        assert await block_of(chain, world.readies()) == world.readies()
        assert await block_of(chain, world.commits()) == world.commits()
        await chain.stop()

    run(story)
    states = {node.site.application.state.digest() for node in chain.nodes}
    assert len(states) == 1
    for results in chain.results:
        assert len({result.SerializeToString() for result in results}) == 1
    assert chain.results[-1][0].tx_results[-1].data in states
    assert all(node.site.faults == [] for node in chain.nodes)


@pytest.mark.parametrize("kept", [True, False])
def test_after_a_crash_between_finalize_and_commit_the_block_comes_again(
    chain: Chain, world: Played, kept: bool
) -> None:
    async def story() -> None:
        await chain.start()
        await block_of(chain, world.readies())
        victim = chain.nodes[1]
        if not kept:
            victim.site.saved = b""  # the file is gone: all blocks come again
        for tx in world.commits():
            await chain.submit(tx)
        await chain.order(dies=lambda node: node is victim)
        assert victim.site.application.info() == chain.nodes[0].site.application.info()
        assert victim.site.saved == chain.nodes[0].site.saved
        await block_of(chain, [world.open(name, 0) for name in world.names])
        await chain.stop()

    run(story)
    assert len({node.site.saved for node in chain.nodes}) == 1
    assert chain.nodes[0].site.application.state.phase == "attest"


def test_an_engine_that_died_alone_finds_the_application_where_it_was(
    chain: Chain, world: Played
) -> None:
    async def story() -> None:
        await chain.start()
        await block_of(chain, world.readies())
        commits = world.commits()
        for tx in commits[:2]:
            await chain.submit(tx)
        await chain.restart(chain.nodes[0], site=False)
        assert chain.nodes[0].mempool == {}
        for tx in commits[2:]:
            await chain.submit(tx)
        chain.turn = 0  # the restarted one proposes what its application has seen
        assert await chain.order() == commits
        await chain.stop()

    run(story)


@pytest.mark.parametrize("height", [-1, 0, 1, 3, 2**62])
def test_only_the_next_height_is_finalized(chain: Chain, world: Played, height: int) -> None:
    async def story() -> None:
        await chain.start()
        await block_of(chain, world.readies())
        node = chain.nodes[0]
        with pytest.raises(Died, match="does not follow block 1"):
            await node.finalize(height, [])
        await chain.stop()

    run(story)
    assert chain.nodes[0].site.application.info().last_height == 1
    assert len(chain.nodes[0].site.faults) == 1


def test_a_commit_of_nothing_is_refused(site: Site) -> None:
    async def story() -> None:
        await site.up()
        node = Node(site)
        await node.up([])
        with pytest.raises(Died, match="no block was finalized"):
            await node.ask("consensus", "commit")
        await site.down()

    run(story)
    assert site.told == []


def test_where_the_state_cannot_be_saved_the_engine_is_not_told_that_it_was(
    chain: Chain, world: Played
) -> None:
    full = StorageError("saving a file failed: the disk is full", where="here", hint="free space")

    def refuse(_: bytes) -> None:
        raise full

    async def story() -> None:
        await chain.start()
        await block_of(chain, world.readies())
        victim = chain.nodes[0]
        before, victim.site.save = victim.site.saved, refuse
        await victim.finalize(2, [])
        with pytest.raises(Died, match="the disk is full"):
            await victim.ask("consensus", "commit")
        assert victim.site.saved == before
        victim.site.save = None
        chain.blocks.append([])
        await chain.restart(victim, site=True)
        assert victim.site.application.info().last_height == 2
        await chain.stop()

    run(story)
    assert chain.nodes[0].site.faults == [full]


def _with(**changes: Any) -> pb.RequestInitChain:
    call = genesis_call(World(4).genesis)
    for name, value in changes.items():
        setattr(call, name, value)
    return call


def _another_power() -> pb.RequestInitChain:
    call = _with()
    call.validators[2].power = 9
    return call


def _another_age() -> pb.RequestInitChain:
    call = _with()
    call.consensus_params.evidence.max_age_num_blocks = 7
    return call


def _one_less() -> pb.RequestInitChain:
    call = _with()
    del call.validators[0]
    return call


@pytest.mark.parametrize(
    "call",
    [
        _with(chain_id="other"),
        _with(initial_height=2),
        _with(app_state_bytes=b""),
        _with(app_state_bytes=b'{"genesis":"00"}'),
        _with(app_state_bytes=b"[" * 100_000),
        genesis_call(World(7).genesis),
        genesis_call(World(4, m_min=2).genesis),
        _another_power(),
        _another_age(),
        _one_less(),
    ],
)
def test_another_genesis_is_refused(site: Site, call: pb.RequestInitChain) -> None:
    async def story() -> None:
        await site.up()
        link = await Connection.open(site.address)
        with pytest.raises(Died, match="another genesis"):
            await link.ask("init_chain", call)
        await site.down()

    run(story)


def test_the_same_genesis_in_other_words_is_accepted(site: Site) -> None:
    """The engine parses the file and writes it anew: order of validators and spaces may change,
    and it fills in parameters that this subset does not know."""
    call = _with()
    call.validators.reverse()
    call.app_state_bytes = call.app_state_bytes.replace(b":", b" : ")
    call.consensus_params.MergeFromString(b"\x32\x00")

    async def story() -> None:
        await site.up()
        link = await Connection.open(site.address)
        answer = await link.ask("init_chain", call)
        assert answer.app_hash == site.application.info().last_app_hash
        assert not answer.validators
        await site.down()

    run(story)


def test_a_proposal_keeps_to_its_size(chain: Chain, world: Played) -> None:
    async def story() -> None:
        await chain.start()
        for tx in world.readies():
            await chain.submit(tx)
        first = chain.nodes[0]
        size = len(world.readies()[0])
        for limit, count in ((0, 0), (size, 0), (2 * size + 16, 2), (MAX_BLOCK, 4)):
            call = pb.RequestPrepareProposal(max_tx_bytes=limit, height=1)
            answer = await first.ask("consensus", "prepare_proposal", call)
            assert len(answer.txs) == count
        await chain.stop()

    run(story)
