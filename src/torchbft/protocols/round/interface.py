"""What the round's machine is told, and what it asks for beside ``Persist`` and ``Broadcast``."""

from __future__ import annotations

from dataclasses import dataclass

from torchbft.primitives.effects import Received, Tick
from torchbft.primitives.evidence import Evidence, Fault
from torchbft.primitives.ids import Height, PeerId, Round
from torchbft.primitives.keys import SigningKey
from torchbft.protocols.round.assignment import Share
from torchbft.protocols.round.changes import Change
from torchbft.protocols.round.events import Event
from torchbft.protocols.round.state import Accepted, LedgerFields

GENESIS_ROUND = Round(-1)
"""The 'round' whose outcome is the run's start state."""


# --- inputs -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LedgerAdvanced:
    """The application committed a block; its events in order."""

    height: Height
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Trained:
    """This peer's payload for a round is stored durably."""

    round: Round
    payload_length: int
    payload_root: bytes
    trace_root: bytes


@dataclass(frozen=True, slots=True)
class PayloadStored:
    """A payload of this root is stored durably and passed the content checks."""

    round: Round
    author: PeerId
    payload_root: bytes


@dataclass(frozen=True, slots=True)
class PayloadRefused:
    """A payload of this root is here, and malformed: the reason is a short code."""

    round: Round
    author: PeerId
    payload_root: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class StateAdvanced:
    """The agreed state on this peer is now the one after ``round`` (``GENESIS_ROUND``: the start
    state), with this root, stored durably. Tell it before or right after ``start``, too."""

    round: Round
    root: bytes


@dataclass(frozen=True, slots=True)
class Found:
    """Evidence from outside the round's own statements (a double vote), to go on the ledger."""

    evidence: Evidence


@dataclass(frozen=True, slots=True)
class Heard:
    """A transaction came over the control channel."""

    tx: bytes


@dataclass(frozen=True, slots=True)
class PreferVoid:
    """This validator's operator would rather void a fixed round than wait for its root."""

    round: Round
    reason: str


@dataclass(frozen=True, slots=True)
class Want:
    """This peer's operator is for these changes of the membership, and no longer for others."""

    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class KeyAdded:
    """This peer has a further voting key, to be used once the ledger's members list it."""

    key: SigningKey


Input = (
    LedgerAdvanced
    | Trained
    | PayloadStored
    | PayloadRefused
    | StateAdvanced
    | Found
    | Heard
    | Received
    | PreferVoid
    | Want
    | KeyAdded
    | Tick
)


# --- apply effects ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """Send this transaction to all validators, this peer's own engine included. The machine asks
    again until it is final or too late; already known is no error."""

    tx: bytes


@dataclass(frozen=True, slots=True)
class StartTraining:
    """Train on these samples from the agreed state of this root; answer with ``Trained``."""

    round: Round
    assignment: Share
    from_root: bytes


@dataclass(frozen=True, slots=True)
class OfferPayload:
    """Push this peer's own payload to all members on the data plane."""

    round: Round
    payload_root: bytes
    length: int
    to: tuple[PeerId, ...] = ()
    """Only to these; empty: to all. An honest peer's machine leaves it empty."""


@dataclass(frozen=True, slots=True)
class FetchPayload:
    """Get a payload from any of ``holders``; a later one for the same root replaces its holders.
    Answer with ``PayloadStored`` or ``PayloadRefused``."""

    round: Round
    author: PeerId
    payload_root: bytes
    length: int
    holders: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Advance:
    """Aggregate these payloads, all of them stored, and take the outer step."""

    round: Round
    accepted: tuple[Accepted, ...]
    ledger: LedgerFields
    from_root: bytes


@dataclass(frozen=True, slots=True)
class DropRound:
    """The round is void: the own contribution goes back into the residual. If its outcome was
    applied already, restore the state before it and tell ``StateAdvanced``."""

    round: Round
    reason: str


@dataclass(frozen=True, slots=True)
class CatchUp:
    """This peer is behind: get the agreed state of this root, then tell ``StateAdvanced``."""

    round: Round
    root: bytes
    holders: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Diverged:
    """This peer's root differs from the signed one: resynchronise as in ``CatchUp``."""

    round: Round
    own_root: bytes
    signed_root: bytes
    holders: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class RootAgreed:
    """A quorum signed this root. ``on_ledger`` tells whether its certificate is final."""

    round: Round
    root: bytes
    on_ledger: bool


@dataclass(frozen=True, slots=True)
class Halt:
    """The run cannot go on safely; the reason says who did what."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The last round is settled, and this peer holds the last agreed state."""

    rounds: int


@dataclass(frozen=True, slots=True)
class Accuse:
    """A peer did something wrong: ``named`` with evidence, suspected without."""

    peer: PeerId
    round: Round
    fault: Fault
    named: bool
    reason: str
    evidence: Evidence | None = None


@dataclass(frozen=True, slots=True)
class ChangeTold:
    """A wanted change is in force; or it cannot be voted for now, and why."""

    change: Change
    in_force: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing happened for a while: whom this phase waits for, and the time at which it no longer
    does (None: it needs them)."""

    round: Round
    phase: str
    for_whom: tuple[PeerId, ...]
    until: float | None
