"""How each contribution of a round ended, and what proves it. Pure functions of the ledger."""

from __future__ import annotations

from torchbft.primitives.errors import DecodeError
from torchbft.primitives.evidence import Evidence, Fault, Outcome
from torchbft.primitives.ids import PeerId
from torchbft.protocols.round.events import MemberOutcome
from torchbft.protocols.round.messages import (
    Attestation,
    Commitment,
    Opening,
    Status,
    commitment_digest,
    parse,
)
from torchbft.protocols.round.state import (
    CONVICTABLE,
    RoundState,
    Seat,
    attestation_of,
    fits,
    remembered,
)

TRANSFERABLE = "transferable"
OBSERVATIONS = "f+1 signed observations"
NO_PROOF = ""

_TWO = {"commit": "two-commitments", "open": "two-openings", "attest": "two-attestations"}


def equivocation(current: RoundState, author: str) -> Evidence | None:
    """Two different statements of the author in one slot of this round, if there are."""
    for kind in CONVICTABLE:
        slot = current.slot(kind, author)
        if slot is not None and len(slot.txs) > 1:
            return Evidence(Fault.EQUIVOCATION, author, current.number, slot.txs[:2])
    return None


def tally(current: RoundState, author: str, status: int) -> tuple[bytes, ...]:
    """The attestations on the ledger that give this status to the author's opening."""
    at = [seat.name for seat in current.seats].index(author)
    wanted = bytes([status])
    return tuple(tx for tx, statuses in _attestations(current) if statuses[at : at + 1] == wanted)


@remembered
def _attestations(current: RoundState) -> tuple[tuple[bytes, bytes], ...]:
    """Transaction and statuses of each validator's attestation that came in time."""
    found = []
    for seat in current.validators:
        attestation = attestation_of(current, seat.name)
        slot = current.slot("attest", seat.name)
        if attestation is not None and slot is not None:
            found.append((slot.txs[0], attestation.statuses))
    return tuple(found)


def attested(current: RoundState, author: str, status: int) -> bool:
    """Whether validators of more than f_W power attest this status."""
    names = {parse(tx).statement.author for tx in tally(current, author, status)}
    return current.power(names) > current.voting.f


def holders(current: RoundState, author: str) -> tuple[PeerId, ...]:
    """Validators that attest to hold the author's payload, and the author."""
    names = {parse(tx).statement.author for tx in tally(current, author, Status.HELD)}
    return tuple(PeerId(name) for name in sorted(names | {author}))


def _commit_outcome(current: RoundState, name: str) -> MemberOutcome | None:
    peer = PeerId(name)
    evidence = equivocation(current, name)
    if evidence is not None:
        reason = _TWO[parse(evidence.statements[0]).slot]
        return MemberOutcome(peer, Outcome.EQUIVOCATED, reason, TRANSFERABLE, evidence)
    slot = current.slot("commit", name)
    if slot is None:
        return MemberOutcome(peer, Outcome.ABSENT, "no-commitment", NO_PROOF)
    if slot.late:
        return MemberOutcome(peer, Outcome.LATE, "late-commitment", NO_PROOF)
    return None


def _open_outcome(current: RoundState, name: str) -> MemberOutcome | None:
    peer = PeerId(name)
    commit, opening = current.slot("commit", name), current.slot("open", name)
    if opening is None:
        return MemberOutcome(peer, Outcome.UNOPENED, "no-opening", NO_PROOF)
    if opening.late:
        return MemberOutcome(peer, Outcome.LATE, "late-opening", NO_PROOF)
    if commit is not None and not fits(current, name):
        statements = (commit.txs[0], opening.txs[0])
        evidence = Evidence(Fault.BAD_OPENING, name, current.number, statements)
        return MemberOutcome(peer, Outcome.MALFORMED, "bad-opening", TRANSFERABLE, evidence)
    return None


def _payload_outcome(current: RoundState, name: str) -> MemberOutcome | None:
    peer = PeerId(name)
    if attested(current, name, Status.HELD):
        return None
    if attested(current, name, Status.MALFORMED):
        statements = tally(current, name, Status.MALFORMED)
        evidence = Evidence(Fault.MALFORMED_PAYLOAD, name, current.number, statements)
        return MemberOutcome(peer, Outcome.MALFORMED, "payload", OBSERVATIONS, evidence)
    return MemberOutcome(peer, Outcome.MISSING, "payload-not-held", NO_PROOF)


def _outcome(current: RoundState, seat: Seat, closed: bool) -> MemberOutcome | None:
    fault = _commit_outcome(current, seat.name)
    if fault is None and current.reached_open:
        fault = _open_outcome(current, seat.name)
    if fault is None and closed:
        fault = _payload_outcome(current, seat.name)
    return fault


def outcomes(current: RoundState, *, attested: bool, fixed: bool) -> tuple[MemberOutcome, ...]:
    """One outcome per contributor of a fixed round; in a void one, of those at fault only.

    ``attested``: whether the round got so far that attestations decide.
    """
    found = []
    for seat in current.contributors:
        fault = _outcome(current, seat, attested)
        if fault is not None:
            found.append(fault)
        elif fixed:
            found.append(MemberOutcome(PeerId(seat.name), Outcome.ACCEPTED, "", NO_PROOF))
    return tuple(found)


def check_bad_opening(evidence: Evidence, public: bytes) -> bool:
    """Whether a signed opening contradicts the signed commitment of the same key. Total."""
    try:
        commit, opening = (parse(tx) for tx in evidence.statements)
    except (DecodeError, ValueError):
        return False
    one, two = commit.statement, opening.statement
    return (
        isinstance(one, Commitment)
        and isinstance(two, Opening)
        and (one.run_id, one.epoch, one.round) == (two.run_id, two.epoch, two.round)
        and one.author == two.author == evidence.accused
        and one.round == evidence.round
        and one.digest != commitment_digest(two)
        and commit.signed_by(public)
        and opening.signed_by(public)
    )


def check_malformed(evidence: Evidence, seats: tuple[Seat, ...], f_power: int) -> bool:
    """Whether validators of more than ``f_power`` signed that the payload is malformed. Total."""
    names = [seat.name for seat in seats]
    if evidence.accused not in names:
        return False
    at = names.index(evidence.accused)
    voters: dict[str, int] = {}
    for tx in evidence.statements:
        try:
            parsed = parse(tx)
        except DecodeError:
            return False
        said = parsed.statement
        seat = next((s for s in seats if s.name == said.author and s.validator), None)
        if not isinstance(said, Attestation) or seat is None or said.round != evidence.round:
            return False
        if len(said.statuses) != len(seats) or said.statuses[at] != Status.MALFORMED:
            return False
        if not parsed.signed_by(seat.voting):
            return False
        voters[seat.name] = seat.power
    return sum(voters.values()) > f_power
