"""Seven whole peers in virtual time, some of them agents; tensors are pretended by their roots."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

import pytest

from torchbft import attacks
from torchbft.attacks.agents.agent import Agent
from torchbft.attacks.agents.liar import builder
from torchbft.primitives.digests import sha256
from torchbft.primitives.effects import Effect
from torchbft.primitives.ids import PeerId, Round
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import Aggregation, Data, RunSpec, Training, new_member
from torchbft.protocols.peer import BlockDone, PeerMachine, Suspected
from torchbft.protocols.round import interface as rounds
from torchbft.sim.cluster import Cluster, Machine, Records
from torchbft.sim.network import Conditions, Network

TRAIN_SECONDS = 0.4
PUSH_SECONDS = 0.05
PAYLOAD_BYTES = 150_000
LARGEST_PAYLOAD = 200_000
"""What a node derives from layout and codec: a claim beyond it is refused without a transfer."""


def key_of(name: str) -> SigningKey:
    return SigningKey.derive(bytes(32), name)


def seven(rounds_: int = 6, peers: int = 7) -> RunSpec:
    members = [
        new_member(name, SigningKey.derive(b"\1" * 32, name), key_of(name))
        for name in (f"peer-{i}" for i in range(peers))
    ]
    run = RunSpec(
        name="attacked",
        seed="07" * 32,
        members=tuple(members),
        data=Data(samples=10_000),
        training=Training(rounds=rounds_),
        aggregation=Aggregation(),
    )
    run.check()
    return run


@dataclass
class PeerSwarm:
    """A host for whole peers: pretends training, payloads and aggregation; notes what is said."""

    run: RunSpec
    attack: str = ""
    liars: tuple[PeerId, ...] = ()
    seed: int = 0
    strength: float | None = None
    named: dict[PeerId, set[str]] = field(default_factory=dict)
    """Accused with evidence by an honest peer, and the faults."""
    suspected: dict[PeerId, set[str]] = field(default_factory=dict)
    roots: dict[PeerId, dict[int, bytes]] = field(default_factory=dict)
    fixed: dict[PeerId, dict[int, tuple[str, ...]]] = field(default_factory=dict)
    finished: set[PeerId] = field(default_factory=set)
    halted: dict[PeerId, str] = field(default_factory=dict)
    void: set[int] = field(default_factory=set)
    holders: dict[bytes, set[PeerId]] = field(default_factory=dict)
    training_hook: Callable[[PeerId, int], float] = lambda peer, round: TRAIN_SECONDS

    def __post_init__(self) -> None:
        names = [PeerId(member.name) for member in self.run.members]
        random = Random(f"attack/{self.seed}")
        conditions = Conditions(latency=0.005, jitter=0.002)
        self.cluster = Cluster(
            names, self.build, Network(random, conditions), random, on_effect=self.on_effect
        )
        self.honest = tuple(name for name in names if name not in self.liars)
        self.start_root = sha256("test/start")

    def build(self, name: PeerId, records: Records) -> Machine:
        make: Callable[..., PeerMachine | Agent] = PeerMachine
        if name in self.liars:
            kind = attacks.get(self.attack)
            assert issubclass(kind, Agent)
            make = builder(kind, seed=b"t" * 32, liars=self.liars, strength=self.strength)
        return make(self.run, name, key_of(name), sha256("secret", name.encode()), records)

    def go(self, seconds: float = 400.0) -> bool:
        """Run until every honest peer is finished or halted; whether all did."""
        self.cluster.start()
        for name in self.cluster.nodes:
            start = rounds.StateAdvanced(rounds.GENESIS_ROUND, self.start_root)
            self.cluster.feed(name, start)
        return self.cluster.run(
            seconds, lambda: all(n in self.finished or n in self.halted for n in self.honest)
        )

    # -- the host's part of each apply effect

    def on_effect(self, peer: PeerId, effect: Effect, now: float) -> Iterable[tuple[float, object]]:
        match effect:
            case rounds.StartTraining():
                root = sha256("test/payload", peer.encode(), bytes([effect.round]))
                self.holders.setdefault(root, set()).add(peer)
                done = rounds.Trained(effect.round, PAYLOAD_BYTES, root, sha256("test/trace"))
                return [(self.training_hook(peer, effect.round), done)]
            case rounds.OfferPayload():
                self.push(peer, effect)
            case rounds.FetchPayload():
                return self.fetch(peer, effect)
            case rounds.Advance():
                parts = [item.payload_root for item in effect.accepted]
                root = sha256("test/state", effect.from_root, *parts)
                return [(0.02, self.advanced(peer, effect.round, root))]
            case rounds.CatchUp(number, root, _):
                return [(0.05, self.advanced(peer, number, root))]
            case rounds.Diverged(number, _, root, _):
                return [(0.05, self.advanced(peer, number, root))]
        self.note(peer, effect)
        return []

    def advanced(self, peer: PeerId, number: int, root: bytes) -> rounds.StateAdvanced:
        self.roots.setdefault(peer, {})[number] = root
        return rounds.StateAdvanced(Round(number), root)

    def push(self, peer: PeerId, offer: rounds.OfferPayload) -> None:
        for other in offer.to or tuple(self.cluster.nodes):
            if other != peer and peer in self.holders.get(offer.payload_root, ()):
                self.holders[offer.payload_root].add(other)
                stored = rounds.PayloadStored(offer.round, peer, offer.payload_root)
                self.cluster.feed(other, stored, PUSH_SECONDS)

    def fetch(self, peer: PeerId, wish: rounds.FetchPayload) -> list[tuple[float, object]]:
        where = (wish.round, wish.author, wish.payload_root)
        if wish.length > LARGEST_PAYLOAD:
            return [(0.0, rounds.PayloadRefused(*where, "too-large"))]
        serving = self.holders.get(wish.payload_root, set()) & set(wish.holders)
        if self.attack == "selective_sender":
            serving -= set(self.liars)
        if not serving:
            return []
        self.holders[wish.payload_root].add(peer)
        return [(PUSH_SECONDS, rounds.PayloadStored(*where))]

    def note(self, peer: PeerId, effect: Effect) -> None:
        if peer in self.liars:
            return
        match effect:
            case rounds.Accuse():
                into = self.named if effect.named else self.suspected
                into.setdefault(effect.peer, set()).add(effect.fault)
            case Suspected():
                self.suspected.setdefault(effect.peer, set()).add(effect.fault)
            case rounds.Finished():
                self.finished.add(peer)
            case rounds.Halt():
                self.halted[peer] = effect.reason
            case rounds.DropRound():
                self.void.add(effect.round)
            case BlockDone():
                for event in effect.events:
                    if hasattr(event, "accepted"):
                        authors = tuple(item.author for item in event.accepted)
                        self.fixed.setdefault(peer, {})[event.round] = authors


@pytest.fixture
def swarm() -> Callable[..., PeerSwarm]:
    def make(attack: str = "", *, rounds: int = 6, peers: int = 7, **fields: object) -> PeerSwarm:
        liars = tuple(PeerId(f"peer-{i}") for i in (2, 5)) if attack else ()
        values = {"liars": liars, **fields}
        return PeerSwarm(seven(rounds, peers), attack, **values)  # type: ignore[arg-type]

    return make
