"""``admissible``: whether a transaction may stand in a block that follows a state (ROUND.md 17).

Decoding, run, round (previous, current or next), member, content, quota, no duplicate, and last the
signatures. Never the window: an item that is early or late is admissible, and the reader decides
what it does. Order within a block does not matter: each reason is symmetric between transactions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torchbft.primitives.errors import DecodeError
from torchbft.primitives.evidence import Evidence, Fault
from torchbft.primitives.keys import SIGNATURE_BYTES, verify
from torchbft.primitives.wire import MAX_ITEM_BYTES, encode
from torchbft.protocols.round.membership import refusal
from torchbft.protocols.round.messages import (
    MEMBER_SLOT,
    SIGN_DOMAIN,
    Attestation,
    Closing,
    Commitment,
    EvidenceTx,
    MembershipVote,
    Opening,
    Parsed,
    Ready,
    RootCertificate,
    RootVote,
    Statement,
    Status,
    VoidVote,
    parse,
    seats_in,
    split_signatures,
)
from torchbft.protocols.round.state import (
    CONVICTABLE,
    QUOTA,
    LedgerState,
    Phase,
    RoundState,
    Seat,
    Slot,
    find_slot,
    seats_of,
)

MAX_CHANGES = 8
"""Changes of the membership that one validator may vote for in a round; more take more rounds."""

UNCONVINCING = "evidence that does not convince"
"""What only a liar signs: who accuses has checked it."""

EvidenceCheck = Callable[[Evidence, bytes], bool]
"""Whether evidence convicts the holder of a public voting key."""


def check_equivocation(evidence: Evidence, public: bytes) -> bool:
    """Whether two transactions of one key fill one slot of one round differently. Total."""
    try:
        first, second = (parse(tx) for tx in evidence.statements)
    except (DecodeError, ValueError):
        return False
    one, two = first.statement, second.statement
    same_slot = first.slot == second.slot and first.slot in CONVICTABLE
    same_place = (one.run_id, one.epoch, one.round) == (two.run_id, two.epoch, two.round)
    return (
        same_slot
        and same_place
        and one.author == two.author == evidence.accused
        and one.round == evidence.round
        and first.body != second.body
        and first.signed_by(public)
        and second.signed_by(public)
    )


EvidenceChecks = Mapping[str, EvidenceCheck]
OWN_CHECKS: EvidenceChecks = {Fault.EQUIVOCATION: check_equivocation}
"""Evidence that this room can check. The composition adds the ledger's double votes."""


def seats_for(state: LedgerState, number: int) -> tuple[Seat, ...] | None:
    """Seats of the previous, current or next round; None for any other. The next round's are
    today's members: frozen only when it opens."""
    known = state.round_of(number)
    if known is not None:
        return known.seats
    return seats_of(state.members) if number == state.current.number + 1 else None


def slots_for(state: LedgerState, number: int) -> tuple[Slot, ...]:
    known = state.round_of(number)
    return state.early if known is None else known.slots


def admissible(tx: bytes, state: LedgerState, checks: EvidenceChecks = OWN_CHECKS) -> str | None:
    """None, or why a block after ``state`` must not hold this transaction. Pure and total."""
    if len(tx) > MAX_ITEM_BYTES:
        return f"an item of {len(tx)} bytes, more than {MAX_ITEM_BYTES}"
    try:
        parsed = parse(tx)
    except DecodeError as error:
        return error.what
    statement = parsed.statement
    seats = seats_for(state, statement.round)
    reason = _misplaced(statement, state, seats)
    if reason or seats is None:
        return reason
    author = next((seat for seat in seats if seat.name == statement.author), None)
    if author is None:
        return f"{statement.author} is no member in round {statement.round}"
    return (
        _unentitled(statement, author)
        or _ignored(statement, state)
        or _content(statement, seats, state)
        or _repeated(parsed, state)
        or _unsigned(parsed, author, state, checks)
    )


def crowded(tx: bytes, state: LedgerState) -> str | None:
    """Why a transaction that was admissible before a block must not stand beside those of the
    block that ``state`` has recorded since: nothing else of ``admissible`` depends on these."""
    return _repeated(parse(tx), state)


def _misplaced(
    statement: Statement, state: LedgerState, seats: tuple[Seat, ...] | None
) -> str | None:
    if statement.run_id != state.genesis.run_id:
        return "of another run"
    if state.phase == Phase.FINISHED:
        return "the run is over"
    if seats is None or statement.round >= state.genesis.rounds:
        return f"round {statement.round} is neither previous, current nor next"
    known = state.round_of(statement.round)
    epoch = known.epoch if known else state.epoch
    return None if statement.epoch == epoch else f"of epoch {statement.epoch}, not {epoch}"


def _unentitled(statement: Statement, author: Seat) -> str | None:
    if isinstance(statement, RootVote):
        return "a root vote is no transaction"
    if isinstance(statement, Commitment | Opening):
        return None if author.contributor else f"{author.name} is no contributor"
    if isinstance(statement, EvidenceTx):
        return None
    return None if author.validator else f"{author.name} is no validator"


def _ignored(statement: Statement, state: LedgerState) -> str | None:
    """A convict is ignored at once, but for what only moves a round on by the set frozen at its
    opening: the quorum of that set was fixed with the convict in it (4)."""
    if isinstance(statement, Closing | Attestation | RootCertificate):
        return None
    known = state.member(statement.author)
    convicted = known is not None and known.convicted
    return f"{statement.author} is convicted" if convicted else None


def _content(statement: Statement, seats: tuple[Seat, ...], state: LedgerState) -> str | None:
    """Checks that need no signature."""
    if isinstance(statement, Ready):
        waiting = state.phase == Phase.READY and statement.round == state.current.number
        return None if waiting else "the round has opened"
    if isinstance(statement, Attestation):
        fitting = len(statement.statuses) == len(seats) and set(statement.statuses) <= Status.ALL
        return None if fitting else f"not a status for each of {len(seats)} seats"
    if isinstance(statement, Closing):
        fitting = seats_in(statement.authors, len(seats)) is not None
        return None if fitting else f"not a map of {len(seats)} seats"
    if isinstance(statement, RootCertificate | VoidVote):
        due = state.unsigned
        if due is None or due.number != statement.round:
            return f"round {statement.round} is not waiting for its root"
        return _short(statement, due) if isinstance(statement, RootCertificate) else None
    if isinstance(statement, Commitment):
        return _secret_size(statement.audit_secret)
    if isinstance(statement, Opening):
        return _secret_size(statement.beacon_secret) or _secret_size(statement.audit_hash)
    return None


def _secret_size(secret: bytes) -> str | None:
    return None if len(secret) in (0, 32) else "a secret is 32 bytes or none"


def signers_of(certificate: RootCertificate, current: RoundState) -> tuple[Seat, ...]:
    """The seats whose signatures a certificate claims to hold; empty if the map is no map."""
    return tuple(
        current.seats[index] for index in seats_in(certificate.signers, len(current.seats)) or ()
    )


def _short(certificate: RootCertificate, current: RoundState) -> str | None:
    signers = signers_of(certificate, current)
    if len(certificate.signatures) != SIGNATURE_BYTES * len(signers):
        return "not one signature for each signer"
    if current.power({seat.name for seat in signers}) < current.voting.quorum:
        return "root signatures of less than a quorum"
    return None


def _repeated(parsed: Parsed, state: LedgerState) -> str | None:
    statement = parsed.statement
    slot = find_slot(slots_for(state, statement.round), parsed.slot, statement.author)
    if slot is None:
        return _too_many(parsed, state)
    if any(parse(tx).body == parsed.body for tx in slot.txs):
        return "already on the ledger"
    return "two different statements are on the ledger" if len(slot.txs) >= QUOTA else None


def _too_many(parsed: Parsed, state: LedgerState) -> str | None:
    if not isinstance(parsed.statement, MembershipVote):
        return None
    statement = parsed.statement
    said = sum(
        slot.kind.startswith(MEMBER_SLOT) and slot.author == statement.author
        for slot in slots_for(state, statement.round)
    )
    return f"more than {MAX_CHANGES} changes voted for" if said >= MAX_CHANGES else None


def _unsigned(
    parsed: Parsed,
    author: Seat,
    state: LedgerState,
    checks: EvidenceChecks,
) -> str | None:
    if not parsed.signed_by(author.voting):
        return f"not signed by {author.name}"
    statement = parsed.statement
    if isinstance(statement, RootCertificate):
        return _badly_certified(statement, state.round_of(statement.round))
    if isinstance(statement, EvidenceTx):
        return unconvincing(statement.evidence, state, checks)
    if isinstance(statement, MembershipVote):
        return refusal(state, statement.change)
    return None


def root_vote_body(certificate: RootCertificate | RootVote, signer: str) -> bytes:
    """The bytes that ``signer`` signs to vote for this root."""
    return encode(
        RootVote(
            certificate.version,
            certificate.run_id,
            certificate.epoch,
            certificate.round,
            signer,
            certificate.root,
        )
    )


def _badly_certified(certificate: RootCertificate, current: RoundState | None) -> str | None:
    if current is None:
        return "a root of no known round"
    signatures = split_signatures(certificate.signatures)
    for seat, signature in zip(signers_of(certificate, current), signatures, strict=True):
        body = root_vote_body(certificate, seat.name)
        if not verify(seat.voting, SIGN_DOMAIN, body, signature):
            return f"a root signature that is not {seat.name}'s"
    return None


def unconvincing(evidence: Evidence, state: LedgerState, checks: EvidenceChecks) -> str | None:
    """Why evidence convicts nobody, or nobody anew; None if it does."""
    check = checks.get(evidence.fault)
    accused = state.member(evidence.accused)
    if check is None or accused is None:
        return "evidence of a kind, or against a member, that is not known"
    if accused.convicted:
        return f"{accused.name} is convicted already"
    keys = [
        public
        for public, first, last in state.keys_of(accused.name)
        if evidence.fault != Fault.EQUIVOCATION or _held(evidence.round, first, last)
    ]
    convinces = any(check(evidence, public) for public in keys)
    return None if convinces else UNCONVINCING


def _held(number: int, first: int, last: int | None) -> bool:
    return first <= number and (last is None or number <= last)
