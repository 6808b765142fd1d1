"""The same application under both engines: the same random transactions, crashes and faults leave
the same accepted sets, results and states. Here the engine outside is a fake that speaks ABCI over
sockets; ``tests/integration/ordering`` does it with CometBFT.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fake_engine import Chain, Node, Site
from round_world import World
from two_engines import MAX_STEPS, Embedded, Script, Step

from torchbft.node.ordering import calls
from torchbft.node.ordering.calls import Calls
from torchbft.node.ordering.proto import abci_pb2 as pb
from torchbft.protocols.round.state import LedgerState, Phase

ROUNDS = 3
SEEDS = range(8)
"""Few enough to be quick; the next test tells whether they are enough."""


class Faked:
    """The chain outside, driven step by step."""

    def __init__(self, world: World, folder: Path) -> None:
        self._names = world.names
        folder.mkdir(exist_ok=True)
        sites = [Site(world.genesis, folder / name, wait=0.0) for name in world.names]
        self.chain = Chain(sites)

    @property
    def states(self) -> list[LedgerState]:
        return [node.site.application.state for node in self.chain.nodes]

    def node(self, name: str) -> Node:
        return self.chain.nodes[self._names.index(name)]

    async def play(self, step: Step) -> None:
        if step.restarts:
            await self.chain.restart(self.node(step.restarts), site=True)
        if step.stays_down:
            self.node(step.stays_down).die()
            await self.node(step.stays_down).site.down()
        for tx in step.txs:
            await self.chain.submit(tx)
        if any(node.mempool for node in self.chain.alive):
            await self.chain.order(dies=lambda node: node is self._dying(step))
        if step.stays_down:
            node = self.node(step.stays_down)
            await node.site.up()
            await node.up(self.chain.blocks)

    def _dying(self, step: Step) -> Node | None:
        return self.node(step.dies_committing) if step.dies_committing else None


def told(state: LedgerState) -> tuple[object, ...]:
    """What a round came to: who counted, and the ledger's part of the agreed state's root."""
    known = [each for each in (state.previous, state.current) if each is not None]
    return tuple((r.number, r.verdict, r.accepted, r.agreed) for r in known)


def compare(folder: Path, seed: int) -> Embedded:
    world = World(4, rounds=ROUNDS)
    embedded, script = Embedded(world), Script(World(4, rounds=ROUNDS), seed)

    async def play() -> None:
        outside = Faked(world, folder)
        await outside.chain.start()
        for _ in range(MAX_STEPS):
            if embedded.state.phase == Phase.FINISHED:
                break
            step = script.step(embedded.state)
            embedded.play(step)
            await outside.play(step)
            for state in (*outside.states, *(a.state for a in embedded.applications.values())):
                assert told(state) == told(embedded.state)
                assert state.digest() == embedded.state.digest()
            assert [tuple(txs) for txs in outside.chain.blocks] == embedded.blocks
        await outside.chain.stop()
        results = [each[0] for each in outside.chain.results]
        for ours, theirs in zip(results, embedded.results, strict=True):
            assert ours.app_hash == theirs.app_hash
            assert [(r.code, r.data) for r in ours.tx_results] == [
                (r.code, r.data) for r in theirs.tx_results
            ]
        assert all(not node.site.faults for node in outside.chain.nodes)

    asyncio.run(asyncio.wait_for(play(), 300.0))
    return embedded


@pytest.mark.parametrize("seed", range(5))
def test_both_engines_leave_the_same_states(tmp_path: Path, seed: int) -> None:
    played = compare(tmp_path, seed)
    assert len(played.blocks) > ROUNDS


def test_the_scripts_reach_what_they_are_meant_to(tmp_path: Path) -> None:
    """Or equal states would mean nothing: rounds fixed and void, convictions, late items."""
    verdicts, convicted, codes = set(), 0, set()
    for seed in SEEDS:
        world = World(4, rounds=ROUNDS)
        embedded, script = Embedded(world), Script(World(4, rounds=ROUNDS), seed)
        for _ in range(MAX_STEPS):
            if embedded.state.phase == Phase.FINISHED:
                break
            embedded.play(script.step(embedded.state))
            if embedded.state.previous is not None:
                verdicts.add(str(embedded.state.previous.verdict))
        convicted += any(member.convicted for member in embedded.state.members)
        codes |= {r.code for result in embedded.results for r in result.tx_results}
    assert verdicts == {"fixed", "void"}
    assert convicted
    assert codes >= {0, 2}


def test_an_application_that_takes_a_block_otherwise_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: one transaction of a block gets lost on its way to the application."""
    finalize = Calls._finalize_block

    def lossy(self: Calls, asked: pb.RequestFinalizeBlock) -> pb.ResponseFinalizeBlock:
        del asked.txs[3:4]
        return finalize(self, asked)

    monkeypatch.setitem(calls._ANSWERS, "finalize_block", lossy)
    with pytest.raises(AssertionError):
        compare(tmp_path, 0)
