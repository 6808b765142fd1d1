"""Bytes that convince a third party offline, and the words for what a peer did.

*Named* needs evidence, *suspected* an omission or statistics; rules accuse nobody (DESIGN §5).
"""

from __future__ import annotations

from enum import StrEnum

from torchbft.primitives.wire import Name, Wire


class Outcome(StrEnum):
    """How a contribution ended, per member and round."""

    ACCEPTED = "accepted"
    LATE = "late"
    ABSENT = "absent"
    MALFORMED = "malformed"
    UNOPENED = "unopened"
    EQUIVOCATED = "equivocated"
    REJECTED_BY_RULE = "rejected-by-rule"
    MISSING = "missing"
    """Opened, but too few validators hold its payload."""


class Fault(StrEnum):
    """What evidence proves. Two signatures for one slot convict; the rest names or suspects."""

    EQUIVOCATION = "equivocation"  # two different statements of one kind in one round
    DOUBLE_VOTE = "double-vote"  # two different ledger votes in one slot
    BAD_OPENING = "bad-opening"  # a signed opening that does not fit the signed commitment
    MALFORMED_PAYLOAD = "malformed-payload"  # f+1 attest that it does not decode
    BAD_SIGNATURE = "bad-signature"  # an authenticated sender relayed a false signature
    UNOPENED = "unopened"  # committed, did not open
    WITHHELD = "withheld"  # opened, payload not delivered
    LATE = "late"
    ABSENT = "absent"
    OVERSIZED = "oversized"
    NORM_OUTLIER = "norm-outlier"


CONVICTS = frozenset({Fault.EQUIVOCATION, Fault.DOUBLE_VOTE})
NAMES = CONVICTS | {Fault.BAD_OPENING, Fault.MALFORMED_PAYLOAD, Fault.OVERSIZED}
"""Faults that put a peer among the *named*; all others only make it *suspected*."""

MAX_EVIDENCE_BYTES = 16 * 1024
"""Two statements of 4 KiB and their context."""


class Evidence(Wire, frozen=True):
    """Signed bytes against one member. The room that made it checks it (``check_evidence``)."""

    fault: str
    accused: Name
    round: int
    statements: tuple[bytes, ...]
