"""What a validator knows at one height, and the tip of its chain. No decisions here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchbft.primitives.abci import FinalizeResult
from torchbft.primitives.digests import DIGEST_BYTES
from torchbft.primitives.errors import MisuseError, PreconditionError
from torchbft.primitives.evidence import Evidence
from torchbft.primitives.ids import Height, PeerId, View
from torchbft.primitives.wire import WIRE_VERSION
from torchbft.protocols.ledger.certificates import ValidatorSet, check_block
from torchbft.protocols.ledger.messages import (
    MAX_BLOCK_BYTES,
    NO_DIGEST,
    Block,
    Certificate,
    Kind,
    TimeoutCertificate,
    Vote,
)
from torchbft.protocols.ledger.safety import Signed

VIEWS_BEHIND = 2
"""Views before the current one whose votes still count: late finalize votes end a height."""

VIEWS_AHEAD = 8
"""Views after the current one whose votes are kept: a validator further behind gets a
certificate with the next repetition."""

MAX_BODIES = 64
"""Blocks kept per height, one a view; with doubling time-outs view 64 takes an hour."""

MAX_VIEW_DOUBLINGS = 5
"""A view lasts at most 32 times the first: long enough for any link that can carry a block."""


@dataclass(frozen=True, slots=True)
class LedgerConfig:
    """Settings of one validator. Seconds; ``view_timeout`` must exceed ``proposal_wait`` by three
    message delays, or healthy leaders are replaced."""

    run_id: bytes
    me: PeerId
    proposal_wait: float = 0.5
    view_timeout: float = 2.0
    resend: float = 0.5
    """Interval at which the messages of an unfinished height are sent again."""
    max_block_bytes: int = MAX_BLOCK_BYTES
    names: Mapping[bytes, PeerId] = field(default_factory=dict)
    """Names of voting keys that the application adds later; it is looked into when it does."""

    def __post_init__(self) -> None:
        if not 0 <= self.proposal_wait < self.view_timeout or self.resend <= 0:
            raise PreconditionError(
                f"needs 0 ≤ proposal_wait < view_timeout and resend > 0, not "
                f"{self.proposal_wait}, {self.view_timeout}, {self.resend}"
            )
        if not 0 < self.max_block_bytes <= MAX_BLOCK_BYTES:
            raise PreconditionError(f"max_block_bytes must be in 1..{MAX_BLOCK_BYTES}")

    def view_seconds(self, view: View) -> float:
        """How long a view may last: doubles each view, bounded."""
        return float(self.view_timeout * 2 ** min(view, MAX_VIEW_DOUBLINGS))


@dataclass(frozen=True, slots=True)
class Finalized:
    """Apply effect: the application has taken this block in. ``view`` is this peer's; others may
    hold a certificate of another one. Seconds from the first sign of work at this height."""

    height: Height
    view: View
    block: Block
    result: FinalizeResult
    seconds_pending: float


@dataclass(frozen=True, slots=True)
class Accuse:
    """Apply effect: evidence that ``check_double_vote`` accepts, once per author."""

    evidence: Evidence


@dataclass(frozen=True, slots=True)
class Suspect:
    """Apply effect: a peer sent what no honest one sends, but which proves nothing to others."""

    peer: PeerId
    fault: str
    reason: str


@dataclass(frozen=True, slots=True)
class Tip:
    """The last finalized block (height 0: none) and the hash of the application after it."""

    height: Height
    digest: bytes
    app_hash: bytes

    @property
    def next_height(self) -> Height:
        return Height(self.height + 1)

    def __post_init__(self) -> None:
        if len(self.app_hash) != DIGEST_BYTES:
            raise MisuseError(f"an application hash has {DIGEST_BYTES} bytes")

    def block(self, run_id: bytes, proposer: PeerId, txs: Sequence[bytes]) -> Block:
        """A block on this tip."""
        return Block(
            WIRE_VERSION,
            run_id,
            self.next_height,
            self.digest,
            self.app_hash,
            proposer,
            tuple(txs),
        )

    def refuses(self, block: Block, run_id: bytes) -> str | None:
        """Why a block does not follow this tip; None if it does."""
        wrong = check_block(block, run_id, self.next_height)
        if wrong:
            return wrong
        if block.previous != self.digest:
            return "does not follow the last block"
        return None if block.app_hash == self.app_hash else "carries another application hash"


GENESIS_DIGEST = NO_DIGEST
"""``previous`` of the block of height 1."""


@dataclass(slots=True)
class HeightState:
    """Everything about the height that is being decided."""

    height: Height
    validators: ValidatorSet
    signed: Signed = field(default_factory=Signed)
    view: View = View(0)  # noqa: RUF009 - an int
    entered: TimeoutCertificate | None = None
    """The time-outs by which ``view`` was entered."""

    votes: dict[tuple[Kind, View], dict[PeerId, Vote]] = field(default_factory=dict)
    """First vote of each author in each slot. Surplus votes for a certified block are unchecked."""
    certified: dict[tuple[Kind, View], Certificate] = field(default_factory=dict)
    timeouts: dict[PeerId, View] = field(default_factory=dict)
    """Highest view that each author timed out of."""
    bodies: dict[bytes, Block] = field(default_factory=dict)
    mine: dict[tuple[Kind, View], bytes] = field(default_factory=dict)
    """Encoded messages of this validator, to be sent again as the same bytes."""
    heard: set[PeerId] = field(default_factory=set)
    wanted: bytes | None = None
    """Digest of a certified block that this validator lacks."""
    final: Certificate | None = None
    """A finalize certificate whose block is still wanted."""

    active_since: float | None = None
    """When work at this height was first seen: the view timer runs from then on."""
    pending_since: float | None = None
    view_ends: float | None = None
    propose_at: float | None = None

    def in_window(self, view: View) -> bool:
        """Whether votes of this view are kept."""
        return self.view - VIEWS_BEHIND <= view <= max(self.view, self.signed.closed) + VIEWS_AHEAD

    def make_room(self, vote: Vote) -> bool:
        """Whether a vote is to be kept. Of each author one time-out beyond the window is kept, so
        that a validator far behind sees that the others left."""
        if self.in_window(vote.view):
            return True
        if vote.kind is not Kind.TIME_OUT or vote.view < self.view:
            return False
        for (kind, view), votes in self.votes.items():
            if kind is Kind.TIME_OUT and not self.in_window(view):
                votes.pop(PeerId(vote.author), None)
        return True

    def slot(self, kind: Kind, view: View) -> dict[PeerId, Vote]:
        """First votes by author in this slot."""
        return self.votes.setdefault((kind, view), {})

    def power_for(self, kind: Kind, view: View, digest: bytes) -> int:
        """Power of the votes for one block in one slot."""
        votes = self.slot(kind, view).values()
        return self.validators.power_of(v.author for v in votes if v.digest == digest)

    def keep_body(self, digest: bytes, block: Block) -> None:
        """Keep a block; the oldest goes when there are too many, never the certified one."""
        self.bodies[digest] = block
        if len(self.bodies) > MAX_BODIES:
            high = self.signed.high
            bound = {digest, high.digest if high else digest}
            del self.bodies[next(d for d in self.bodies if d not in bound)]

    def enter(self, view: View, entered: TimeoutCertificate | None) -> None:
        """Move to a later view and forget the votes of views that no longer count."""
        self.view, self.entered = view, entered
        floor = view - VIEWS_BEHIND
        self.votes = {slot: votes for slot, votes in self.votes.items() if slot[1] >= floor}
        self.certified = {slot: c for slot, c in self.certified.items() if slot[1] >= floor}

    def repeatable(self) -> list[bytes]:
        """Own messages that others may still need: of the current view and of a later time-out,
        and the last finalize vote."""
        last = max((v for kind, v in self.mine if kind is Kind.FINALIZE), default=-1)
        return [
            message
            for (kind, view), message in sorted(self.mine.items())
            if view >= self.view or (kind is Kind.FINALIZE and view == last)
        ]
