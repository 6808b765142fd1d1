"""A whole peer in a liar's hands: what its own engine gets, and that it does not stop for shame."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from torchbft import attacks
from torchbft.attacks.agents.agent import Agent
from torchbft.attacks.agents.liar import LiarPeer, builder
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SigningKey
from torchbft.protocols.ledger.messages import decode_finalized
from torchbft.protocols.peer import PeerMachine
from torchbft.protocols.round.interface import Halt
from torchbft.protocols.round.messages import Opening, parse

Make = Callable[..., Any]


def openings_of(swarm: Any, liar: str) -> set[str]:
    """Members whose blocks, as proposers, hold an opening of the liar."""
    found = set()
    for record in swarm.cluster.nodes[swarm.honest[0]].disk.read()["blocks"]:
        block = decode_finalized(record).block
        statements = [parse(tx).statement for tx in block.txs]
        if any(isinstance(said, Opening) and said.author == liar for said in statements):
            found.add(block.proposer)
    return found


def test_what_is_withheld_is_not_proposed_by_the_liar_itself(swarm: Make) -> None:
    run = swarm("withholder", rounds=6, peers=4, liars=("peer-2",))
    assert run.go()
    leaders = {
        decode_finalized(record).block.proposer
        for record in run.cluster.nodes[PeerId("peer-0")].disk.read()["blocks"]
    }
    assert "peer-2" in leaders
    assert openings_of(run, "peer-2") == set()
    assert openings_of(run, "peer-1")


@pytest.mark.parametrize("peer_class", [LiarPeer, PeerMachine])
def test_an_equivocator_goes_on_where_an_honest_machine_halts(
    swarm: Make, monkeypatch: pytest.MonkeyPatch, peer_class: type[PeerMachine]
) -> None:
    """Statements of its key that it did not log stop an honest peer (lost signing state)."""
    monkeypatch.setattr("torchbft.attacks.agents.liar.LiarPeer", peer_class)
    run = swarm("equivocator", rounds=3, peers=4, liars=("peer-2",))
    halts: list[object] = []

    def on_effect(peer: PeerId, effect: object, now: float) -> Iterable[tuple[float, object]]:
        if peer == "peer-2" and isinstance(effect, Halt):
            halts.append(effect)
        return carry_out(peer, effect, now)

    carry_out, run.cluster._on_effect = run.cluster._on_effect, on_effect
    assert run.go()
    assert bool(halts) == (peer_class is PeerMachine)
    assert set(run.named) == {"peer-2"}


@pytest.mark.parametrize("name", ["withholder", "straggler"])
def test_the_builder_stands_in_for_a_peers_machine(swarm: Make, name: str) -> None:
    run = swarm(peers=4).run
    kind = attacks.get(name)
    assert issubclass(kind, Agent)
    build = builder(kind, seed=b"s", liars=[PeerId("peer-2")], strength=3.5)
    key = SigningKey.derive(bytes(32), "peer-2")
    given = (run, PeerId("peer-2"), key, bytes(32), {})
    liar, honest = build(*given), PeerMachine(*given)
    assert isinstance(liar.machine, LiarPeer)
    assert liar.height == honest.height == 0
    assert liar.application.state == honest.application.state
    assert liar.strength == 3.5
    assert liar.others == ("peer-0", "peer-1", "peer-3")
    assert key.seed().hex() not in repr(vars(liar))
    assert liar.deadline() is None or isinstance(liar.deadline(), float)
