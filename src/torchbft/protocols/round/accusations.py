"""What this peer says of others: accusations from the ledger's outcomes, and who signed what."""

from __future__ import annotations

from torchbft.primitives.effects import Effect
from torchbft.primitives.evidence import NAMES, Fault, Outcome
from torchbft.primitives.faults import FaultModel
from torchbft.primitives.ids import Round as RoundNumber
from torchbft.protocols.round.events import Convicted, MemberOutcome, RoundFixed, RoundVoid
from torchbft.protocols.round.interface import Accuse
from torchbft.protocols.round.reader import closings_that_count
from torchbft.protocols.round.roots import RootVotes
from torchbft.protocols.round.state import LedgerState, RoundState, Verdict

_FAULT_OF = {
    Outcome.ABSENT: Fault.ABSENT,
    Outcome.LATE: Fault.LATE,
    Outcome.UNOPENED: Fault.UNOPENED,
    Outcome.MISSING: Fault.WITHHELD,
    Outcome.MALFORMED: Fault.MALFORMED_PAYLOAD,
}
"""Equivocation is left out: its conviction is an event of its own."""


def accusations(event: RoundFixed | RoundVoid) -> list[Effect]:
    """Named with evidence, suspected without."""
    found = [_accusation(event.round, outcome) for outcome in event.outcomes]
    return [accusation for accusation in found if accusation is not None]


def _accusation(number: RoundNumber, outcome: MemberOutcome) -> Accuse | None:
    fault = _FAULT_OF.get(outcome.outcome)
    if fault is None:
        return None
    if outcome.reason == "bad-opening":
        fault = Fault.BAD_OPENING
    named = fault in NAMES
    return Accuse(outcome.peer, number, fault, named, outcome.reason, outcome.evidence)


def conviction(event: Convicted) -> Accuse:
    evidence = event.evidence
    fault, number = Fault(evidence.fault), RoundNumber(evidence.round)
    return Accuse(event.peer, number, fault, True, "signed twice", evidence)


def too_many_convicts(state: LedgerState) -> str | None:
    """One line for people, if more members of a round are convicted than it bears: then neither
    its blocks nor its set can be relied on, though the next epoch would go on without them."""
    convicted = {member.name for member in state.members if member.convicted}
    for known in (state.previous, state.current):
        if known is None:
            continue
        found = {seat.name for seat in known.seats} & convicted
        giving = found & {seat.name for seat in known.contributors}
        f = known.f
        if known.verdict == Verdict.FIXED:  # lowered by those who were proven to lie in it
            f = FaultModel(len(known.contributors)).f
        if known.power(found) > known.voting.f or len(giving) > f:
            return (
                f"{', '.join(sorted(found))} of {len(known.seats)} members in round "
                f"{known.number} are convicted: more than f = {f}; what was agreed since they "
                "began to lie may be wrong"
            )
    return None


def lying_closings(current: RoundState, slot: str) -> int:
    """Power of the closings on the ledger that list an item which is not there (yet)."""
    if slot == "attest":
        return 0
    said = {found.author for found in current.of_kind(slot)}
    return current.power(said - closings_that_count(current, slot.removeprefix("close-")))


def who_is_silent(current: RoundState, slot: str) -> str:
    """One line for people: why a window does not close, or a set is not fixed."""
    window = slot.removeprefix("close-")
    said = {found.author for found in current.of_kind(slot)}
    counting = said if slot == "attest" else closings_that_count(current, window)
    silent = [seat.name for seat in current.validators if seat.name not in said]
    empty = sorted(said - counting)
    parts = [f"nothing by {', '.join(silent)}"] if silent else []
    if empty:
        parts.append(f"what {', '.join(empty)} list is not on the ledger")
    noun = "attestations" if slot == "attest" else f"closings of the {window} window"
    return f"no quorum of {noun} in round {current.number}: {'; '.join(parts)}"


def who_signed(votes: RootVotes) -> str:
    """One line for people: every root, who signed it, and who signed none."""
    said = [f"{root.hex()[:12]} by {', '.join(names)}" for root, names in votes.by_root().items()]
    silent = votes.missing()
    if silent:
        said.append(f"nothing by {', '.join(silent)}")
    return f"no quorum of equal roots in round {votes.round.number}: {'; '.join(said)}"
