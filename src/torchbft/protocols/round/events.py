"""What a finalized block changed, as the reader tells it (``FinalizeResult.events``)."""

from __future__ import annotations

from dataclasses import dataclass

from torchbft.primitives.evidence import Evidence, Outcome
from torchbft.primitives.ids import PeerId, Round
from torchbft.protocols.round.changes import Change
from torchbft.protocols.round.state import Accepted, Seat


@dataclass(frozen=True, slots=True)
class MemberOutcome:
    """How a member's contribution ended, and what proves it."""

    peer: PeerId
    outcome: Outcome
    reason: str
    """A reason code: one word, or words joined by hyphens."""
    proof: str
    """``transferable``, ``f+1 signed observations``, or empty: an omission leaves none."""
    evidence: Evidence | None = None


@dataclass(frozen=True, slots=True)
class RoundOpened:
    round: Round


@dataclass(frozen=True, slots=True)
class CommitmentsClosed:
    """Peers may open from now on; ``authors`` are those whose commitments count."""

    round: Round
    authors: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class OpeningsClosed:
    """These payloads are to be attested."""

    round: Round
    opened: tuple[Accepted, ...]


@dataclass(frozen=True, slots=True)
class RoundFixed:
    round: Round
    accepted: tuple[Accepted, ...]
    outcomes: tuple[MemberOutcome, ...]


@dataclass(frozen=True, slots=True)
class RoundVoid:
    """The model is unchanged. ``outcomes`` names only those who did not do their part."""

    round: Round
    reason: str
    outcomes: tuple[MemberOutcome, ...]


@dataclass(frozen=True, slots=True)
class RootSigned:
    round: Round
    root: bytes


@dataclass(frozen=True, slots=True)
class Convicted:
    """Two signatures for one slot, on the ledger: banned from the next opening on."""

    peer: PeerId
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class ChangePassed:
    """A quorum voted for a change of the membership: it is made when the round is settled."""

    round: Round
    change: Change


@dataclass(frozen=True, slots=True)
class MembershipChanged:
    """The next round has other ``seats``, by votes or by convictions. Of the changes that passed,
    ``refused`` could not be made, each with the reason. In a new ``epoch`` the validators are
    others, too: in force two heights after this block's."""

    round: Round
    epoch: int
    seats: tuple[Seat, ...]
    made: tuple[Change, ...]
    refused: tuple[tuple[Change, str], ...]


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The last round is settled: its root is signed, or it is void."""


Event = (
    RoundOpened
    | CommitmentsClosed
    | OpeningsClosed
    | RoundFixed
    | RoundVoid
    | RootSigned
    | Convicted
    | ChangePassed
    | MembershipChanged
    | RunFinished
)
