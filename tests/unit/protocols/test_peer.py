"""A whole peer: what passes between its ordering engine, its round and its host.

``Room`` hosts up to four machines in memory: every message arrives at once, in order, until a test
holds one back; time moves from deadline to deadline.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import pytest

from torchbft.primitives.digests import sha256
from torchbft.primitives.effects import Broadcast, Effect, Persist, Received, Send, Tick
from torchbft.primitives.evidence import Evidence, Fault
from torchbft.primitives.ids import Height, PeerId, Round, View
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import Data, RunSpec, Training, new_member
from torchbft.primitives.wire import encode
from torchbft.protocols.ledger.messages import (
    Kind,
    Proposal,
    SignedVote,
    Transaction,
    Vote,
    decode_finalized,
    decode_message,
    sign_vote,
)
from torchbft.protocols.ledger.state import Accuse, Suspect
from torchbft.protocols.peer import (
    LEDGER,
    ROUND,
    TRANSACTION,
    BlockDone,
    PeerMachine,
    Suspected,
    application_of,
    checks_of,
    validators_of,
)
from torchbft.protocols.round import interface as rounds
from torchbft.protocols.round import messages as m
from torchbft.protocols.round.state import Phase

START_ROOT = sha256("test/start")
LIMIT = 60.0
"""Virtual seconds: a round of four takes below one where nothing is lost."""
A, B, C, D = (PeerId(f"peer-{i}") for i in range(4))

_T = TypeVar("_T")


def key_of(name: str) -> SigningKey:
    return SigningKey.derive(bytes(32), name)


def run_of(n: int = 4, number_of_rounds: int = 2) -> RunSpec:
    identity = b"\1" * 32
    run = RunSpec(
        name="room",
        seed="07" * 32,
        members=tuple(
            new_member(name, SigningKey.derive(identity, name), key_of(name))
            for name in (A, B, C, D)[:n]
        ),
        data=Data(samples=1000),
        training=Training(rounds=number_of_rounds),
    )
    run.check()
    return run


RUN = run_of()


def machine(
    name: PeerId = A, run: RunSpec = RUN, records: dict[str, list[bytes]] | None = None
) -> PeerMachine:
    return PeerMachine(run, name, key_of(name), sha256("secret", name.encode()), records or {})


def of_type(effects: Iterable[Effect], kind: type[_T]) -> list[_T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def transactions(effects: Iterable[Effect]) -> list[bytes]:
    """Transactions that are sent to all."""
    sent = [effect.message for effect in of_type(effects, Broadcast)]
    return [message[1:] for message in sent if message[:1] == TRANSACTION]


@dataclass
class Room:
    """Hosts machines; ``gave[name]`` holds every effect that a peer gave."""

    run: RunSpec = RUN
    now: float = 0.0
    train: bool = False
    """Whether to do the trainer's part of each round, too."""
    lost: Callable[[PeerId, PeerId, bytes], bool] = lambda sender, to, message: False
    gave: dict[PeerId, list[Effect]] = field(default_factory=lambda: defaultdict(list))
    records: dict[PeerId, dict[str, list[bytes]]] = field(default_factory=dict)
    inbox: deque[tuple[PeerId, object]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.machines = {
            PeerId(member.name): machine(PeerId(member.name), self.run)
            for member in self.run.members
        }

    def start(self) -> None:
        for name, each in self.machines.items():
            self.take(name, each.start(self.now))
        for name in self.machines:
            self.give(name, rounds.StateAdvanced(rounds.GENESIS_ROUND, START_ROOT))

    def give(self, name: PeerId, event: object) -> None:
        self.inbox.append((name, event))

    def take(self, name: PeerId, effects: list[Effect]) -> None:
        """Carry out what a machine wants."""
        for effect in effects:
            self.gave[name].append(effect)
            if isinstance(effect, Persist):
                logs = self.records.setdefault(name, {})
                logs.setdefault(effect.log, []).append(effect.record)
            elif isinstance(effect, Send):
                self.post(name, effect.to, effect.message)
            elif isinstance(effect, Broadcast):
                for other in self.machines:
                    if other != name:
                        self.post(name, other, effect.message)
            elif self.train:
                self.work(name, effect)

    def post(self, sender: PeerId, to: PeerId, message: bytes) -> None:
        if not self.lost(sender, to, message):
            self.give(to, Received(sender, message))

    def work(self, name: PeerId, effect: Effect) -> None:
        """The trainer, the data plane and the keeper of the state, all of them at once."""
        match effect:
            case rounds.StartTraining(number):
                root = sha256("test/payload", name.encode(), bytes([number]))
                self.give(name, rounds.Trained(number, 100, root, sha256("test/trace")))
            case rounds.OfferPayload(number, root):
                for other in self.machines:
                    self.give(other, rounds.PayloadStored(number, name, root))
            case rounds.Advance():
                parts = [item.payload_root for item in effect.accepted]
                root = sha256("test/state", effect.from_root, *parts)
                self.give(name, rounds.StateAdvanced(effect.round, root))

    def settle(self) -> None:
        while self.inbox:
            name, event = self.inbox.popleft()
            self.take(name, self.machines[name].handle(event, self.now))

    def until(self, done: Callable[[], bool]) -> None:
        """Let time pass until this holds."""
        self.settle()
        while not done():
            deadlines = [at for each in self.machines.values() if (at := each.deadline())]
            self.now = max(self.now, min(deadlines))
            assert self.now < LIMIT, "nothing came of it"
            for name, each in self.machines.items():
                if (at := each.deadline()) is not None and at <= self.now:
                    self.take(name, each.handle(Tick(), self.now))
            self.settle()

    def all_at(self, height: int) -> bool:
        return all(each.height >= height for each in self.machines.values())

    def of(self, name: PeerId, kind: type[_T]) -> list[_T]:
        return of_type(self.gave[name], kind)


# --- in: who a message is for ---------------------------------------------------------------------


@dataclass
class Noted:
    """Stands in for one of the two protocols: notes what it is given, says what it is told to."""

    at: float | None = None
    says: list[Effect] = field(default_factory=list)
    heard: list[object] = field(default_factory=list)

    def deadline(self) -> float | None:
        return self.at

    def start(self, now: float) -> list[Effect]:
        return self.says

    def handle(self, event: object, now: float) -> list[Effect]:
        self.heard.append(event)
        said, self.says = self.says, []
        return said


@pytest.fixture
def halves() -> tuple[PeerMachine, Noted, Noted]:
    """A peer whose ledger and round are notebooks."""
    peer, ledger, round_ = machine(), Noted(), Noted()
    peer._ledger, peer._round = ledger, round_  # type: ignore[assignment]
    return peer, ledger, round_


Halves = tuple[PeerMachine, Noted, Noted]


@pytest.mark.parametrize("body", [b"", b"x", b"\x00\x01\x02", bytes(1000)])
def test_the_first_byte_says_for_whom_a_message_is(halves: Halves, body: bytes) -> None:
    peer, ledger, round_ = halves
    assert peer.handle(Received(B, LEDGER + body), 1.0) == []
    assert (ledger.heard, round_.heard) == ([Received(B, body)], [])
    ledger.heard.clear()
    assert peer.handle(Received(C, ROUND + body), 1.0) == []
    assert (ledger.heard, round_.heard) == ([], [Received(C, body)])


def test_a_transaction_is_heard_by_the_round_and_ordered_for_its_sender(halves: Halves) -> None:
    peer, ledger, round_ = halves
    assert peer.handle(Received(B, TRANSACTION + b"tx"), 1.0) == []
    assert round_.heard == [rounds.Heard(b"tx")]
    assert ledger.heard == [Transaction(b"tx", B)]


@pytest.mark.parametrize("message", [b"", b"\x03", b"\x7f" + bytes(100), b"\xff\x00\x01\x02"])
def test_a_message_for_nobody_makes_its_sender_suspected_and_reaches_nothing(
    halves: Halves, message: bytes
) -> None:
    peer, ledger, round_ = halves
    (told,) = peer.handle(Received(D, message), 1.0)
    assert isinstance(told, Suspected)
    assert (told.peer, told.fault) == (D, "malformed-message")
    assert ledger.heard == round_.heard == []


@pytest.mark.parametrize("kind", [LEDGER, ROUND, TRANSACTION])
@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x00" * 64, bytes(range(256)) * 40])
def test_garbage_for_either_protocol_raises_nothing_and_is_sent_on_to_nobody(
    kind: bytes, body: bytes
) -> None:
    peer = machine()
    peer.start(0.0)
    before = peer.application.state
    effects = peer.handle(Received(B, kind + body), 0.01)
    assert not [effect for effect in effects if isinstance(effect, Persist | Broadcast | Send)]
    assert {told.peer for told in of_type(effects, Suspected)} <= {B}
    assert bool(of_type(effects, Suspected)) == (kind == LEDGER)
    assert peer.application.state == before


def test_all_other_inputs_are_the_rounds(halves: Halves) -> None:
    peer, ledger, round_ = halves
    given = [
        rounds.StateAdvanced(rounds.GENESIS_ROUND, START_ROOT),
        rounds.Trained(Round(0), 1, START_ROOT, START_ROOT),
        rounds.PreferVoid(Round(0), "slow"),
    ]
    for event in given:
        peer.handle(event, 1.0)
    assert round_.heard == given
    assert ledger.heard == []


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ledger_at", "round_at", "ticked"),
    [
        (5.0, None, (True, False)),
        (None, 5.0, (False, True)),
        (5.0, 5.0, (True, True)),
        (4.0, 6.0, (True, False)),
        (6.0, 4.0, (False, True)),
        (6.0, 7.0, (False, False)),
        (None, None, (False, False)),
    ],
)
def test_a_tick_goes_to_whose_deadline_passed_and_to_no_other(
    halves: Halves, ledger_at: float | None, round_at: float | None, ticked: tuple[bool, bool]
) -> None:
    peer, ledger, round_ = halves
    ledger.at, round_.at = ledger_at, round_at
    peer.handle(Tick(), 5.0)
    assert (ledger.heard == [Tick()], round_.heard == [Tick()]) == ticked
    assert len(ledger.heard) + len(round_.heard) == sum(ticked)


@pytest.mark.parametrize(
    ("ledger_at", "round_at", "at"),
    [(3.0, 2.0, 2.0), (1.0, 2.0, 1.0), (None, 2.0, 2.0), (1.0, None, 1.0), (None, None, None)],
)
def test_the_deadline_is_the_earlier_one(
    halves: Halves, ledger_at: float | None, round_at: float | None, at: float | None
) -> None:
    peer, ledger, round_ = halves
    ledger.at, round_.at = ledger_at, round_at
    assert peer.deadline() == at


# --- out: what one protocol wants of the other ----------------------------------------------------


def test_what_a_protocol_sends_carries_its_byte_and_all_else_passes_as_it_is(
    halves: Halves,
) -> None:
    peer, ledger, round_ = halves
    record = Persist("votes", b"record")
    ledger.says = [record, Broadcast(b"all"), Send(C, b"one")]
    round_.says = [Broadcast(b"vote"), Send(B, b"root"), rounds.Finished(3)]
    assert peer.start(0.0) == [
        record,
        Broadcast(LEDGER + b"all"),
        Send(C, LEDGER + b"one"),
        Broadcast(ROUND + b"vote"),
        Send(B, ROUND + b"root"),
        rounds.Finished(3),
    ]


def test_a_submission_goes_to_all_and_to_the_own_engine_as_its_own(halves: Halves) -> None:
    peer, ledger, round_ = halves
    round_.says = [rounds.Submit(b"mine")]
    ledger.says = [Broadcast(b"proposal")]
    effects = peer.handle(rounds.PreferVoid(Round(0), "slow"), 1.0)
    assert effects == [Broadcast(TRANSACTION + b"mine"), Broadcast(LEDGER + b"proposal")]
    assert ledger.heard == [Transaction(b"mine", A)]


def test_suspicions_and_evidence_of_the_engine_go_to_host_and_round(halves: Halves) -> None:
    peer, ledger, round_ = halves
    evidence = Evidence(Fault.DOUBLE_VOTE, D, 1, (b"one", b"two"))
    ledger.says = [Suspect(C, "malformed-message", "no message"), Accuse(evidence)]
    effects = peer.handle(Received(B, LEDGER + b"x"), 1.0)
    assert effects == [Suspected(C, "malformed-message", "no message")]
    assert round_.heard == [rounds.Found(evidence)]


def test_a_peer_proposes_its_own_submission_when_it_leads() -> None:
    room = Room()
    leader = room.machines[A].leader
    peer = room.machines[leader]
    (ready,) = transactions(peer.start(0.0))
    statement = m.parse(ready).statement
    assert isinstance(statement, m.Ready)
    assert statement.author == leader
    deadline = peer.deadline()
    assert deadline is not None
    sent = [effect.message for effect in of_type(peer.handle(Tick(), deadline), Broadcast)]
    proposals = [
        message
        for data in sent
        if data[:1] == LEDGER and isinstance(message := decode_message(data[1:]), Proposal)
    ]
    assert [proposal.block.txs for proposal in proposals] == [(ready,)]


def test_a_peer_alone_orders_what_it_submits() -> None:
    room = Room(run_of(1))
    room.start()
    room.until(lambda: room.all_at(1))
    (block,) = room.of(A, BlockDone)
    record = decode_finalized(room.records[A]["blocks"][0])
    assert (block.height, block.txs) == (1, 1)
    assert block.size == sum(map(len, record.block.txs))
    assert record.block.txs == (room.records[A]["statements"][0],)


# --- four peers -----------------------------------------------------------------------------------


def test_a_block_is_told_to_the_host_and_moves_the_round() -> None:
    room = Room()
    room.start()
    assert not any(room.of(name, rounds.StartTraining) for name in room.machines)
    room.until(lambda: room.all_at(1))
    for name, each in room.machines.items():
        assert room.of(name, BlockDone)[0].height == 1
        assert each.application.state.phase == Phase.COMMIT
        (training,) = room.of(name, rounds.StartTraining)
        assert (training.round, training.from_root) == (0, START_ROOT)
    assert len({each.application.state.digest() for each in room.machines.values()}) == 1


def test_two_rounds_pass_through_ledger_and_round_to_one_root_at_all() -> None:
    room = Room(train=True)
    room.start()
    room.until(lambda: all(room.of(name, rounds.Finished) for name in room.machines))
    agreed = {
        name: {(told.round, told.root) for told in room.of(name, rounds.RootAgreed)}
        for name in room.machines
    }
    assert len({frozenset(roots) for roots in agreed.values()}) == 1
    assert {number for number, _ in agreed[A]} == {0, 1}
    for name in room.machines:
        (first, second) = room.of(name, rounds.Advance)
        assert [item.author for item in first.accepted] == [A, B, C, D]
        assert second.from_root in {root for _, root in agreed[A]}
        assert not room.of(name, Suspected)
        assert not room.of(name, rounds.Accuse)


def test_when_the_last_commitment_came_is_known_once_it_came() -> None:
    room = Room(train=True)
    assert room.machines[A].last_commitment(0) is None
    room.start()
    room.until(lambda: bool(room.of(A, rounds.Advance)))
    heard = room.machines[A].last_commitment(0)
    assert heard is not None
    assert 0.0 <= heard <= room.now
    assert room.machines[A].last_commitment(7) is None


def test_a_peer_that_nobody_hears_is_not_missed() -> None:
    room = Room(lost=lambda sender, to, message: sender == D)
    room.start()
    room.until(lambda: all(room.machines[name].height >= 1 for name in (A, B, C)))
    first = {decode_finalized(room.records[name]["blocks"][0]).block for name in (A, B, C)}
    assert len(first) == 1
    assert {m.parse(tx).statement.author for tx in first.pop().txs} == {A, B, C}


def test_transactions_that_no_engine_passes_on_still_reach_every_peer_from_their_author() -> None:
    """They do not depend on the engine: with its messages lost, all items are at hand."""
    room = Room(lost=lambda sender, to, message: message[:1] == LEDGER)
    room.start()
    room.settle()
    for name in room.machines:
        heard = room.machines[name]._round._seen
        assert heard.arrivals(0, "ready", -1.0), f"{name} heard nobody"
    assert not any(each.height for each in room.machines.values())


def test_a_restarted_peer_stands_where_its_logs_end() -> None:
    room = Room(train=True)
    room.start()
    room.until(lambda: bool(room.of(A, rounds.Advance)))
    old = room.machines[A]
    again = machine(A, records=room.records[A])
    assert again.height == old.height > 0
    assert again.application.state == old.application.state
    for effect in again.start(room.now):
        if isinstance(effect, Persist):  # nothing that was signed is signed anew
            assert effect.record not in room.records[A].get(effect.log, [])
            assert effect.log != "votes"


# --- a double vote --------------------------------------------------------------------------------


def vote(
    author: PeerId = D,
    digest: bytes = sha256("a"),
    kind: Kind = Kind.PREPARE,
    view: int = 0,
    run_id: bytes = RUN.run_id,
    key: SigningKey | None = None,
) -> Vote:
    key = key or key_of(author)
    return sign_vote(key, run_id, author, kind, Height(1), View(view), digest)


OTHER = sha256("b")


def evidence_in(effects: Iterable[Effect]) -> list[Evidence]:
    said = [m.parse(tx).statement for tx in transactions(effects)]
    return [statement.evidence for statement in said if isinstance(statement, m.EvidenceTx)]


def hear(peer: PeerMachine, *votes: Vote, sender: PeerId = D) -> list[Effect]:
    return [
        effect
        for each in votes
        for effect in peer.handle(Received(sender, LEDGER + encode(each)), 0.01)
    ]


def test_two_votes_in_one_slot_end_on_the_ledger_as_evidence_and_convict() -> None:
    room = Room()
    room.start()
    for each in (vote(), vote(digest=OTHER)):
        room.take(A, room.machines[A].handle(Received(D, LEDGER + encode(each)), room.now))
    (evidence,) = evidence_in(room.gave[A])
    assert (evidence.fault, evidence.accused, evidence.round) == (Fault.DOUBLE_VOTE, D, 1)
    assert checks_of(RUN)[Fault.DOUBLE_VOTE](evidence, key_of(D).public)
    persisted = [m.parse(record).statement for record in room.records[A]["statements"]]
    assert any(isinstance(statement, m.EvidenceTx) for statement in persisted)

    def convicted() -> bool:
        members = [each.application.state.member(D) for each in room.machines.values()]
        return all(member is not None and member.convicted for member in members)

    room.until(convicted)
    on_ledger = {
        tx
        for record in room.records[B]["blocks"]
        for tx in decode_finalized(record).block.txs
        if isinstance(m.parse(tx).statement, m.EvidenceTx)
    }
    assert {m.parse(tx).statement.author for tx in on_ledger} == {A}
    for name in (A, B, C):
        (told,) = room.of(name, rounds.Accuse)
        assert (told.peer, told.fault, told.named) == (D, Fault.DOUBLE_VOTE, True)
        assert told.evidence == evidence


def test_evidence_is_told_once_however_often_the_votes_come() -> None:
    peer = machine()
    peer.start(0.0)
    both = (vote(), vote(digest=OTHER))
    assert len(evidence_in(hear(peer, *both))) == 1
    assert evidence_in(hear(peer, *both, vote(digest=sha256("c")))) == []


@pytest.mark.parametrize(
    "votes",
    [
        (vote(), vote()),
        (vote(), vote(digest=OTHER, view=1)),
        (vote(), vote(digest=OTHER, kind=Kind.FINALIZE)),
        (vote(author=C), vote(digest=OTHER)),
        (vote(), vote(digest=OTHER, run_id=sha256("another run"))),
        (vote(), vote(digest=OTHER, key=key_of(C))),
    ],
    ids=["the same", "two views", "two kinds", "two authors", "another run", "forged"],
)
def test_votes_that_do_not_contradict_accuse_nobody(votes: tuple[Vote, Vote]) -> None:
    peer = machine()
    peer.start(0.0)
    effects = hear(peer, *votes)
    assert evidence_in(effects) == []
    assert peer.application.state.member(D).convicted is False  # type: ignore[union-attr]


def test_evidence_counts_in_its_own_run_alone() -> None:
    def proof(run_id: bytes) -> Evidence:
        pair = (vote(run_id=run_id), vote(digest=OTHER, run_id=run_id))
        signed = tuple(encode(SignedVote(run_id, each)) for each in pair)
        return Evidence(Fault.DOUBLE_VOTE, D, 1, signed)

    check = checks_of(RUN)[Fault.DOUBLE_VOTE]
    assert check(proof(RUN.run_id), key_of(D).public)
    assert not check(proof(sha256("another run")), key_of(D).public)
    assert not check(proof(RUN.run_id), key_of(C).public)


# --- genesis --------------------------------------------------------------------------------------


def test_the_engine_is_run_by_the_validators_of_the_roster() -> None:
    changed: dict[PeerId, dict[str, Any]] = {A: {"power": 2}, D: {"validator": False}}
    members = tuple(
        msgspec.structs.replace(member, **changed.get(PeerId(member.name), {}))
        for member in RUN.members
    )
    found = validators_of(msgspec.structs.replace(RUN, members=members))
    assert dict(found.powers) == {A: 2, B: 1, C: 1}


def test_every_peer_begins_with_the_same_application() -> None:
    first, second = application_of(RUN), application_of(RUN)
    assert first.state == second.state
    assert first.state.phase == Phase.READY
    other = application_of(msgspec.structs.replace(RUN, seed="08" * 32))
    assert other.state.digest() != first.state.digest()
