"""The reader's state: what the ledger has decided so far. Immutable, canonical, hashable.

No height, block time, proposer or clock is in it (ROUND.md, head). Tuples are in order of peer id.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from functools import wraps
from typing import TypeVar

from msgspec.structs import replace

from torchbft.primitives.digests import sha256
from torchbft.primitives.errors import DecodeError
from torchbft.primitives.faults import FaultModel
from torchbft.primitives.runspec import RunSpec
from torchbft.primitives.wire import Bytes32, Count, Name, Wire, decode, encode
from torchbft.protocols.round.assignment import Cursor, Share, genesis_beacon, pass_key
from torchbft.protocols.round.changes import Change
from torchbft.protocols.round.messages import (
    Attestation,
    Opening,
    Parsed,
    commitment_digest,
    parse,
)

MAX_STATE_BYTES = 16 * 1024 * 1024
"""64 members × 3 rounds × 7 slots × 2 statements of 4 KiB fit."""

MAX_NAMES = 256
"""Members that a run ever had: a fourfold exchange of the largest membership."""

MAX_RETIRED_KEYS = 1024
"""Voting keys that were given up in a run, 100 bytes each: a rotation of everyone 16 times."""

QUOTA = 2
"""Different statements per slot: two show an equivocation, a third is spam (ROUND.md 17)."""

REMEMBERED = 4
"""States whose answers are kept: the current and the previous round, before and after a block."""

CONVICTABLE = ("attest", "commit", "open")
"""Slots in which a second, different statement convicts. Closings and roots never do."""


class Phase(StrEnum):
    """What the ledger is collecting for the current round."""

    READY = "ready"
    COMMIT = "commit"
    OPEN = "open"
    ATTEST = "attest"
    ROOT = "root"
    """Only after the last round: its root is still to be signed."""
    FINISHED = "finished"


class Verdict(StrEnum):
    PENDING = "pending"
    FIXED = "fixed"
    VOID = "void"


class Seat(Wire, frozen=True):
    """A member as a round sees it, frozen at the round's opening."""

    name: Name
    voting: Bytes32
    power: Count
    contributor: bool
    validator: bool


class Member(Wire, frozen=True):
    """A member and its standing, as of the last round that was fixed or void. Who left stays, with
    no role: its name and keys are taken, and evidence against it is still good."""

    name: Name
    identity: Bytes32
    voting: Bytes32
    power: Count
    contributor: bool
    validator: bool
    host: str = ""
    port: Count = 0
    since: Count = 0
    """First round of this voting key."""
    left: bool = False
    credit: Count = 0
    """Accepted contributions."""
    absent: Count = 0
    """Non-void rounds in a row without an accepted contribution."""
    parked: bool = False
    """Not waited for (ROUND.md 9)."""
    spells: Count = 0
    streak: Count = 0
    """Rounds in a row in which its items reached the ledger, while parked."""
    convicted: bool = False


class RetiredKey(Wire, frozen=True):
    """A voting key that its member used in the rounds ``first`` to ``last``, and no more."""

    name: Name
    voting: Bytes32
    first: Count
    last: Count


class Slot(Wire, frozen=True):
    """What an author said in one slot: one transaction, or two that differ."""

    kind: str
    author: Name
    late: bool
    txs: tuple[bytes, ...]

    @property
    def first(self) -> Parsed:
        return parse(self.txs[0])


class Accepted(Wire, frozen=True):
    """A payload that counts: fetch it by its root and check its length."""

    author: Name
    payload_root: Bytes32
    payload_length: Count
    trace_root: Bytes32


class LedgerFields(Wire, frozen=True):
    """The ledger's part of ``AgreedState`` after a round, frozen at the block that fixed it."""

    epoch: Count
    pass_index: Count
    cursor: Count
    membership_digest: Bytes32
    credit_digest: Bytes32


class RoundState(Wire, frozen=True):
    """One round: what was frozen at its opening, and what the ledger holds for it since."""

    number: Count
    epoch: Count
    seats: tuple[Seat, ...]
    f: Count
    m_min: Count
    waited: tuple[Name, ...]
    shares: tuple[tuple[Name, Share], ...]
    slots: tuple[Slot, ...] = ()
    reached_open: bool = False
    opened: tuple[Accepted, ...] = ()
    """Openings that count, from the close of the opening window on."""
    accepted: tuple[Accepted, ...] = ()
    verdict: str = Verdict.PENDING
    reason: str = ""
    root: bytes = b""
    agreed: LedgerFields | None = None
    """Set when the round is fixed."""
    standing: tuple[Member, ...] = ()
    """Members as they stood before this round was settled: restored if votes void it."""
    banned: tuple[Name, ...] = ()
    """Convicted while this round was current: nothing more of theirs comes, or is waited for."""

    def seat(self, name: str) -> Seat | None:
        return next((seat for seat in self.seats if seat.name == name), None)

    def slot(self, kind: str, author: str) -> Slot | None:
        return find_slot(self.slots, kind, author)

    def of_kind(self, kind: str) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.slots if slot.kind == kind)

    @property
    def contributors(self) -> tuple[Seat, ...]:
        return tuple(seat for seat in self.seats if seat.contributor)

    @property
    def validators(self) -> tuple[Seat, ...]:
        return tuple(seat for seat in self.seats if seat.validator)

    @property
    def voting(self) -> FaultModel:
        """Fault model of the validators, in units of power."""
        return _voting(self)

    def power(self, names: set[str] | frozenset[str]) -> int:
        return sum(seat.power for seat in self.validators if seat.name in names)

    @property
    def root_due(self) -> bool:
        """Whether this round was fixed and its root is neither signed nor voted void."""
        return self.verdict == Verdict.FIXED and not self.root


class MemberConfig(Wire, frozen=True):
    name: Name
    identity: Bytes32
    voting: Bytes32
    power: Count
    contributor: bool
    validator: bool
    host: str = ""
    port: Count = 0


class GenesisConfig(Wire, frozen=True):
    """What the application starts from; every field comes from the signed run file."""

    run_id: Bytes32
    genesis_seed: Bytes32
    members: tuple[MemberConfig, ...]
    f: Count
    """Byzantine contributors to withstand."""
    m_min: Count
    samples: Count
    samples_per_slice: Count
    rounds: Count
    assigned: bool
    rule: str = ""
    """The aggregation rule, whose need a change of the membership must leave met; empty: none."""

    @classmethod
    def from_run(cls, run: RunSpec) -> GenesisConfig:
        """The genesis of a checked run file."""
        training = run.training
        return cls(
            run_id=run.run_id,
            genesis_seed=bytes.fromhex(run.seed),
            members=tuple(
                MemberConfig(
                    member.name,
                    bytes.fromhex(member.identity),
                    bytes.fromhex(member.voting),
                    member.power,
                    member.contributor,
                    member.validator,
                    member.host,
                    member.port,
                )
                for member in run.members
            ),
            f=run.contributor_faults.f,
            m_min=run.m_min,
            samples=run.data.samples,
            samples_per_slice=training.inner_steps * training.accumulate * training.batch_size,
            rounds=training.rounds,
            assigned=run.data.mode == "assigned",
            rule=run.aggregation.rule,
        )

    def fault(self) -> str | None:
        """Why no run can start from this, or None."""
        names = [member.name for member in self.members]
        contributors = sum(member.contributor for member in self.members)
        power = sum(member.power for member in self.members if member.validator)
        if names != sorted(set(names)):
            return "members are not in order of name, or share one"
        if not 3 * self.f < contributors or not power:
            return f"f={self.f} needs more than {3 * self.f} contributors, and voting power"
        if not 1 <= self.m_min <= contributors - self.f:
            return f"m_min={self.m_min} is not in 1..n−f={contributors - self.f}"
        if self.assigned and not (self.samples and self.samples_per_slice):
            return "assigned data without samples"
        return None if self.rounds else "a run of no rounds"


class SignedRoot(Wire, frozen=True):
    """The newest agreed state whose root a quorum signed on the ledger."""

    round: Count
    root: Bytes32


class LedgerState(Wire, frozen=True):
    """Everything that the reader knows. ``current`` is the round opened last."""

    genesis: GenesisConfig
    phase: str
    epoch: Count
    members: tuple[Member, ...]
    current: RoundState
    previous: RoundState | None
    early: tuple[Slot, ...]
    """Items for the next round that came before it opened."""
    beacons: tuple[bytes, bytes, bytes]
    """Of the current round and the next two; the last is empty until openings close."""
    cursor: Cursor
    requeue: tuple[Share, ...]
    void_streak: Count
    signed: SignedRoot | None
    """None until the first root is signed: the start state counts."""
    passed: tuple[Change, ...] = ()
    """Changes that a quorum voted for: made when the current round is settled."""
    retired: tuple[RetiredKey, ...] = ()

    def digest(self) -> bytes:
        """The application hash of this state."""
        return state_digest(encode(self))

    def round_of(self, number: int) -> RoundState | None:
        """The current or the previous round of this number."""
        if number == self.current.number:
            return self.current
        if self.previous is not None and number == self.previous.number:
            return self.previous
        return None

    def member(self, name: str) -> Member | None:
        return next((member for member in self.members if member.name == name), None)

    def keys_of(self, name: str) -> tuple[tuple[bytes, int, int | None], ...]:
        """Voting keys that a member has or had, each with its first and its last round."""
        now = [(m.voting, m.since, None) for m in self.members if m.name == name and not m.left]
        return (*now, *((k.voting, k.first, k.last) for k in self.retired if k.name == name))

    @property
    def unsigned(self) -> RoundState | None:
        """The fixed round whose root the ledger still waits for."""
        for candidate in (self.previous, self.current):
            if candidate is not None and candidate.root_due:
                return candidate
        return None


def state_digest(encoded: bytes) -> bytes:
    """``LedgerState.digest`` of an encoded state."""
    return sha256("round/state", encoded)


def find_slot(slots: tuple[Slot, ...], kind: str, author: str) -> Slot | None:
    for slot in slots:  # a loop: this is asked more often than anything else
        if slot.author == author and slot.kind == kind:
            return slot
    return None


def with_tx(
    slots: tuple[Slot, ...], kind: str, author: str, tx: bytes, late: bool
) -> tuple[Slot, ...]:
    """The slots with one more transaction in its place; an old slot keeps its lateness."""
    old = find_slot(slots, kind, author)
    if old is not None:
        new = replace(old, txs=(*old.txs, tx))
        return tuple(new if slot is old else slot for slot in slots)
    at = bisect_left(slots, (kind, author), key=lambda slot: (slot.kind, slot.author))
    return (*slots[:at], Slot(kind, author, late, (tx,)), *slots[at:])


def equivocators(current: RoundState) -> frozenset[str]:
    """Authors of two different commitments, openings or attestations in a round."""
    return frozenset(
        slot.author for slot in current.slots if slot.kind in CONVICTABLE and len(slot.txs) > 1
    )


_S = TypeVar("_S")


def _first(current: RoundState, kind: str, author: str, type_: type[_S]) -> _S | None:
    slot = current.slot(kind, author)
    statement = slot.first.statement if slot and not slot.late else None
    return statement if isinstance(statement, type_) else None


def opening_of(current: RoundState, author: str) -> Opening | None:
    """The author's first opening that came in time, fitting or not."""
    return _first(current, "open", author, Opening)


def attestation_of(current: RoundState, author: str) -> Attestation | None:
    return _first(current, "attest", author, Attestation)


_R = TypeVar("_R")


def remembered(function: Callable[[RoundState], _R]) -> Callable[[RoundState], _R]:
    """Keep the last answers for the same (immutable) objects, which are asked about many times.

    By identity: comparing or hashing a state costs more than most questions about it.
    """
    kept: deque[tuple[RoundState, _R]] = deque(maxlen=REMEMBERED)

    @wraps(function)
    def ask(current: RoundState) -> _R:
        for known, answer in kept:
            if known is current:
                return answer
        answer = function(current)
        kept.append((current, answer))
        return answer

    return ask


@remembered
def committed(current: RoundState) -> frozenset[str]:
    """Contributors whose commitment counts: in time, and nothing convicts them in this round."""
    cheats = equivocators(current)
    in_time = {slot.author for slot in current.of_kind("commit") if not slot.late}
    return frozenset(seat.name for seat in current.contributors if seat.name in in_time - cheats)


def fits(current: RoundState, author: str) -> bool:
    """Whether the author's opening opens its commitment."""
    return author in _fitting(current)


@remembered
def _fitting(current: RoundState) -> frozenset[str]:
    found = set()
    for slot in current.of_kind("commit"):
        opening = opening_of(current, slot.author)
        if opening is None or slot.late:
            continue
        if getattr(slot.first.statement, "digest", b"") == commitment_digest(opening):
            found.add(slot.author)
    return frozenset(found)


@remembered
def _voting(current: RoundState) -> FaultModel:
    return FaultModel(sum(seat.power for seat in current.validators))


def ledger_fields(state: LedgerState) -> LedgerFields:
    """The ledger's fields of ``AgreedState`` as they stand now."""
    roster = [
        (m.name, m.identity, m.voting, m.power, m.contributor, m.validator, m.convicted)
        for m in state.members
        if not m.left
    ]
    credits = [(m.name, m.credit) for m in state.members]
    return LedgerFields(
        state.epoch,
        state.cursor.pass_index,
        state.cursor.start,
        sha256("round/membership", encode(roster)),
        sha256("round/credit", encode(credits)),
    )


def genesis_state(genesis: GenesisConfig) -> LedgerState:
    """The state before the first block."""
    members = tuple(
        Member(m.name, m.identity, m.voting, m.power, m.contributor, m.validator, m.host, m.port)
        for m in genesis.members
    )
    first = genesis_beacon(genesis.genesis_seed, genesis.run_id)
    second = sha256("round/beacon/fallback", first)
    waiting = RoundState(0, 0, seats_of(members), genesis.f, genesis.m_min, (), ())
    cursor = Cursor(pass_key(first, genesis.run_id, 0), 0, 0)
    return LedgerState(
        genesis,
        Phase.READY,
        0,
        members,
        waiting,
        None,
        (),
        (first, second, b""),
        cursor,
        (),
        0,
        None,
    )


def seats_of(members: tuple[Member, ...]) -> tuple[Seat, ...]:
    """The members' seats in the next round. Convicts have none, unless all validators are convicted
    (then they keep their votes: no engine runs without a validator)."""
    voters = {m.name for m in members if m.validator and not m.convicted} or {
        m.name for m in members if m.validator
    }
    return tuple(
        Seat(m.name, m.voting, m.power, m.contributor and not m.convicted, m.name in voters)
        for m in members
        if not m.left and (m.name in voters or not m.convicted)
    )


def decode_state(data: bytes) -> LedgerState:
    """A state from a snapshot. Raises DecodeError."""
    state = decode(data, LedgerState, limit=MAX_STATE_BYTES)
    if state.genesis.fault() or state.phase not in set(Phase):
        raise DecodeError("a snapshot that no reader makes")
    return state


_M = TypeVar("_M", bound=Wire)


def changed(value: _M, **fields: object) -> _M:
    """A copy with some fields changed."""
    return replace(value, **fields)
