"""A seeded swarm: random networks, crashes and adversaries; first *safety*, then *liveness*.

The two phases are those of TigerBeetle's VOPR: in the first anything may fail, and nothing wrong
may be finalized; then the network heals, a random core of n−f honest peers runs, the adversaries go
on, and the core must finalize what it is given. Everything follows from the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from torchbft.primitives.digests import sha256
from torchbft.primitives.effects import Effect
from torchbft.primitives.errors import PreconditionError
from torchbft.primitives.faults import FaultModel
from torchbft.primitives.ids import Height, PeerId
from torchbft.primitives.keys import SigningKey
from torchbft.protocols.ledger.certificates import Validator, ValidatorSet
from torchbft.protocols.ledger.machine import LedgerMachine
from torchbft.protocols.ledger.messages import Transaction, decode_finalized
from torchbft.protocols.ledger.state import LedgerConfig
from torchbft.sim.byzantine import ADVERSARIES, Seat
from torchbft.sim.checkers import (
    CertificatesAreValid,
    Checker,
    HeightsInOrder,
    HonestAreNotAccused,
    OneBlockPerHeight,
    OneVotePerSlot,
    SameApplicationHash,
    decoded,
)
from torchbft.sim.cluster import Cluster, Machine, Records
from torchbft.sim.network import Conditions, Network
from torchbft.sim.toy import ToyApplication

SAFETY_SECONDS = 40.0
"""Virtual length of phase one: a handful of time-outs, dozens of blocks."""

LIVENESS_SECONDS = 600.0
"""Virtual time within which the core must finalize: four of the longest views."""

HEALTHY = Conditions(latency=0.02, jitter=0.005)
"""The network of phase two."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What one seed means; drawn from it and printed with a failure."""

    conditions: Conditions
    adversaries: tuple[str, ...]
    crashes: int
    partitions: int
    transactions: int
    sync_seconds: float

    @classmethod
    def drawn(cls, random: Random, byzantine: int) -> Parameters:
        """The parameters of a seed."""
        conditions = Conditions(
            latency=random.choice([0.002, 0.02, 0.1]),
            jitter=random.choice([0.001, 0.01, 0.1]),
            bandwidth=random.choice([1e6, 12.5e6]),
            loss=random.choice([0.0, 0.01, 0.1, 0.3]),
            duplicate=random.choice([0.0, 0.1]),
            reorder=random.choice([0.0, 0.2]),
        )
        return cls(
            conditions,
            tuple(random.choice(sorted(ADVERSARIES)) for _ in range(byzantine)),
            random.randint(0, 16),
            random.randint(0, 4),
            random.randint(10, 60),
            random.choice([0.0, 0.005]),
        )


@dataclass(frozen=True, slots=True)
class SimResult:
    """How a run ended. Empty lists are success; heights are of the honest peers at the end."""

    seed: int
    parameters: Parameters
    safety_violations: list[str]
    liveness_failures: list[str]
    trace_hash: str
    heights: dict[str, int]
    accused: tuple[str, ...]
    seconds: float
    """Virtual time that passed."""
    messages: int


class _Swarm:
    """One run: peers, their keys and applications, and the checkers beside them."""

    def __init__(self, seed: int, peers: int, byzantine: int, faults: FaultModel | None) -> None:
        self.seed, self.quorum = seed, FaultModel(peers).quorum
        self.random = Random(f"swarm/{seed}")
        self.parameters = Parameters.drawn(self.random, byzantine)
        self.run_id = sha256("sim/run", seed.to_bytes(8, "big"))
        self.names = tuple(PeerId(f"peer-{i:02d}") for i in range(peers))
        self.keys = {name: SigningKey.derive(bytes(32), name) for name in self.names}
        self.applications: dict[PeerId, ToyApplication] = {}
        members = (Validator(name, key.public) for name, key in self.keys.items())
        self.validators = ValidatorSet(members, faults)
        liars = self.random.sample(self.names, byzantine)
        self.liars = dict(zip(sorted(liars), self.parameters.adversaries, strict=True))
        self.honest = tuple(name for name in self.names if name not in self.liars)
        publics = {name: key.public for name, key in self.keys.items()}
        self.certificates = CertificatesAreValid(self.run_id, publics)
        self.accusations = HonestAreNotAccused(frozenset(self.honest))
        self.checkers: list[Checker] = [
            OneBlockPerHeight(),
            HeightsInOrder(),
            OneVotePerSlot(),
            SameApplicationHash(),
            self.certificates,
            self.accusations,
        ]
        self.cluster = Cluster(
            self.names,
            self.build,
            Network(self.random, self.parameters.conditions),
            self.random,
            on_effect=self.on_effect,
            on_message=self.on_message,
            sync_seconds=self.parameters.sync_seconds,
        )
        for node in self.cluster.nodes.values():
            node.skew, node.rate = self.random.random() * 1e4, self.random.uniform(0.99, 1.01)

    def build(self, name: PeerId, records: Records) -> Machine:
        if name in self.liars:
            seat = Seat(
                self.run_id,
                name,
                self.names,
                self.keys[name],
                Random(f"{self.seed}/{name}"),
                lambda censored: self.ledger(name, {}, ToyApplication(censored)),
            )
            return ADVERSARIES[self.liars[name]](seat)
        for checker in self.checkers:
            checker.on_start(name)
        self.applications[name] = ToyApplication()
        return self.ledger(name, records, self.applications[name])

    def ledger(self, name: PeerId, records: Records, application: ToyApplication) -> LedgerMachine:
        config = LedgerConfig(self.run_id, name, proposal_wait=0.2, view_timeout=2.0, resend=0.5)
        key, validators = self.keys[name], self.validators
        return LedgerMachine(
            config, key, validators, application, lambda txs: len(txs) > 3, records
        )

    def on_effect(self, peer: PeerId, effect: Effect, now: float) -> list[tuple[float, object]]:
        if peer not in self.liars:
            for checker in self.checkers:
                checker.on_effect(peer, effect)
        return []

    def on_message(self, peer: PeerId, message: bytes) -> None:
        if peer not in self.liars:
            value = decoded(message)
            for checker in self.checkers:
                checker.on_message(peer, value)

    def submit(self, tx: bytes, to: Iterable[PeerId]) -> None:
        for name in to:
            self.cluster.feed(name, Transaction(tx))

    def phase_one(self) -> None:
        """Anything may fail; nothing is demanded but safety."""
        clock, random = self.cluster.clock, self.random
        self.cluster.start()
        for i in range(self.parameters.transactions):
            tx = f"{random.choice('abc')}/{i}".encode()
            to = random.sample(self.names, random.randint(1, len(self.names)))
            clock.at(random.random() * SAFETY_SECONDS, partial(self.submit, tx, to))
        for _ in range(self.parameters.crashes):
            at, down = random.random() * SAFETY_SECONDS, random.expovariate(0.5)
            name, effects = random.choice(self.honest), random.randint(0, 6)
            clock.at(at, partial(self.cluster.crash_in, name, effects))
            clock.at(at + down, partial(self.cluster.start, name))
        for _ in range(self.parameters.partitions):
            clock.at(random.random() * SAFETY_SECONDS, self.split)
            clock.at(random.random() * SAFETY_SECONDS, self.mend)
        if random.random() < 0.5:
            sender, to = random.sample(self.names, 2)
            self.cluster.network.degrade(sender, to, 0.9)
        self.cluster.run(SAFETY_SECONDS)

    def split(self) -> None:
        names = self.random.sample(self.names, len(self.names))
        cut = self.random.randint(1, len(names) - 1)
        self.cluster.network.partition(names[:cut], names[cut:])

    def mend(self) -> None:
        self.cluster.network.heal(self.parameters.conditions)

    def phase_two(self) -> list[str]:
        """Heal a random core of n−f honest peers and demand progress."""
        core = sorted(self.random.sample(self.honest, self.quorum))
        self.cluster.network.heal(HEALTHY)
        for name in self.honest:
            self.cluster.nodes[name].crash_in = None
            if name not in core:
                self.cluster.crash(name)
        self.cluster.start(*core)
        wanted = [f"{author}/late-{i}".encode() for author in "abc" for i in range(2)]
        for tx in wanted:
            self.submit(tx, core)
        done = self.cluster.run(LIVENESS_SECONDS, lambda: self.reached(core, wanted))
        return [] if done else [self.stuck(core, wanted)]

    def reached(self, core: Sequence[PeerId], wanted: Sequence[bytes]) -> bool:
        """Whether the core applied all and agrees on the height."""
        if any(tx not in self.applications[name].applied for name in core for tx in wanted):
            return False
        return len({self.height(name) for name in core}) == 1

    def height(self, name: PeerId) -> Height:
        return self.applications[name].info().last_height

    def stuck(self, core: Sequence[PeerId], wanted: Sequence[bytes]) -> str:
        missing = {
            name: sum(tx not in self.applications[name].applied for tx in wanted) for name in core
        }
        views = {
            name: (m.height, m.view)
            for name in core
            if isinstance(m := self.cluster.nodes[name].machine, LedgerMachine)
        }
        return f"seed {self.seed}: missing {missing}, at {views}, liars {self.liars}"

    def check_disks(self) -> None:
        """Every block that an honest peer made durable carries a valid certificate."""
        for name in self.honest:
            for record in self.cluster.nodes[name].disk.read().get("blocks", ()):
                self.certificates.check(name, decode_finalized(record))


def run(
    seed: int, peers: int = 7, byzantine: int = 2, faults: FaultModel | None = None
) -> SimResult:
    """One seed of the ledger under ``peers`` validators, ``byzantine`` of them adversaries.

    ``faults``: the quorum rule that the machines use; a wrong one must give violations. Raises
    PreconditionError if there are more adversaries than can be tolerated.
    """
    if not 0 <= byzantine <= FaultModel(peers).f:
        raise PreconditionError(f"{byzantine} of {peers} Byzantine peers cannot be tolerated")
    swarm = _Swarm(seed, peers, byzantine, faults)
    swarm.phase_one()
    failures = swarm.phase_two()
    swarm.check_disks()
    return SimResult(
        seed,
        swarm.parameters,
        [v for checker in swarm.checkers for v in checker.violations],
        failures,
        swarm.cluster.trace_hash,
        {name: int(swarm.height(name)) for name in swarm.honest},
        tuple(sorted(swarm.accusations.accused)),
        swarm.cluster.clock.now,
        swarm.cluster.messages,
    )


def run_many(
    seeds: Iterable[int],
    peers: int = 7,
    byzantine: int = 2,
    on_result: Callable[[SimResult], None] = lambda result: None,
) -> list[SimResult]:
    """Many seeds, one after the other; ``on_result`` sees each as it ends."""
    results = []
    for seed in seeds:
        results.append(run(seed, peers, byzantine))
        on_result(results[-1])
    return results
