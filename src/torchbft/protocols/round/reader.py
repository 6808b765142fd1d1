"""The reader: one pure function from finalized transactions, in their order, to the round's state.

Source: ROUND.md; numbers in comments are its sentences. ``apply_block`` takes each transaction in
turn, then judges at the block's end until nothing changes, so that a state never depends on where
blocks end in time, or on empty ones. Deviations, with their reasons, stand in
``docs/decisions/0002-round-reading.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchbft.primitives.abci import TxResult
from torchbft.primitives.ids import PeerId
from torchbft.primitives.ids import Round as RoundNumber
from torchbft.protocols.round import membership, waiting
from torchbft.protocols.round.admissible import OWN_CHECKS, EvidenceChecks, admissible
from torchbft.protocols.round.assignment import Share, deal, mix_beacon
from torchbft.protocols.round.events import (
    ChangePassed,
    CommitmentsClosed,
    Convicted,
    Event,
    MembershipChanged,
    OpeningsClosed,
    RootSigned,
    RoundFixed,
    RoundOpened,
    RoundVoid,
    RunFinished,
)
from torchbft.protocols.round.messages import (
    MEMBER_SLOT,
    Closing,
    EvidenceTx,
    Parsed,
    RootCertificate,
    Status,
    VoidVote,
    beacon_hash,
    parse,
    seats_in,
    share_commit,
)
from torchbft.protocols.round.outcomes import TRANSFERABLE, attested, equivocation, outcomes
from torchbft.protocols.round.state import (
    Accepted,
    LedgerState,
    Phase,
    RoundState,
    Seat,
    SignedRoot,
    Slot,
    Verdict,
    changed,
    committed,
    equivocators,
    fits,
    ledger_fields,
    opening_of,
    seats_of,
    with_tx,
)

CODE_REFUSED = 1
"""Not admissible: skipped."""
CODE_NO_EFFECT = 2
"""Recorded, but it changes no set."""

Step = tuple[LedgerState, list[Event]]


@dataclass(frozen=True, slots=True)
class Applied:
    """What a block did."""

    state: LedgerState
    results: tuple[TxResult, ...]
    events: tuple[Event, ...]

    @property
    def settled(self) -> bool:
        """Whether a round was fixed or void: the application hash moves then (19)."""
        return any(isinstance(event, RoundFixed | RoundVoid) for event in self.events)


def apply_block(
    state: LedgerState, txs: Sequence[bytes], checks: EvidenceChecks = OWN_CHECKS
) -> Applied:
    """The state after a finalized block. Total: no transaction can raise."""
    results: list[TxResult] = []
    events: list[Event] = []
    for tx in txs:
        reason = admissible(tx, state, checks)
        if reason is not None:
            results.append(TxResult(CODE_REFUSED, reason))
            continue
        state, result, told = _take(state, tx)
        results.append(result)
        events += told
    state, told = _convict(state)
    events += told
    step: Step | None = _pass_changes(state)
    while step is not None:
        state = step[0]
        events += step[1]
        step = _JUDGES[Phase(state.phase)](state)
    return Applied(state, tuple(results), tuple(events))


def record(state: LedgerState, tx: bytes) -> LedgerState:
    """The state with an admissible transaction in its slot, and no other consequence."""
    parsed = parse(tx)
    statement = parsed.statement
    target = state.round_of(statement.round)
    late = target is not None and _late(state, target, parsed)
    slots = state.early if target is None else target.slots
    slots = with_tx(slots, parsed.slot, statement.author, tx, late)
    if target is None:
        return changed(state, early=slots)
    return _put(state, changed(target, slots=slots))


def _put(state: LedgerState, updated: RoundState) -> LedgerState:
    if updated.number == state.current.number:
        return changed(state, current=updated)
    return changed(state, previous=updated)


_IN_TIME = {
    "commit": {Phase.READY, Phase.COMMIT},
    "close-commit": {Phase.READY, Phase.COMMIT},
    "open": {Phase.READY, Phase.COMMIT, Phase.OPEN},
    "close-open": {Phase.READY, Phase.COMMIT, Phase.OPEN},
    "attest": {Phase.READY, Phase.COMMIT, Phase.OPEN, Phase.ATTEST},
}


def _late(state: LedgerState, target: RoundState, parsed: Parsed) -> bool:
    if parsed.slot.startswith(MEMBER_SLOT):
        return target.number != state.current.number
    in_time = _IN_TIME.get(parsed.slot)
    if in_time is None:
        return False
    return target.number != state.current.number or state.phase not in in_time


def _take(state: LedgerState, tx: bytes) -> tuple[LedgerState, TxResult, list[Event]]:
    parsed = parse(tx)
    statement = parsed.statement
    state = record(state, tx)
    target = state.round_of(statement.round)
    if isinstance(statement, RootCertificate) and target is not None:
        state = _put(state, changed(target, root=statement.root))
        state = changed(state, signed=SignedRoot(statement.round, statement.root))
        number = RoundNumber(statement.round)
        return state, TxResult(), [RootSigned(number, statement.root)]
    if isinstance(statement, VoidVote) and target is not None:
        return _take_void_vote(state, target), TxResult(), []
    slots = state.early if target is None else target.slots
    slot = next(s for s in slots if s.kind == parsed.slot and s.author == statement.author)
    if slot.late:
        return state, TxResult(CODE_NO_EFFECT, "late"), []
    if len(slot.txs) > 1:
        return state, TxResult(CODE_NO_EFFECT, "a second statement in this slot"), []
    return state, TxResult(), []


def _take_void_vote(state: LedgerState, target: RoundState) -> LedgerState:
    """Certificate or void: the first on the ledger decides (14)."""
    voters = {slot.author for slot in target.of_kind("void")}
    if target.power(voters) < target.voting.quorum:
        return state
    return _put(state, changed(target, verdict=Verdict.VOID, reason="voted-void"))


def _convict(state: LedgerState) -> Step:
    """Ban, from now on, whoever signed twice for one slot (2)."""
    found: list[Convicted] = []
    known = {member.name for member in state.members if member.convicted}
    early = changed(state.current, number=state.current.number + 1, slots=state.early)
    for part in (state.previous, state.current, early):
        for slot in part.slots if part is not None else ():
            for convicted in _convictions(part, slot) if part is not None else ():
                if convicted.peer not in known:
                    known.add(convicted.peer)
                    found.append(convicted)
    if not found:
        return state, []
    members = tuple(changed(m, convicted=m.name in known) for m in state.members)
    banned = tuple(sorted({*state.current.banned, *(one.peer for one in found)}))
    return changed(state, members=members, current=changed(state.current, banned=banned)), [*found]


def _pass_changes(state: LedgerState) -> Step:
    """Changes of the membership that a quorum of this round's power is for by now (4)."""
    passed = membership.newly_passed(state)
    number = RoundNumber(state.current.number)
    events: list[Event] = [ChangePassed(number, change) for change in passed]
    return changed(state, passed=state.passed + passed) if passed else state, events


def _convictions(part: RoundState, slot: Slot) -> list[Convicted]:
    if slot.kind.startswith("evidence-"):
        statements = [parse(tx).statement for tx in slot.txs]
        claims = [said.evidence for said in statements if isinstance(said, EvidenceTx)]
        return [Convicted(PeerId(evidence.accused), evidence) for evidence in claims]
    evidence = equivocation(part, slot.author) if len(slot.txs) > 1 else None
    return [Convicted(PeerId(slot.author), evidence)] if evidence is not None else []


def _judge_ready(state: LedgerState) -> Step | None:
    current = state.current
    up = {slot.author for slot in current.of_kind("ready")}
    if current.power(up) < current.voting.quorum:
        return None
    if current.number == 0:
        return _open_round(state, 0)
    return changed(state, phase=Phase.COMMIT), [RoundOpened(RoundNumber(current.number))]


def closings_that_count(current: RoundState, window: str) -> frozenset[str]:
    """Validators whose closing counts: every author listed has an item on the ledger (6), or is a
    convict, whose item may not get there any more."""
    present = {slot.author for slot in current.of_kind(window) if not slot.late}
    present.update(current.banned)
    counting = set()
    for slot in current.of_kind(f"close-{window}"):
        said = slot.first.statement
        listed = seats_in(said.authors, len(current.seats)) if isinstance(said, Closing) else None
        if listed is not None and all(current.seats[i].name in present for i in listed):
            counting.add(slot.author)
    return frozenset(counting)


def _closed_by_quorum(current: RoundState, window: str) -> bool:
    return current.power(closings_that_count(current, window)) >= current.voting.quorum


def _judge_commit(state: LedgerState) -> Step | None:
    current, previous = state.current, state.previous
    if previous is not None and previous.verdict == Verdict.VOID and previous.accepted:
        return _revoke(state, previous)
    if previous is not None and previous.root_due:
        return None  # the window stays open until the last root is on the ledger (13)
    present = {slot.author for slot in current.of_kind("commit") if not slot.late}
    counting = committed(current)
    all_here = set(current.waited) - set(current.banned) <= present
    if not ((all_here and len(counting) >= current.m_min) or _closed_by_quorum(current, "commit")):
        return None
    if len(counting) < current.m_min:
        return _void(state, _shortage(current, len(counting), "commitments"))
    state = changed(state, phase=Phase.OPEN, current=changed(current, reached_open=True))
    authors = tuple(PeerId(name) for name in sorted(counting))
    return state, [CommitmentsClosed(RoundNumber(current.number), authors)]


def _shortage(current: RoundState, count: int, what: str) -> str:
    return f"{count} {what} where {current.m_min} are needed"


def _judge_open(state: LedgerState) -> Step | None:
    current = state.current
    counting = committed(current)
    present = {slot.author for slot in current.of_kind("open") if not slot.late} & counting
    all_here = set(current.waited) & counting - set(current.banned) <= present
    if not ((all_here and len(present) >= current.m_min) or _closed_by_quorum(current, "open")):
        return None
    state = _with_beacon(state)
    opened = tuple(
        Accepted(name, said.payload_root, said.payload_length, said.trace_root)
        for name in sorted(present)
        if fits(current, name) and (said := opening_of(current, name)) is not None
    )
    if len(opened) < current.m_min:
        return _void(state, _shortage(current, len(opened), "openings"))
    state = changed(state, phase=Phase.ATTEST, current=changed(current, opened=opened))
    return state, [OpeningsClosed(RoundNumber(current.number), opened)]


def _with_beacon(state: LedgerState) -> LedgerState:
    """Mix the beacon of the round after the next from the secrets just opened (15)."""
    secrets = []
    for seat in state.current.contributors:
        opening = opening_of(state.current, seat.name)
        if opening is not None and beacon_share_fits(state, seat.name):
            secrets.append((seat.name, opening.beacon_secret))
    first, second, _ = state.beacons
    mixed = mix_beacon(second, secrets, state.current.f + 1)
    return changed(state, beacons=(first, second, mixed))


def beacon_share_fits(state: LedgerState, author: str) -> bool:
    """Whether the author's opening carries the beacon secret that its last opening bound."""
    if state.previous is None or author not in committed(state.current):
        return False
    now, before = opening_of(state.current, author), opening_of(state.previous, author)
    if now is None or before is None or len(now.beacon_secret) != 32 or len(now.audit_hash) != 32:
        return False
    if not (fits(state.current, author) and fits(state.previous, author)):
        return False
    return before.share_commit == share_commit(beacon_hash(now.beacon_secret), now.audit_hash)


def _judge_attest(state: LedgerState) -> Step | None:
    current = state.current
    voters = {slot.author for slot in current.of_kind("attest") if not slot.late}
    if current.power(voters) < current.voting.quorum:
        return None
    cheats = equivocators(current)
    accepted = tuple(
        item
        for item in current.opened
        if item.author not in cheats and attested(current, item.author, Status.HELD)
    )
    if len(accepted) < current.m_min:
        return _void(state, _shortage(current, len(accepted), "payloads held"))
    return _fix(state, accepted)


def _fix(state: LedgerState, accepted: tuple[Accepted, ...]) -> Step:
    current, members = state.current, state.members
    names = frozenset(item.author for item in accepted)
    state = _requeued(state, names)
    state = changed(state, members=waiting.after_round(members, names), void_streak=0)
    state, changes = _with_changes(state)
    told = outcomes(current, attested=True, fixed=True)
    proven = sum(outcome.proof == TRANSFERABLE for outcome in told)
    current = changed(
        current,
        accepted=accepted,
        verdict=Verdict.FIXED,
        agreed=ledger_fields(state),
        standing=members,
        f=max(current.f - proven, 0),  # the rule runs with the liars that may still be among them
    )
    event = RoundFixed(RoundNumber(current.number), accepted, told)
    state, more = _go_on(changed(state, current=current), Phase.ROOT)
    return state, [event, *changes, *more]


def _void(state: LedgerState, reason: str, told: bool = True) -> Step:
    """End the current round without effect on the model (12)."""
    current = changed(state.current, verdict=Verdict.VOID, reason=reason)
    attesting = state.phase == Phase.ATTEST
    blamed = outcomes(current, attested=attesting, fixed=False) if told else ()
    state = _requeued(state, frozenset())
    state = changed(state, current=current, void_streak=state.void_streak + 1)
    state, changes = _with_changes(state)
    state, more = _go_on(state, Phase.FINISHED)
    return state, [RoundVoid(RoundNumber(current.number), reason, blamed), *changes, *more]


def _revoke(state: LedgerState, revoked: RoundState) -> Step:
    """Votes made the last fixed round void, and with it the round that started from its root."""
    returned = tuple(
        share for name, share in revoked.shares if name in {a.author for a in revoked.accepted}
    )
    state = changed(
        _put(state, changed(revoked, accepted=(), agreed=None, standing=())),
        members=waiting.restored(state.members, revoked.standing),
        requeue=state.requeue + returned,
        void_streak=state.void_streak + 1,
    )
    event = RoundVoid(RoundNumber(revoked.number), revoked.reason, ())
    if revoked.number == state.current.number:
        return changed(state, phase=Phase.FINISHED), [event, RunFinished()]
    state, more = _void(state, "the round before it was voided by votes", told=False)
    return state, [event, *more]


def _judge_root(state: LedgerState) -> Step | None:
    if state.current.verdict == Verdict.VOID and state.current.accepted:
        return _revoke(state, state.current)
    if state.current.root_due:
        return None
    return changed(state, phase=Phase.FINISHED), [RunFinished()]


def _requeued(state: LedgerState, accepted: frozenset[str]) -> LedgerState:
    """Samples of contributions that did not count are assigned again."""
    returned: tuple[Share, ...] = tuple(
        share for name, share in state.current.shares if name not in accepted
    )
    return changed(state, requeue=state.requeue + returned)


def _with_changes(state: LedgerState) -> Step:
    """Make the changes that passed, and end the epoch if that gives other validators (4)."""
    following = state.current.number + 1
    if following >= state.genesis.rounds:
        return state, []
    roll, refused = membership.planned(state)
    ends = membership.ends_epoch(state.current, roll.members)
    made = tuple(c for c in state.passed if c not in {change for change, _ in refused})
    state = changed(
        state,
        epoch=state.epoch + ends,
        members=roll.members,
        retired=roll.retired,
        passed=(),
        early=() if ends else state.early,  # signed for an epoch that is over
    )
    seats = seats_of(roll.members)
    if seats == state.current.seats and not refused:
        return state, []
    number = RoundNumber(following)
    return state, [MembershipChanged(number, state.epoch, seats, made, refused)]


def _go_on(state: LedgerState, after_last: Phase) -> Step:
    following = state.current.number + 1
    if following < state.genesis.rounds:
        return _open_round(state, following)
    finished: list[Event] = [RunFinished()] if after_last == Phase.FINISHED else []
    return changed(state, phase=after_last), finished


def _open_round(state: LedgerState, number: int) -> Step:
    """Freeze what round ``number`` goes by, in the block that settled the one before (3). In a new
    epoch its validators must be ready first, and their updates in force (4). Round 0 goes by the
    genesis, whose validators the engine has: who is convicted before it opens leaves with it."""
    first_round = number == state.current.number
    waits = state.epoch != state.current.epoch
    state = state if first_round else _shifted(state)
    seats = state.current.seats if first_round else seats_of(state.members)
    limits = membership.bounds_met(state.genesis, sum(seat.contributor for seat in seats))
    ended = state.previous if not first_round else None
    members = waiting.reconsidered(state.members, ended, limits.f)
    state = changed(state, members=members)
    state, shares = _dealt(state, tuple(seat.name for seat in seats if seat.contributor))
    opened = RoundState(
        number,
        state.epoch,
        seats,
        limits.f,
        limits.m_min,
        waiting.waited_for(members, after_void=state.void_streak > 0),
        shares,
        state.current.slots if first_round else _still_seated(state, seats),
        banned=state.current.banned if first_round else (),
    )
    state = changed(
        state,
        phase=Phase.READY if waits else Phase.COMMIT,
        current=opened,
        previous=None if first_round else state.current,
        early=() if not first_round else state.early,
    )
    return state, [] if waits else [RoundOpened(RoundNumber(number))]


def _shifted(state: LedgerState) -> LedgerState:
    """Beacons of the following round; one that never got its shares is the hash of the last."""
    _, second, third = state.beacons
    third = third or mix_beacon(second, (), 1)
    return changed(state, beacons=(second, third, b""))


def _dealt(
    state: LedgerState, names: tuple[str, ...]
) -> tuple[LedgerState, tuple[tuple[str, Share], ...]]:
    genesis = state.genesis
    if not genesis.assigned:
        return state, ()
    dealt = deal(
        names,
        state.cursor,
        state.requeue,
        share_size=genesis.samples_per_slice,
        samples=genesis.samples,
        beacon=state.beacons[0],
        run_id=genesis.run_id,
    )
    return changed(state, cursor=dealt.cursor, requeue=dealt.requeue), dealt.shares


def _still_seated(state: LedgerState, seats: tuple[Seat, ...]) -> tuple[Slot, ...]:
    """Early items of members that have the seat which the item needs, with the key they used; of
    those that say something of each seat, only if the seats are the same."""
    keys = {seat.name: seat.voting for seat in state.current.seats}
    same = [seat for seat in seats if keys.get(seat.name) == seat.voting]
    contributors = {seat.name for seat in same if seat.contributor}
    validators = {seat.name for seat in same if seat.validator}
    others = list(keys) != [seat.name for seat in seats]
    return tuple(
        slot
        for slot in state.early
        if slot.author in (contributors if slot.kind in ("commit", "open") else validators)
        and not (others and slot.kind.startswith(("close-", "attest")))
    )


_JUDGES: dict[Phase, Callable[[LedgerState], Step | None]] = {
    Phase.READY: _judge_ready,
    Phase.COMMIT: _judge_commit,
    Phase.OPEN: _judge_open,
    Phase.ATTEST: _judge_attest,
    Phase.ROOT: _judge_root,
    Phase.FINISHED: lambda _: None,
}
