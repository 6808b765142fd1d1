"""What the engine's calls do beyond the application's own: waiting, filtering, snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import LIMIT, Chain, Connection, Node, Site
from round_world import World

from torchbft.node.ordering.calls import DUPLICATE_VOTE
from torchbft.node.ordering.proto import abci_pb2 as pb
from torchbft.primitives.abci import FinalizeResult, Misbehaviour, TxResult, ValidatorUpdate
from torchbft.protocols.chain.messages import address_of
from torchbft.protocols.peer import CommitBlock, SnapshotTaken

FOREVER = 10.0 * LIMIT
"""A wait that ends no test in time."""


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 2 * LIMIT))  # type: ignore[arg-type]


@pytest.fixture
def world() -> World:
    return World(4)


def at(world: World, folder: Path, wait: float) -> Site:
    return Site(world.genesis, folder / "site", wait)


async def alone(site: Site) -> Node:
    await site.up()
    node = Node(site)
    await node.up([])
    return node


def proposal(*txs: bytes, height: int = 1) -> pb.Request:
    call = pb.RequestPrepareProposal(max_tx_bytes=1 << 20, txs=txs, height=height)
    return pb.Request(prepare_proposal=call)


async def check(node: Node, tx: bytes) -> int:
    answer = await node.ask("mempool", "check_tx", pb.RequestCheckTx(tx=tx))
    return int(answer.code)


# --- the bounded wait (ROUND.md 19) ---------------------------------------------------------------


def test_a_proposal_waits_for_what_the_phase_expects_and_no_longer(
    world: World, tmp_path: Path
) -> None:
    site = at(world, tmp_path, FOREVER)
    readies = [world.ready(name) for name in world.names]

    async def story() -> None:
        node = await alone(site)
        await check(node, readies[0])
        consensus = node.connections["consensus"]
        consensus.send(proposal(readies[0]))
        for tx in readies[1:]:
            assert site.told == []
            await check(node, tx)  # the other connections go on meanwhile
        assert list((await consensus.receive()).prepare_proposal.txs) == readies
        await site.down()

    run(story)


def test_what_comes_over_the_control_channel_ends_the_wait_as_well(
    world: World, tmp_path: Path
) -> None:
    site = at(world, tmp_path, FOREVER)
    readies = [world.ready(name) for name in world.names]

    async def story() -> None:
        node = await alone(site)
        await check(node, readies[0])
        consensus = node.connections["consensus"]
        consensus.send(proposal(readies[0]))
        await check(node, readies[1])
        for tx in readies[2:]:
            assert site.application.check_tx(tx).code == 0
        site.calls.arrived()
        assert list((await consensus.receive()).prepare_proposal.txs) == readies
        await site.down()

    run(story)


def test_nothing_pending_is_not_waited_for(world: World, tmp_path: Path) -> None:
    """The engine's empty block after a round must not cost the wait of the next window."""
    site = at(world, tmp_path, FOREVER)

    async def story() -> None:
        node = await alone(site)
        consensus = node.connections["consensus"]
        consensus.send(proposal())
        assert list((await consensus.receive()).prepare_proposal.txs) == []
        assert site.calls._wait._spent is None
        await site.down()

    run(story)


def test_the_wait_is_bounded_and_spent_once_per_window(world: World, tmp_path: Path) -> None:
    site = at(world, tmp_path, 0.01)
    readies = [world.ready(name) for name in world.names]
    commits = [world.commit(name, 0) for name in world.names]

    async def story() -> None:
        node = await alone(site)
        await check(node, readies[0])
        consensus = node.connections["consensus"]
        consensus.send(proposal(readies[0]))
        assert list((await consensus.receive()).prepare_proposal.txs) == readies[:1]
        site.calls._wait._seconds = FOREVER
        consensus.send(proposal(readies[0]))  # as after another proposer's round
        assert list((await consensus.receive()).prepare_proposal.txs) == readies[:1]
        await node.finalize(1, readies)
        await node.ask("consensus", "commit")
        await check(node, commits[0])
        consensus.send(proposal(commits[0], height=2))
        assert await check(node, commits[1]) == 0
        assert site.calls._wait._spent == (0, "ready")
        for tx in commits[2:]:
            await check(node, tx)
        assert list((await consensus.receive()).prepare_proposal.txs) == commits
        await site.down()

    run(story)


# --- who may connect ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "admitted"),
    [
        ("/p2p/filter/addr/127.0.0.1:26656", True),
        ("/p2p/filter/id/friend", True),
        ("/p2p/filter/id/stranger", False),
        ("/p2p/filter/id/", False),
        ("/p2p/filter/id/friend/x", False),
        ("/p2p/filter/", False),
        ("/p2p/filter/friend", False),
    ],
)
def test_only_members_may_connect(world: World, tmp_path: Path, path: str, admitted: bool) -> None:
    site = at(world, tmp_path, 0.0)

    async def story() -> None:
        node = await alone(site)
        answer = await node.ask("query", "query", pb.RequestQuery(path=path))
        assert (answer.code == 0) == admitted
        assert bool(answer.log) != admitted
        await site.down()

    run(story)


def test_queries_are_the_applications(world: World, tmp_path: Path) -> None:
    site = at(world, tmp_path, 0.0)

    async def story() -> None:
        node = await alone(site)
        answer = await node.ask("query", "query", pb.RequestQuery(path="height"))
        assert (answer.code, answer.value) == (0, b"0")
        answer = await node.ask("query", "query", pb.RequestQuery(path="nothing"))
        assert answer.code != 0
        assert "state, height" in answer.log
        assert not site.faults, "a question about nothing ends no engine"
        await site.down()

    run(story)


# --- what a block tells ---------------------------------------------------------------------------


def test_a_double_vote_is_told_by_key_and_nothing_else_is(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = at(world, tmp_path, 0.0)
    key = world.keys["peer-2"].public
    reported: list[Misbehaviour] = []

    def finalize(height: int, txs: Any, misbehaviour: Any) -> FinalizeResult:
        reported.extend(misbehaviour)
        return FinalizeResult((), bytes(32))

    def of(kind: int, address: bytes) -> pb.Misbehavior:
        return pb.Misbehavior(type=kind, validator=pb.Validator(address=address), height=4)

    async def story() -> None:
        node = await alone(site)
        monkeypatch.setattr(site.application, "finalize_block", finalize)
        call = pb.RequestFinalizeBlock(
            height=1,
            misbehavior=[
                of(DUPLICATE_VOTE, address_of(key)),
                of(2, address_of(world.keys["peer-1"].public)),
                of(DUPLICATE_VOTE, bytes(20)),
            ],
        )
        await node.ask("consensus", "finalize_block", call)
        await site.down()

    run(story)
    assert reported == [Misbehaviour(key, 4)]


def test_results_and_new_validators_reach_the_engine_in_its_units(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = at(world, tmp_path, 0.0)
    result = FinalizeResult(
        (TxResult(), TxResult(2, "late", b"digest")),
        b"h" * 32,
        (ValidatorUpdate(b"k" * 32, 3), ValidatorUpdate(b"l" * 32, 0)),
    )

    async def story() -> None:
        node = await alone(site)
        monkeypatch.setattr(site.application, "finalize_block", lambda *_: result)
        answer = await node.finalize(1, [b"one", b"two"])
        assert [(each.code, each.data) for each in answer.tx_results] == [(0, b""), (2, b"digest")]
        assert [(v.pub_key.ed25519, v.power) for v in answer.validator_updates] == [
            (b"k" * 32, 30),
            (b"l" * 32, 0),
        ]
        assert answer.app_hash == b"h" * 32
        await site.down()

    run(story)


def test_a_committed_block_is_told_with_its_size(world: World, tmp_path: Path) -> None:
    site = at(world, tmp_path, 0.0)
    readies = [world.ready(name) for name in world.names]

    async def story() -> None:
        node = await alone(site)
        for tx in readies:
            await check(node, tx)
        await node.finalize(1, readies)
        await node.ask("consensus", "commit")
        await node.finalize(2, [])
        await node.ask("consensus", "commit")
        await site.down()

    run(story)
    first, second = site.told
    assert isinstance(first, CommitBlock)
    assert isinstance(second, CommitBlock)
    assert (first.txs, first.size) == (4, sum(map(len, readies)))
    assert first.seconds > 0.0
    assert first.events
    assert second == CommitBlock(0, 0, 0.0, ())


# --- snapshots ------------------------------------------------------------------------------------


async def rounds_of(chain: Chain, world: World) -> None:
    """One round, so that a snapshot exists."""
    groups: list[list[bytes]] = [
        [world.ready(name) for name in world.names],
        [world.commit(name, 0) for name in world.names],
        [world.open(name, 0) for name in world.names],
        [world.attest(name, 0) for name in world.names],
    ]
    for txs in groups:
        for tx in txs:
            await chain.submit(tx)
        await chain.order()
        world.state = chain.nodes[0].site.application.state


def test_a_snapshot_is_offered_once_two_blocks_follow_and_brings_a_joiner_up(
    world: World, tmp_path: Path
) -> None:
    chain = Chain([at(world, tmp_path, 0.05)])
    joiner = Site(world.genesis, tmp_path / "joiner")

    async def story() -> None:
        await chain.start()
        await rounds_of(chain, world)
        (node,) = chain.nodes
        for height, count in ((4, 0), (5, 0), (6, 1)):
            assert node.site.application.info().last_height == height
            listed = await node.ask("snapshot", "list_snapshots")
            assert len(listed.snapshots) == count
            await chain.order()
        (snapshot,) = listed.snapshots
        app_hash = chain.results[snapshot.height - 1][0].app_hash
        await joiner.up()
        link = await Connection.open(joiner.address)
        await _restore(node, link, snapshot, app_hash)
        assert joiner.application.info().last_height == snapshot.height == 4
        assert joiner.told == [SnapshotTaken()]
        await joiner.down()
        await joiner.up()  # before the next block: the snapshot must have been saved
        other = Node(joiner)
        await other.up(chain.blocks)
        assert joiner.saved == node.site.saved
        await chain.stop()
        await joiner.down()

    run(story)


async def _restore(node: Node, link: Connection, snapshot: Any, app_hash: bytes) -> None:
    strange = pb.Snapshot(height=snapshot.height, format=9, chunks=1)
    for offered, given, result in (
        (strange, app_hash, 4),
        (pb.Snapshot(height=0, format=1, chunks=1), app_hash, 3),
        (snapshot, app_hash, 1),
    ):
        call = pb.RequestOfferSnapshot(snapshot=offered, app_hash=given)
        assert (await link.ask("offer_snapshot", call)).result == result
    for index in range(snapshot.chunks):
        wanted = pb.RequestLoadSnapshotChunk(height=snapshot.height, format=1, chunk=index)
        chunk = (await node.ask("snapshot", "load_snapshot_chunk", wanted)).chunk
        applied = pb.RequestApplySnapshotChunk(index=index, chunk=chunk)
        assert (await link.ask("apply_snapshot_chunk", applied)).result == 1
    none = pb.RequestLoadSnapshotChunk(height=snapshot.height, format=2, chunk=0)
    assert (await node.ask("snapshot", "load_snapshot_chunk", none)).chunk == b""


def test_a_false_snapshot_is_rejected_and_changes_nothing(world: World, tmp_path: Path) -> None:
    site = at(world, tmp_path, 0.0)

    async def story() -> None:
        node = await alone(site)
        call = pb.RequestOfferSnapshot(
            snapshot=pb.Snapshot(height=4, format=1, chunks=1), app_hash=bytes(32)
        )
        assert (await node.ask("snapshot", "offer_snapshot", call)).result == 1
        chunk = pb.RequestApplySnapshotChunk(index=0, chunk=b"false")
        assert (await node.ask("snapshot", "apply_snapshot_chunk", chunk)).result == 5
        await site.down()

    run(story)
    assert site.application.info().last_height == 0
    assert site.told == []
