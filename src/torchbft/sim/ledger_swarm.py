"""A seeded swarm of ledger validators alone, over the toy application: first safety, then liveness.

The two phases are those of ``swarm.py``; without rounds a seed costs a fraction, meets hundreds of
crashes, and shows mutants of the voting rules within a few seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from torchbft.primitives.effects import Effect
from torchbft.primitives.errors import PreconditionError
from torchbft.primitives.faults import FaultModel
from torchbft.primitives.ids import Height, PeerId
from torchbft.protocols.ledger.state import Finalized
from torchbft.sim.byzantine import ADVERSARIES
from torchbft.sim.chaos import Chaos
from torchbft.sim.ledgers import Ledgers, peer_names
from torchbft.sim.network import Conditions

SAFETY_SECONDS = 40.0
"""Virtual length of phase one: a dozen time-outs, dozens of blocks."""

CRASH_EFFECTS = 6
"""A crash falls between two of so many effects: those of one or two messages."""

LIVENESS_SECONDS = 600.0
"""Virtual time within which the core must finalize: nine of the longest views."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What one seed means; drawn from it and printed with a failure."""

    conditions: Conditions
    adversaries: tuple[str, ...]
    crashes: int
    partitions: int
    transactions: int
    sync_seconds: float
    isolation: float
    """Chance that the first peer to finalize a height is cut off at that moment: only then can a
    wrong view change make a fork."""

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
            random.choice([0.0, 0.0, 0.5]),
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
    """One run: what happens to the validators, and when."""

    def __init__(self, seed: int, peers: int, byzantine: int, faults: FaultModel | None) -> None:
        self.random = random = Random(f"swarm/{seed}")
        self.parameters = Parameters.drawn(random, byzantine)
        seats = sorted(random.sample(peer_names(peers), byzantine))
        self.ledgers = Ledgers(
            peers,
            seed=seed,
            liars=dict(zip(seats, self.parameters.adversaries, strict=True)),
            conditions=self.parameters.conditions,
            faults=faults,
            sync_seconds=self.parameters.sync_seconds,
        )
        self.cluster, self.names = self.ledgers.cluster, self.ledgers.names
        self.quorum = FaultModel(peers).quorum
        self.highest = Height(0)
        self.chaos = Chaos(
            self.cluster,
            self.ledgers.honest,
            random,
            self.parameters.conditions,
            self.cluster.start,
        )
        self.ledgers.listeners.append(self.on_effect)

    def on_effect(self, peer: PeerId, effect: Effect) -> None:
        """Cut off the first peer to finalize a height for a while, if this seed does so."""
        if isinstance(effect, Finalized) and effect.height > self.highest and self.chaos.is_harsh:
            self.highest = effect.height
            if self.random.random() < self.parameters.isolation:
                self.chaos.isolate(peer)

    def phase_one(self) -> None:
        """Anything may fail; nothing is demanded but safety."""
        self.cluster.start()
        self.plan_transactions()
        drawn = self.parameters
        self.chaos.plan(
            SAFETY_SECONDS,
            crashes=drawn.crashes,
            partitions=drawn.partitions,
            effects=CRASH_EFFECTS,
        )
        self.cluster.run(SAFETY_SECONDS)

    def some_time(self) -> float:
        return self.random.random() * SAFETY_SECONDS

    def plan_transactions(self) -> None:
        random = self.random
        for i in range(self.parameters.transactions):
            tx = f"{random.choice('abc')}/{i}".encode()
            to = random.sample(self.names, random.randint(1, len(self.names)))
            self.cluster.clock.at(self.some_time(), partial(self.ledgers.submit, tx, to))

    def phase_two(self) -> list[str]:
        """Heal a random core of n−f honest peers and demand progress."""
        core = sorted(self.random.sample(self.ledgers.honest, self.quorum))
        self.chaos.heal(core)
        wanted = [f"{author}/late-{i}".encode() for author in "abc" for i in range(2)]
        for tx in wanted:
            self.ledgers.submit(tx, core)
        done = self.cluster.run(LIVENESS_SECONDS, lambda: self.reached(core, wanted))
        return [] if done else [self.stuck(core, wanted)]

    def reached(self, core: Sequence[PeerId], wanted: Sequence[bytes]) -> bool:
        """Whether the core applied all and agrees on the height."""
        heights = {self.ledgers.height(name) for name in core}
        return len(heights) == 1 and self.ledgers.applied(wanted, core)

    def stuck(self, core: Sequence[PeerId], wanted: Sequence[bytes]) -> str:
        ledgers = self.ledgers
        missing = {
            name: [tx for tx in wanted if not ledgers.applied([tx], [name])] for name in core
        }
        views = {name: (ledgers.machine(name).height, ledgers.machine(name).view) for name in core}
        return f"seed {ledgers.seed}: missing {missing}, at {views}, liars {ledgers.liars}"


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
    ledgers = swarm.ledgers
    return SimResult(
        seed,
        swarm.parameters,
        ledgers.violations(),
        failures,
        ledgers.cluster.trace_hash,
        {name: int(ledgers.height(name)) for name in ledgers.honest},
        ledgers.accused,
        ledgers.cluster.clock.now,
        ledgers.cluster.messages,
    )
