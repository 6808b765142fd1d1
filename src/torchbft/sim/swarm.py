"""A seeded swarm of whole peers: rounds under crashes, partitions and liars; safety, then liveness.

The two phases are those of TigerBeetle's VOPR: in the first anything may fail, and nothing wrong
may happen; then the network heals, a random core of at least n−f honest peers runs, the liars go
on, and the core must fix and sign further rounds. Everything follows from the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from torchbft.primitives.digests import sha256
from torchbft.primitives.effects import Effect
from torchbft.primitives.errors import PreconditionError
from torchbft.primitives.faults import FaultModel
from torchbft.primitives.ids import PeerId, Round
from torchbft.primitives.runspec import Timing
from torchbft.protocols.peer import BlockDone
from torchbft.protocols.round.changes import Change, Remove
from torchbft.protocols.round.events import MembershipChanged, RoundFixed
from torchbft.protocols.round.interface import PreferVoid, RootAgreed
from torchbft.sim.chaos import Chaos
from torchbft.sim.liars import LIARS, MALFORMED
from torchbft.sim.network import Conditions
from torchbft.sim.peers import Peers, Trainer, admission_of, run_of

SAFETY_SECONDS = 20.0
"""Virtual length of phase one: some rounds, or one that misfortune keeps open."""

SAFETY_ROUNDS = 5
"""Signed rounds that end phase one early."""

LIVENESS_SECONDS = 600.0
"""Virtual time within which the core must sign rounds: time-outs that grew with a bad spell, for
each window of the rounds until absent members are no longer waited for. A minute is usual."""

MORE_ROUNDS = 2
"""Rounds that the core must fix and sign after the healing, unless the run ends before."""

CRASH_EFFECTS = 60
"""A crash falls between two of so many effects: those of a whole phase of a round."""

VOID_SHARE = 0.9
"""Of honest peers that vote for a void round when some do: with liars, about a quorum."""

STORIES = ((), (), (), ("join",), ("rotate",), ("rotate", "join", "leave"))
"""Changes of the membership in a run. Whoever leaves makes room that a newcomer filled before, so
that the liars stay as few as can be tolerated."""

QUICK = Timing(commit_floor=0.5, open_floor=0.3, attest_floor=0.3, root_floor=2.0, first_round=5.0)
"""Floors near the network's own delays, so that time-outs fire while items are under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What one seed means; drawn from it and printed with a failure."""

    conditions: Conditions
    liars: tuple[str, ...]
    crashes: int
    partitions: int
    outages: int
    """Moments at which all honest peers go down at once."""
    void_votes: int
    """Moments from which on most honest peers' operators would rather void the next round fixed."""
    slips: int
    """Honest peers that compute one wrong state: none if the liars are as many as can be."""
    sync_seconds: float
    isolation: float
    """Chance that the first peer to finalize a height, or to see a root signed, is cut off then."""
    rounds: int
    """Of the run: few end it in phase one or two, many leave both in its middle."""
    timing: str
    train_seconds: float
    train_spread: float
    changes: tuple[str, ...] = ()
    """Of the membership, wanted one after the other: ``join``, ``rotate``, ``leave``."""

    @classmethod
    def drawn(cls, random: Random, byzantine: int, spare: int = 0) -> Parameters:
        """The parameters of a seed; ``spare``: faults that can be tolerated beside the liars."""
        conditions = Conditions(
            latency=random.choice([0.002, 0.02, 0.1]),
            jitter=random.choice([0.001, 0.01, 0.1]),
            bandwidth=random.choice([1e6, 12.5e6]),
            loss=random.choice([0.0, 0.01, 0.1, 0.2]),
            duplicate=random.choice([0.0, 0.1]),
            reorder=random.choice([0.0, 0.2]),
        )
        return cls(
            conditions=conditions,
            liars=tuple(random.choice(sorted(LIARS)) for _ in range(byzantine)),
            crashes=random.randint(0, 12),
            partitions=random.randint(0, 3),
            outages=random.choice([0, 0, 0, 1]),
            void_votes=random.choice([0, 0, 1]),
            slips=random.randint(0, max(0, spare)),
            sync_seconds=random.choice([0.0, 0.005]),
            isolation=random.choice([0.0, 0.0, 0.1]),
            rounds=random.choice([4, 6, 64]),
            timing=random.choice(["quick", "default"]),
            train_seconds=random.choice([0.1, 1.0]),
            train_spread=random.choice([0.0, 0.5]),
            changes=random.choice(STORIES),
        )

    def line(self) -> str:
        """All of it in one line."""
        net = self.conditions
        return (
            f"liars {', '.join(self.liars) or 'none'}; {self.rounds} rounds, {self.timing} timing,"
            f" training {self.train_seconds:g}+{self.train_spread:g} s; crashes {self.crashes},"
            f" partitions {self.partitions}, outages {self.outages}, void votes {self.void_votes},"
            f" slips {self.slips}, changes {', '.join(self.changes) or 'none'},"
            f" isolation {self.isolation:g}, sync {self.sync_seconds:g} s;"
            f" latency {net.latency:g}+{net.jitter:g} s,"
            f" {net.bandwidth:g} B/s, loss {net.loss:g}, duplicate {net.duplicate:g}, reorder"
            f" {net.reorder:g}"
        )


@dataclass(frozen=True, slots=True)
class SimResult:
    """How a run ended. Empty lists are success."""

    seed: int
    parameters: Parameters
    safety_violations: list[str]
    liveness_failures: list[str]
    trace_hash: str
    signed: int
    """Rounds with a signed root."""
    void: int
    """Rounds that were void."""
    halted: bool
    """Whether so many rounds in a row were void that the run stopped, as it should."""
    named: tuple[str, ...]
    """Liars that honest peers named with evidence."""
    epoch: int
    """The last one: so many times the validators changed, by votes or convictions."""
    windows: int
    """Windows that a quorum of closings closed: there the loss of items was decided."""
    seconds: float
    """Virtual time that passed."""
    messages: int


def peer_names(peers: int) -> tuple[PeerId, ...]:
    """Names of a simulated swarm."""
    return tuple(PeerId(f"peer-{i:02d}") for i in range(peers))


class _Swarm:
    """One run: what happens to the peers, and when."""

    def __init__(self, seed: int, peers: int, byzantine: int) -> None:
        self.seed, self.random = seed, Random(f"swarm/{seed}")
        spare = FaultModel(peers).f - byzantine
        self.parameters = drawn = Parameters.drawn(self.random, byzantine, spare)
        names = peer_names(peers)
        seats = tuple(sorted(self.random.sample(names, byzantine)))
        kinds = dict(zip(seats, drawn.liars, strict=True))
        attack = sha256("sim/attack", seed.to_bytes(8, "big"))
        self.joiner = peer_names(peers + 1)[-1]
        self.peers = Peers(
            run_of(
                names,
                rounds=drawn.rounds,
                timing=QUICK if drawn.timing == "quick" else Timing(),
            ),
            seed=seed,
            liars={name: LIARS[kind](attack, seats) for name, kind in kinds.items()},
            malformed=[name for name, kind in kinds.items() if kind == MALFORMED],
            joiners=[self.joiner] if "join" in drawn.changes else [],
            conditions=drawn.conditions,
            trainer=Trainer(drawn.train_seconds, drawn.train_spread, payload_bytes=20_000),
            sync_seconds=drawn.sync_seconds,
        )
        self.kinds, self.quorum = kinds, FaultModel(peers).quorum
        self.cluster = self.peers.cluster
        self.chaos = Chaos(
            self.cluster, self.peers.honest, self.random, drawn.conditions, self.peers.start
        )
        self.newest = (0, -1)
        self.disliked: set[Round] = set()
        self.seen: dict[PeerId, set[int]] = {name: set() for name in self.peers.honest}
        self.peers.listeners.append(self.on_effect)
        self.story = list(drawn.changes)
        self.wanted: Change | None = None
        self.epoch = 0

    def on_effect(self, peer: PeerId, effect: Effect) -> None:
        """Note signed rounds; cut off who is first to know something, if this seed does so."""
        height, number = self.newest
        if isinstance(effect, RootAgreed):
            self.seen[peer].add(effect.round)
            number = max(number, effect.round)
        elif isinstance(effect, BlockDone):
            height = max(height, effect.height)
            self.on_block(peer, effect)
        is_first, self.newest = self.newest != (height, number), (height, number)
        if is_first and self.chaos.is_harsh and self.random.random() < self.parameters.isolation:
            self.chaos.isolate(peer)

    def phase_one(self) -> None:
        """Anything may fail; nothing is demanded but safety."""
        drawn = self.parameters
        self.peers.start()
        self.chaos.plan(
            SAFETY_SECONDS,
            crashes=drawn.crashes,
            partitions=drawn.partitions,
            effects=CRASH_EFFECTS,
        )
        self.plan_moments()
        self.cluster.run(SAFETY_SECONDS, lambda: self.newest[1] >= SAFETY_ROUNDS - 1)

    def plan_moments(self) -> None:
        drawn, random, clock = self.parameters, self.random, self.cluster.clock
        for count, act in ((drawn.outages, self.outage), (drawn.void_votes, self.dislike)):
            for _ in range(count):
                clock.at(random.random() * SAFETY_SECONDS, partial(self.if_harsh, act))
        if drawn.changes:
            clock.at(random.random() * SAFETY_SECONDS / 4, self.want_next)
        for name in random.sample(self.peers.honest, drawn.slips):
            self.peers.slips[name] = random.randint(0, SAFETY_ROUNDS)

    def if_harsh(self, act: Callable[[], None]) -> None:
        if self.chaos.is_harsh:
            act()

    def outage(self) -> None:
        """The power goes off for all honest peers at once."""
        for name in self.peers.honest:
            self.cluster.crash(name)

    def dislike(self) -> None:
        """Operators dislike the next round that is fixed."""
        self.disliked.add(Round(1 + max(self.peers.sets.fixed, default=-1)))

    def want_next(self) -> None:
        """Let all operators want the next change of the story, if there is one."""
        if not self.story:
            self.wanted = None
            return
        what = self.story.pop(0)
        members = [name for name in self.peers.honest if name != self.joiner]
        if what == "join":
            self.wanted = admission_of(self.joiner)
        elif what == "rotate":
            self.wanted = self.peers.new_key(self.random.choice(members), "2")
        else:
            self.wanted = Remove(self.random.choice(members))
        self.peers.want(self.wanted)

    def on_block(self, peer: PeerId, done: BlockDone) -> None:
        for event in done.events:
            if isinstance(event, MembershipChanged):
                self.epoch = max(self.epoch, event.epoch)
                if self.wanted in event.made:
                    self.want_next()
        fixed = [event.round for event in done.events if isinstance(event, RoundFixed)]
        for number in self.disliked.intersection(fixed):
            if self.random.random() < VOID_SHARE:
                self.cluster.feed(peer, PreferVoid(number, "simulated"))

    def phase_two(self) -> list[str]:
        """Heal a random core of n−f honest peers or more, and demand progress."""
        host, honest = self.peers, self.peers.honest
        # Who slipped is no help, and a changed membership needs a quorum of its own.
        all_of_them = self.parameters.slips or self.parameters.changes
        least = len(honest) if all_of_them else self.quorum
        core = sorted(self.random.sample(honest, self.random.randint(least, len(honest))))
        host.slips.clear()
        was_over = bool(host.halted)
        self.chaos.heal(core)
        before = self.newest[1]
        done = self.cluster.run(LIVENESS_SECONDS, lambda: self.progressed(core, before))
        stopped = [f"{name} halted: {host.halted[name]}" for name in core if name in host.halted]
        if stopped and not was_over:
            return stopped
        return [] if done else [self.stuck(core, before)]

    def progressed(self, core: Sequence[PeerId], before: int) -> bool:
        """Whether each of the core saw enough rounds signed and holds one's state, or is done."""
        host = self.peers
        return all(
            name in host.finished
            or name in host.halted
            or (
                self.wanted is None
                and sum(number > before for number in self.seen[name]) >= MORE_ROUNDS
                and host.homes[name].number > before
            )
            for name in core
        )

    def stuck(self, core: Sequence[PeerId], before: int) -> str:
        stands = "; ".join(f"{name} {self.stands(name, before)}" for name in core)
        return f"no progress after round {before}: {stands}"

    def stands(self, name: PeerId, before: int) -> str:
        """Where a peer stands, for people."""
        if not self.cluster.is_up(name):
            return "is down"
        application, home = self.peers.application(name), self.peers.homes[name]
        state, height = application.state, application.info().last_height
        signed = sorted(number for number in self.seen[name] if number > before)
        where = f"at height {height}, round {state.current.number}, {state.phase}"
        where += f", epoch {state.epoch}"
        return f"{where}, holds the state after {home.number}, saw {signed} signed"


def run(seed: int, peers: int = 7, byzantine: int = 2) -> SimResult:
    """One seed of whole rounds under ``peers`` peers, ``byzantine`` of them liars.

    Raises PreconditionError if there are more liars than can be tolerated.
    """
    if not 0 <= byzantine <= FaultModel(peers).f:
        raise PreconditionError(f"{byzantine} of {peers} Byzantine peers cannot be tolerated")
    swarm = _Swarm(seed, peers, byzantine)
    swarm.phase_one()
    failures = swarm.phase_two()
    host = swarm.peers
    return SimResult(
        seed,
        swarm.parameters,
        host.violations(),
        failures,
        host.cluster.trace_hash,
        len(host.roots.roots),
        len(host.sets.void),
        bool(host.halted),
        tuple(sorted(host.accusations.named)),
        swarm.epoch,
        host.items.decided,
        host.cluster.clock.now,
        host.cluster.messages,
    )
