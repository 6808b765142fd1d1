"""n round machines in memory on virtual time, over a trivial ordered ledger. For the tests only.

The ledger orders what its rotating leader's mempool holds and delivers blocks to each peer in
order, after a delay: no votes, no faults of its own but a leader's choice of what to leave out. A
peer's disk (its log, payloads and agreed state) survives a crash; the rest does not. Checkers look
at the peers from outside.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from round_world import World

from torchbft.primitives.digests import sha256
from torchbft.primitives.effects import Broadcast, Persist, Received, Send, Tick
from torchbft.primitives.ids import Height, PeerId
from torchbft.primitives.runspec import Timing
from torchbft.protocols.round import events as ev
from torchbft.protocols.round import interface as io
from torchbft.protocols.round import messages as m
from torchbft.protocols.round.application import Application, proposal_complete
from torchbft.protocols.round.machine import RoundConfig, RoundMachine

PROPOSAL_WAIT = 0.05
HOP = 0.002
TIMING = Timing(
    commit_floor=0.5, open_floor=0.3, attest_floor=0.3, root_floor=2.0, first_round=5.0, factor=3.0
)
START_ROOT = sha256("test/start")


@dataclass
class Disk:
    """What survives a crash."""

    log: list[bytes] = field(default_factory=list)
    payloads: dict[bytes, str] = field(default_factory=dict)
    """Root to ``good`` or ``malformed``."""
    states: dict[int, bytes] = field(default_factory=lambda: {-1: START_ROOT})
    at: int = -1


class Peer:
    """An honest peer and its host. Liars override the hooks."""

    honest = True
    train_seconds = 0.1

    def __init__(self, swarm: Swarm, name: str) -> None:
        self.swarm, self.name = swarm, PeerId(name)
        self.disk = Disk()
        self.life = 0
        self.up = False
        self.effects: list[object] = []
        self.roots: dict[int, bytes] = {}
        self.agreed_at: dict[int, float] = {}
        self.halted: str | None = None
        self.finished = False
        self.said: dict[tuple[int, str], set[bytes]] = {}
        self.height = 0
        self.crash_after: int | None = None
        self.steps = 0

    # life -----------------------------------------------------------------------------------

    def start(self) -> None:
        self.life += 1
        self.up = True
        self.application = Application(self.swarm.world.genesis)
        self.height = 0
        for txs in self.swarm.chain:
            self.height += 1
            self.application.finalize_block(Height(self.height), txs)
            self.application.commit()
        self.machine = RoundMachine(
            RoundConfig(self.name, TIMING, guard_log=self.honest),
            self.swarm.world.keys[self.name],
            self.name.encode().ljust(32, b"."),
            self.application,
            tuple(self.disk.log),
        )
        self.mempool: dict[bytes, None] = {}
        self.run(self.machine.start(self.swarm.now))
        self.tell(io.StateAdvanced(self.disk.at, self.disk.states[self.disk.at]))

    def crash(self) -> None:
        self.up = False

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Do something later, unless this life has ended by then."""
        life = self.life
        self.swarm.at(seconds, lambda: act() if self.up and self.life == life else None)

    # machine --------------------------------------------------------------------------------

    def tell(self, event: io.Input) -> None:
        if self.up:
            self.run(self.machine.handle(event, self.swarm.now))

    def run(self, effects: Sequence[object]) -> None:
        for effect in effects:
            if not self.up:
                return
            self.steps += 1
            if self.crash_after is not None and self.steps > self.crash_after:
                self.crash_after = None
                self.crash()
                self.swarm.at(0.2, self.start)
                return
            self.effects.append(effect)
            self.carry_out(effect)
        wake = self.machine.deadline() if self.up else None
        if wake is not None:
            self.after(max(wake - self.swarm.now, 0.0), self.tick)

    def tick(self) -> None:
        wake = self.machine.deadline()
        if wake is not None and wake <= self.swarm.now:
            self.tell(Tick())

    def carry_out(self, effect: object) -> None:
        match effect:
            case Persist():
                assert effect.log == "statements"
                self.disk.log.append(effect.record)
            case io.Submit():
                self.note(effect.tx)
                self.submit(effect.tx)
            case Broadcast():
                self.note(effect.message)
                self.broadcast(effect.message)
            case Send():
                raise AssertionError("the round sends to all")
            case io.StartTraining():
                self.train(effect)
            case io.OfferPayload():
                self.offer(effect)
            case io.FetchPayload():
                self.fetch(effect)
            case io.Advance():
                self.after(0.01, lambda: self.advance(effect))
            case io.CatchUp() | io.Diverged():
                root = effect.root if isinstance(effect, io.CatchUp) else effect.signed_root
                self.after(0.02, lambda: self.take_state(effect.round, root))
            case io.DropRound():
                self.disk.states.pop(effect.round, None)
                if self.disk.at == effect.round:
                    self.disk.at = max(k for k in self.disk.states if k < effect.round)
                    self.after(0.0, lambda: self.tell_state())
            case io.Halt():
                self.halted = effect.reason
            case io.Finished():
                self.finished = True
            case io.RootAgreed():
                self.agreed_at.setdefault(effect.round, self.swarm.now)
            case io.Accuse() | io.Waiting():
                pass
            case _:
                raise AssertionError(effect)

    def note(self, tx: bytes) -> None:
        """Checkers: what is sent was durable, and one slot holds one statement for ever."""
        parsed = m.parse(tx)
        if self.honest:
            assert tx in self.disk.log, "sent before it was durable"
        if self.honest and parsed.slot == "open" and parsed.statement.author == self.name:
            known = self.application.state.round_of(parsed.statement.round)
            assert known.reached_open, "opened before the commitments were final"
        if parsed.statement.author == self.name:
            self.said.setdefault((parsed.statement.round, parsed.slot), set()).add(tx)

    # host -----------------------------------------------------------------------------------

    def submit(self, tx: bytes) -> None:
        for peer in self.swarm.peers:
            self.swarm.deliver(self, peer, lambda peer=peer: peer.hear(tx))

    def hear(self, tx: bytes) -> None:
        if len(self.mempool) < 10_000 and self.application.check_tx(tx).code == 0:
            self.mempool[tx] = None
        self.tell(io.Heard(tx))
        self.swarm.look()

    def hear_once(self, tx: bytes) -> None:
        """As ``hear``, for what a liar's own ``hear`` made."""
        Peer.hear(self, tx)

    def broadcast(self, message: bytes) -> None:
        for peer in self.swarm.peers:
            if peer is not self:
                event = Received(self.name, message)
                self.swarm.deliver(self, peer, lambda peer=peer, e=event: peer.tell(e))

    def payload_root(self, number: int) -> bytes:
        return sha256("test/payload", self.name.encode(), number.to_bytes(8, "big"))

    payload_quality = "good"

    def train(self, effect: io.StartTraining) -> None:
        standing = set(self.swarm.fixed) - set(self.swarm.void)
        before = [number for number in standing if number < effect.round]
        agreed = {p.roots.get(max(before)) for p in self.swarm.honest} if before else {START_ROOT}
        assert effect.from_root in agreed, "trains from a root that no quorum signed"

        def done() -> None:
            root = self.payload_root(effect.round)
            self.disk.payloads[root] = self.payload_quality
            self.tell(io.Trained(effect.round, 100, root, sha256("test/trace")))

        self.after(self.train_seconds, done)

    def offer(self, effect: io.OfferPayload) -> None:
        for peer in self.swarm.peers:
            if peer is not self and self.serves(peer, effect.payload_root):
                payload = (effect.round, self.name, effect.payload_root, self.payload_quality)
                self.swarm.deliver(self, peer, lambda peer=peer, it=payload: peer.take(*it))

    def serves(self, peer: Peer, root: bytes) -> bool:
        return True

    def take(self, number: int, author: PeerId, root: bytes, quality: str) -> None:
        self.disk.payloads[root] = quality
        if quality == "good":
            self.tell(io.PayloadStored(number, author, root))
        else:
            self.tell(io.PayloadRefused(number, author, root, quality))

    def fetch(self, effect: io.FetchPayload) -> None:
        def attempt() -> None:
            root = effect.payload_root
            if root in self.disk.payloads:
                self.take(effect.round, effect.author, root, self.disk.payloads[root])
                return
            for name in effect.holders:
                other = self.swarm.peer(name)
                if other.up and root in other.disk.payloads and other.serves(self, root):
                    payload = (effect.round, effect.author, root, other.disk.payloads[root])
                    self.after(2 * HOP, lambda it=payload: self.take(*it))
                    return
            if self.application.state.round_of(effect.round) is not None:
                self.after(0.05, attempt)

        self.after(0.0, attempt)

    def advance(self, effect: io.Advance) -> None:
        base = max(k for k in self.disk.states if k < effect.round)
        assert self.disk.states[base] == effect.from_root, "advanced from another state"
        for item in effect.accepted:
            assert item.payload_root in self.disk.payloads, "advanced without a payload"
        parts = [item.author.encode() + item.payload_root for item in effect.accepted]
        self.set_state(effect.round, sha256("test/state", effect.from_root, *parts))

    def set_state(self, number: int, root: bytes) -> None:
        self.disk.states[number], self.disk.at = root, number
        self.roots[number] = root
        self.tell_state()

    def tell_state(self) -> None:
        self.tell(io.StateAdvanced(self.disk.at, self.disk.states[self.disk.at]))

    def take_state(self, number: int, root: bytes) -> None:
        assert any(p.disk.states.get(number) == root for p in self.swarm.peers if p is not self)
        self.disk.states = {k: v for k, v in self.disk.states.items() if k < number}
        self.set_state(number, root)

    # ledger ---------------------------------------------------------------------------------

    def leave_out(self, tx: bytes) -> bool:
        """A censoring leader's choice."""
        return False

    def block(self, height: int, txs: Sequence[bytes]) -> None:
        if height != self.height + 1:
            return
        self.height = height
        result = self.application.finalize_block(Height(height), txs)
        self.application.commit()
        self.tell(io.LedgerAdvanced(Height(height), result.events))

    @property
    def outcomes(self) -> dict[int, dict[str, ev.MemberOutcome]]:
        return self.swarm.outcomes


class Swarm:
    """Peers, a network with random delays from a seed, and the ordered ledger."""

    def __init__(
        self,
        n: int = 4,
        *,
        rounds: int = 4,
        seed: int = 0,
        liars: dict[int, type[Peer]] | None = None,
        **genesis: object,
    ) -> None:
        self.world = World(n, rounds=rounds, **genesis)
        self.random = random.Random(seed)
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.chain: list[tuple[bytes, ...]] = []
        self.reference = Application(self.world.genesis)
        self.events: list[ev.Event] = []
        self._proposing = False
        self._waiting_since: float | None = None
        kinds = liars or {}
        self.peers = [kinds.get(i, Peer)(self, name) for i, name in enumerate(self.world.names)]

    # time -----------------------------------------------------------------------------------

    def at(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._count), act))

    def deliver(self, sender: Peer, to: Peer, act: Callable[[], None]) -> None:
        delay = 0.0 if sender is to else HOP * self.random.uniform(0.5, 3.0)
        self.at(delay, lambda: act() if to.up else None)

    def run(self, until: Callable[[], bool], limit: float = 600.0) -> Swarm:
        """Let time pass until something holds; fails if it never does."""
        while self._queue and self.now < limit:
            if until():
                return self
            at, _, act = heapq.heappop(self._queue)
            self.now = max(self.now, at)
            act()
        assert until(), f"stuck at {self.now:.2f} s: {self.describe()}"
        return self

    def start(self, but: Sequence[int] = ()) -> Swarm:
        for index, peer in enumerate(self.peers):
            if index not in but:
                self.at(self.random.uniform(0.0, 0.01), peer.start)
        return self

    def play(self, limit: float = 600.0) -> Swarm:
        """Until every honest peer that is up has finished."""
        return self.run(lambda: all(p.finished for p in self.honest), limit)

    def describe(self) -> str:
        state = self.reference.state
        waits = [e for p in self.honest for e in p.effects[-20:] if isinstance(e, io.Waiting)]
        return f"round {state.current.number} {state.phase} {waits[-3:]}"

    @property
    def honest(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.honest]

    def peer(self, name: str) -> Peer:
        return next(peer for peer in self.peers if peer.name == name)

    # ledger ---------------------------------------------------------------------------------

    def leader(self) -> Peer | None:
        ups = [peer for peer in self.peers if peer.up]
        if len(ups) < self.world.quorum:
            return None
        return ups[len(self.chain) % len(ups)]

    def look(self) -> None:
        """A leader proposes when its phase is complete, or some time after the first item."""
        leader = self.leader()
        if self._proposing or leader is None or not self.pending(leader):
            return
        if self._waiting_since is None:
            self._waiting_since = self.now
            self.at(PROPOSAL_WAIT, self.look)
        late = self.now >= self._waiting_since + PROPOSAL_WAIT
        if late or proposal_complete(self.reference.state, self.pending(leader)):
            self._proposing = True
            self.at(3 * HOP, lambda: self.finalize(leader))

    def pending(self, leader: Peer) -> list[bytes]:
        txs = [tx for tx in leader.mempool if not leader.leave_out(tx)]
        return self.reference.prepare_proposal(Height(len(self.chain) + 1), txs, 1 << 20)

    def finalize(self, leader: Peer) -> None:
        txs = tuple(self.pending(leader))
        height = len(self.chain) + 1
        self._proposing, self._waiting_since = False, None
        assert self.reference.process_proposal(Height(height), txs)
        result = self.reference.finalize_block(Height(height), txs)
        self.reference.commit()
        self.chain.append(txs)
        self.events += result.events
        for peer in self.peers:
            if peer.up:
                self.at(HOP * self.random.uniform(0.0, 2.0), lambda p=peer: self.feed(p))
        self.at(3 * HOP, self.look)

    def feed(self, peer: Peer) -> None:
        """Bring a peer up to the chain, block by block, as its ledger would."""
        while peer.up and peer.height < len(self.chain):
            peer.block(peer.height + 1, self.chain[peer.height])
        for tx in list(peer.mempool) if peer.up else ():
            if self.reference.check_tx(tx).code:
                peer.mempool.pop(tx, None)

    # what happened --------------------------------------------------------------------------

    def told(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def fixed(self) -> dict[int, tuple[str, ...]]:
        return {e.round: tuple(a.author for a in e.accepted) for e in self.told(ev.RoundFixed)}

    @property
    def void(self) -> dict[int, str]:
        return {e.round: e.reason for e in self.told(ev.RoundVoid)}

    @property
    def outcomes(self) -> dict[int, dict[str, ev.MemberOutcome]]:
        ended = self.told(ev.RoundFixed) + self.told(ev.RoundVoid)
        return {e.round: {o.peer: o for o in e.outcomes} for e in ended}

    def accused(self, *, named: bool) -> set[str]:
        return {
            e.peer
            for p in self.honest
            for e in p.effects
            if isinstance(e, io.Accuse) and e.named == named
        }

    def check(self) -> Swarm:
        """Safety, from outside: equal roots, one statement per slot, nobody honest named."""
        for number in {k for p in self.honest for k in p.roots}:
            roots = {p.roots[number] for p in self.honest if number in p.roots}
            assert len(roots) == 1, f"honest roots differ in round {number}"
        for peer in self.honest:
            for place, txs in peer.said.items():
                assert len(txs) == 1, f"{peer.name} signed twice in {place}"
            assert peer.halted is None, peer.halted
        assert not self.accused(named=True) & {p.name for p in self.honest}
        return self

    def honest_never_lost(self) -> Swarm:
        """In every round that counted, every honest contribution did."""
        for number, authors in self.fixed.items():
            missing = {p.name for p in self.honest} - set(authors)
            assert not missing, f"round {number} lost {missing}"
        return self
