"""n whole peers (ledger, round and application) in virtual time, with every checker beside them.

The host of ``node/`` in one process: it pretends training, payloads, aggregation and copies of the
agreed state, and carries out all else as a node does. A peer's *home* (its logs, blobs and agreed
state) outlives its crashes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from torchbft.primitives.digests import sha256
from torchbft.primitives.effects import Effect, Received
from torchbft.primitives.errors import HaltError, MisuseError
from torchbft.primitives.ids import PeerId, Round
from torchbft.primitives.keys import KeyRing, SigningKey
from torchbft.primitives.runspec import (
    VOTING_DOMAIN,
    Aggregation,
    Data,
    Ledger,
    RunSpec,
    Timing,
    Training,
    new_member,
    voting_body,
)
from torchbft.primitives.wire import encode
from torchbft.protocols.ledger.messages import decode_finalized
from torchbft.protocols.peer import (
    TRANSACTION,
    BlockDone,
    PeerMachine,
    Suspected,
    application_of,
)
from torchbft.protocols.round import interface as rounds
from torchbft.protocols.round.application import Application
from torchbft.protocols.round.changes import Admit, Change, Rotate
from torchbft.protocols.round.events import OpeningsClosed
from torchbft.protocols.round.messages import Parsed
from torchbft.protocols.round.state import Accepted
from torchbft.sim.chaos import HEALTHY
from torchbft.sim.checkers import (
    CertificatesAreValid,
    Checker,
    HeightsInOrder,
    OneApplicationState,
    OneBlockPerHeight,
    OneVotePerSlot,
)
from torchbft.sim.cluster import Cluster, Machine, Records, Watcher
from torchbft.sim.dataplane import DataPlane
from torchbft.sim.liars import BuildMachine, Liar, Twins
from torchbft.sim.network import Conditions, Network
from torchbft.sim.round_checkers import (
    AcceptedPayloadsAreHeld,
    HaltsAfterVoidRounds,
    HonestAreNotNamed,
    NothingInTimeIsLost,
    OneRootPerRound,
    OneSetPerRound,
    OneStatementPerSlot,
    OpensAfterTheWindow,
    RootsAreComputed,
    TrainsFromSignedRoots,
    peer_message,
)
from torchbft.sim.seating import Seating

START_ROOT = sha256("sim/start")
TRACE_ROOT = sha256("sim/trace")
"""Of no work: nothing is replayed here."""

ADVANCE_SECONDS = 0.02
"""Aggregation and outer step, with the new state on disk."""

STATE_BYTES = 50_000
"""Of a copy of the agreed state."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """A pretend trainer. Seconds of a round's inner steps, and bytes of a payload."""

    seconds: float = 0.4
    spread: float = 0.0
    """Peers differ, and so do rounds: by up to this many seconds more."""
    payload_bytes: int = 150_000


@dataclass(slots=True)
class Home:
    """The agreed state of a peer: durable, and moved in one step."""

    number: int = -1
    root: bytes = START_ROOT
    before: tuple[int, bytes] | None = None
    wanted: tuple[int, bytes] | None = None
    """Round and root of the copy that is looked for; forgotten at a crash, and asked for again."""


def key_of(name: str) -> SigningKey:
    """The voting key of a simulated peer."""
    return SigningKey.derive(bytes(32), name)


def identity_of(name: str) -> SigningKey:
    """The identity key of a simulated peer."""
    return SigningKey.derive(b"\1" * 32, name)


def certificate_of(name: str, voting: SigningKey) -> bytes:
    """The identity's signature under a voting key."""
    return identity_of(name).sign(VOTING_DOMAIN, voting_body(name, voting.public, epoch=0))


def admission_of(name: str) -> Admit:
    """The change that admits a simulated peer with all roles."""
    key = key_of(name)
    certificate = certificate_of(name, key)
    return Admit(name, identity_of(name).public, key.public, certificate, "", 0, 1, True, True)


def run_of(
    names: Iterable[str],
    *,
    rounds: int,
    timing: Timing | None = None,
    ledger: Ledger | None = None,
) -> RunSpec:
    """A run of these peers; all validate and contribute."""
    run = RunSpec(
        name="simulated",
        seed="07" * 32,
        members=tuple(new_member(name, identity_of(name), key_of(name)) for name in sorted(names)),
        data=Data(samples=10_000),
        training=Training(rounds=rounds),
        aggregation=Aggregation(),
        timing=timing or Timing(),
        ledger=ledger or Ledger(),
    )
    run.check()
    return run


def next_root(effect: rounds.Advance) -> bytes:
    """The pretend agreed state after a round: all that the real one depends on."""
    parts = [item.author.encode() + item.payload_root for item in effect.accepted]
    return sha256("sim/state", effect.from_root, *parts, encode(effect.ledger))


class Peers(Watcher):
    """A cluster of whole peers; ``liars`` builds what sits in a liar's seat.

    ``joiners``: honest peers that are not in the run file; they follow the ledger until admitted.
    ``malformed``: liars whose payloads are unreadable. ``listeners`` see the effects of honest
    peers. What honest peers were told is in the checkers ``sets``, ``roots`` and ``accusations``.
    """

    def __init__(
        self,
        run: RunSpec,
        *,
        seed: int = 0,
        liars: Mapping[PeerId, BuildMachine] | None = None,
        malformed: Iterable[PeerId] = (),
        joiners: Iterable[PeerId] = (),
        conditions: Conditions = HEALTHY,
        trainer: Trainer | None = None,
        sync_seconds: float = 0.002,
    ) -> None:
        self.run, self.trainer = run, trainer or Trainer()
        self.names = tuple(PeerId(member.name) for member in run.members) + tuple(joiners)
        self.liars, self._malformed = dict(liars or {}), frozenset(malformed)
        self.honest = tuple(name for name in self.names if name not in self.liars)
        self.random = Random(f"peers/{seed}")
        self.homes = {name: Home() for name in self.names}
        self.listeners: list[Callable[[PeerId, Effect], None]] = []
        self.finished: set[PeerId] = set()
        self.halted: dict[PeerId, str] = {}
        self.wanted: tuple[Change, ...] = ()
        """Changes of the membership that the operators of all honest peers are for."""
        self._rings = {name: KeyRing(key_of(name)) for name in self.names}
        self.slips: dict[PeerId, int] = {}
        """Peers that compute one wrong state, and in which round at the earliest."""
        self._unreadable: set[bytes] = set()
        self._seen = b""
        self.cluster = Cluster(
            self.names,
            self._build,
            Network(self.random, conditions),
            self.random,
            on_effect=self._on_effect,
            on_message=self._on_message,
            watcher=self,
            sync_seconds=sync_seconds,
        )
        self.plane = DataPlane(self.cluster, self._on_stored, self._serves)
        self._add_checkers()

    def _add_checkers(self) -> None:
        genesis = application_of(self.run).state
        self.seating = seating = Seating(genesis.current.seats)
        self.sets, self.roots = OneSetPerRound(), OneRootPerRound()
        self.accusations = HonestAreNotNamed(self.honest)
        self.items = NothingInTimeIsLost(seating.seats, self.honest, self.round_of)
        self._certificates = CertificatesAreValid(self.run.run_id, seating.validators)
        self.checkers: list[Checker] = [
            OneBlockPerHeight(),
            HeightsInOrder(),
            OneVotePerSlot(),
            OneApplicationState(),
            self._certificates,
            OneStatementPerSlot(),
            OpensAfterTheWindow(self.opens),
            self.sets,
            self.roots,
            HaltsAfterVoidRounds(),
            RootsAreComputed(seating.seats, self.liars),
            TrainsFromSignedRoots(START_ROOT),
            AcceptedPayloadsAreHeld(self.honest, self.plane.holders),
            self.accusations,
            self.items,
        ]

    # -- life

    def _build(self, name: PeerId, records: Records) -> Machine:
        build: BuildMachine = self.liars.get(name, PeerMachine)
        if name not in self.liars:
            for checker in self.checkers:
                checker.on_start(name)
        secret = sha256("sim/secret", name.encode())
        if name in self.liars:
            return build(self.run, name, key_of(name), secret, records)
        return PeerMachine(self.run, name, self._rings[name], secret, records)

    def start(self, *names: PeerId) -> None:
        """Start these peers, or all that are down, each from its home."""
        for name in names or self.names:
            if name not in self.halted and not self.cluster.is_up(name):
                self.homes[name].wanted = None
                self.cluster.start(name)
                if self.cluster.is_up(name):
                    self.cluster.feed(name, rounds.Want(self.wanted))
                    self._tell_state(name)
                    self._tell_held(name)

    def want(self, *changes: Change) -> None:
        """Let the operators of all honest peers be for these changes and no others."""
        self.wanted = changes
        for name in self.honest:
            self.cluster.feed(name, rounds.Want(changes))

    def new_key(self, name: PeerId, tag: str) -> Rotate:
        """Give a peer a further voting key; returns the change that puts it in force."""
        key = key_of(f"{name}/{tag}")
        self._rings[name].add(key)
        self.cluster.feed(name, rounds.KeyAdded(key))
        return Rotate(name, key.public, certificate_of(name, key))

    def application(self, name: PeerId) -> Application:
        """What a running peer's ledger has decided, as the peer sees it; also a liar's."""
        machine = self.cluster.nodes[name].machine
        if not isinstance(machine, PeerMachine | Liar | Twins):
            raise MisuseError(f"{name} does not run")
        return machine.application

    def round_of(self, name: PeerId) -> int:
        """The round that a running peer's ledger is in."""
        return self.application(name).state.current.number

    def opens(self, name: PeerId, number: int) -> bool:
        """Whether a running peer's ledger closed the commitments of a round."""
        known = self.application(name).state.round_of(number)
        return known is not None and known.reached_open

    def later(self, name: PeerId, seconds: float, act: Callable[[], None]) -> None:
        """Do something for a peer, unless it is down by then or was."""
        node = self.cluster.nodes[name]
        life = node.life
        self.cluster.clock.after(
            seconds, lambda: act() if node.machine is not None and node.life == life else None
        )

    # -- what the checkers see

    def on_record(self, peer: PeerId, log: str, record: bytes) -> None:
        if peer in self.liars:
            return
        if log == "blocks":
            finalized = decode_finalized(record)
            for checker in self.checkers:
                checker.on_block(peer, finalized)
        elif log == "statements":
            message = peer_message(TRANSACTION + record)
            if isinstance(message, Parsed):
                for checker in self.checkers:
                    checker.on_statement(peer, message)

    def on_receive(self, peer: PeerId, event: Received) -> None:
        if peer not in self.liars and event.message[:1] == TRANSACTION:
            message = peer_message(event.message)
            for checker in self.checkers:
                checker.on_receive(peer, message)

    def on_halt(self, peer: PeerId, error: HaltError) -> None:
        self._watch(peer, rounds.Halt(str(error)))

    def _on_message(self, peer: PeerId, message: bytes) -> None:
        if peer not in self.liars and message is not self._seen:
            self._seen = message  # a broadcast comes by once per receiver
            value = peer_message(message)
            for checker in self.checkers:
                checker.on_message(peer, value)

    def violations(self) -> list[str]:
        """All that the checkers found, after a look at the honest peers' disks."""
        for name in self.honest:
            for record in self.cluster.nodes[name].disk.read().get("blocks", ()):
                self._certificates.check(name, decode_finalized(record))
        return [violation for checker in self.checkers for violation in checker.violations]

    # -- the host's part of each apply effect

    def _on_effect(
        self, peer: PeerId, effect: Effect, now: float
    ) -> Iterable[tuple[float, object]]:
        if peer not in self.liars:
            self._watch(peer, effect)
        match effect:
            case rounds.StartTraining():
                self._train(peer, effect)
            case rounds.OfferPayload():
                self.plane.push(peer, effect.payload_root, effect.to or self.names)
            case rounds.FetchPayload():
                self._fetch(peer, effect)
            case rounds.Advance():
                self.later(peer, ADVANCE_SECONDS, partial(self._advance, peer, effect))
            case rounds.CatchUp(number, root, holders) | rounds.Diverged(number, _, root, holders):
                self._copy(peer, number, root, holders)
            case rounds.DropRound():
                self._take_back(peer, effect.round)
            case BlockDone():
                if any(isinstance(event, OpeningsClosed) for event in effect.events):
                    self._tell_held(peer)
        return ()

    def _watch(self, peer: PeerId, effect: Effect) -> None:
        """An honest peer's effect, as the checkers and listeners see it."""
        if isinstance(effect, BlockDone):
            self.seating.note(effect.height, effect.events)
        for checker in self.checkers:
            checker.on_effect(peer, effect)
        match effect:
            case rounds.Halt():
                self.halted[peer] = effect.reason
                self.cluster.crash(peer)
            case rounds.Finished():
                self.finished.add(peer)
            case Suspected():
                self.accusations.suspected.setdefault(effect.peer, set()).add(effect.fault)
            case BlockDone():
                application = self.application(peer)
                height, digest = application.info().last_height, application.state.digest()
                for checker in self.checkers:
                    checker.on_state(peer, height, digest)
        for listener in self.listeners:
            listener(peer, effect)

    def _train(self, peer: PeerId, effect: rounds.StartTraining) -> None:
        seconds = self.trainer.seconds + self.random.random() * self.trainer.spread
        self.later(peer, seconds, partial(self._trained, peer, effect.round, effect.from_root))

    def _trained(self, peer: PeerId, number: Round, from_root: bytes) -> None:
        """Training again after a restart need not give the same bytes: hence the life."""
        life = self.cluster.nodes[peer].life
        root = sha256("sim/payload", encode((peer, number, from_root, life)))
        length = self.trainer.payload_bytes
        self.plane.put(peer, root, length)
        if peer in self._malformed:
            self._unreadable.add(root)
        self.cluster.feed(peer, rounds.Trained(number, length, root, TRACE_ROOT))

    def _fetch(self, peer: PeerId, effect: rounds.FetchPayload) -> None:
        root, number = effect.payload_root, effect.round
        if self.plane.has(peer, root):
            self._tell_held(peer, root)
        elif effect.length > self.trainer.payload_bytes:
            refused = rounds.PayloadRefused(number, effect.author, root, "oversized")
            self.cluster.feed(peer, refused)
        else:
            wanted = partial(self._is_open, peer, number)
            self.plane.fetch(peer, root, effect.length, effect.holders, wanted)

    def _is_open(self, peer: PeerId, number: int) -> bool:
        """Whether a payload of a round is still of use."""
        return self.application(peer).state.round_of(number) is not None

    def _on_stored(self, peer: PeerId, root: bytes) -> None:
        wanted = self.homes[peer].wanted
        if wanted is not None and wanted[1] == root:
            self._move_to(peer, *wanted)
        else:
            self._tell_held(peer, root)

    def _serves(self, holder: PeerId) -> bool:
        """Liars answer every other request."""
        return holder not in self.liars or self.random.random() < 0.5

    def _tell_held(self, peer: PeerId, root: bytes | None = None) -> None:
        """Tell a peer of the payloads on its disk (or of one) that the ledger opened."""
        state = self.application(peer).state
        known = [state.current] if state.previous is None else [state.previous, state.current]
        for one in known:
            for item in one.opened:
                if root in (None, item.payload_root) and self.plane.has(peer, item.payload_root):
                    self.cluster.feed(peer, self._inspected(peer, Round(one.number), item))

    def _inspected(self, peer: PeerId, number: Round, item: Accepted) -> object:
        author, root = PeerId(item.author), item.payload_root
        if root in self._unreadable:
            return rounds.PayloadRefused(number, author, root, "unreadable")
        if item.payload_length != self.plane.length(peer, root):
            return rounds.PayloadRefused(number, author, root, "wrong-length")
        return rounds.PayloadStored(number, author, root)

    # -- the agreed state

    def _tell_state(self, peer: PeerId) -> None:
        home = self.homes[peer]
        self.cluster.feed(peer, rounds.StateAdvanced(Round(home.number), home.root))

    def _advance(self, peer: PeerId, effect: rounds.Advance) -> None:
        home = self.homes[peer]
        if home.number >= effect.round:  # a copy came first
            return
        held = all(self.plane.has(peer, item.payload_root) for item in effect.accepted)
        if home.root == effect.from_root and held:
            slip = self.slips.get(peer, effect.round + 1) <= effect.round
            root = sha256("sim/slip", next_root(effect)) if slip else next_root(effect)
            if slip:
                del self.slips[peer]
            self._move_to(peer, effect.round, root)
        elif peer not in self.liars:
            raise MisuseError(f"{peer} cannot apply round {effect.round} from where it stands")

    def _copy(self, peer: PeerId, number: int, root: bytes, holders: Sequence[PeerId]) -> None:
        home = self.homes[peer]
        home.wanted = (number, root)
        if self.plane.has(peer, root):
            self._move_to(peer, number, root)
        else:
            wanted = partial(self._is_wanted, peer, root)
            self.plane.fetch(peer, root, STATE_BYTES, holders, wanted)

    def _is_wanted(self, peer: PeerId, root: bytes) -> bool:
        wanted = self.homes[peer].wanted
        return wanted is not None and wanted[1] == root

    def _move_to(self, peer: PeerId, number: int, root: bytes) -> None:
        """The new state and the one before it are kept, as a node keeps them."""
        home = self.homes[peer]
        if home.before is not None:
            self.plane.drop(peer, home.before[1])
        home.before = (home.number, home.root)
        home.number, home.root, home.wanted = number, root, None
        self.plane.put(peer, root, STATE_BYTES)
        self._tell_state(peer)

    def _take_back(self, peer: PeerId, number: int) -> None:
        home = self.homes[peer]
        if home.number == number:
            home.number, home.root = home.before or (-1, START_ROOT)
            home.before = None
            self._tell_state(peer)
