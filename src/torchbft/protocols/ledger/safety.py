"""Everything that two honest validators' agreement rests on; nothing here knows time or leaders.

*Claim*: no two blocks of one height get finalize certificates. Let view v be the first with a
finalize certificate, for block d. A quorum signed FINALIZE in v, so more than f honest ones held a
prepare certificate of (v, d) and had not timed out of v. (i) In v itself two prepare certificates
share an honest signer, and it prepares once. (ii) For w > v, a proposal in w needs time-outs of a
quorum for w−1 ≥ v; one of them is of an honest validator that signed FINALIZE in v *before* (rule
3), so it carries a prepare certificate of a view ≥ v (rule 4); by induction over w that certificate
is for d, and rule 2 makes every honest validator refuse another block.

Each rule looks only at what was signed before, which is durable before it is sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchbft.primitives.ids import View
from torchbft.protocols.ledger.messages import Certificate, Kind, TimeoutCertificate, Vote


@dataclass(slots=True)
class Signed:
    """What this validator has signed at one height, and the certificate that binds it."""

    votes: dict[tuple[Kind, View], Vote] = field(default_factory=dict)
    high: Certificate | None = None
    closed: int = 0
    """Views below this number are timed out of: nothing is signed in them any more."""

    def record(self, vote: Vote) -> None:
        """Remember a vote that is about to be made durable, or was before a restart."""
        self.votes[vote.slot] = vote
        if vote.kind is Kind.TIME_OUT:
            self.closed = max(self.closed, vote.view + 1)

    def learn(self, certificate: Certificate) -> None:
        """Keep the prepare certificate of the highest view."""
        if self.high is None or certificate.view > self.high.view:
            self.high = certificate

    @property
    def high_mark(self) -> View:
        """What a time-out must say: 1 + view of the highest prepare certificate, or 0."""
        return View(0) if self.high is None else View(self.high.view + 1)


def _open(signed: Signed, kind: Kind, view: View) -> bool:
    return view >= signed.closed and (kind, view) not in signed.votes


def may_propose(signed: Signed, view: View) -> bool:
    """Rule 1a: one proposal per view."""
    return _open(signed, Kind.PROPOSE, view)


def may_prepare(
    signed: Signed, view: View, digest: bytes, justification: TimeoutCertificate | None
) -> bool:
    """Rules 1b and 2: one prepare vote per view, for a justified block only."""
    return _open(signed, Kind.PREPARE, view) and unjustified(view, digest, justification) is None


def may_finalize(signed: Signed, prepared: Certificate) -> bool:
    """Rules 1c and 3: one finalize vote per view, with a prepare certificate of that view, and not
    after timing out of it."""
    return prepared.kind is Kind.PREPARE and _open(signed, Kind.FINALIZE, prepared.view)


def may_time_out(signed: Signed, view: View) -> bool:
    """Rules 1d and 4: views are timed out of in increasing order, each once; the vote carries
    ``high_mark``, the highest prepare certificate held."""
    return _open(signed, Kind.TIME_OUT, view) and signed.high_mark <= view + 1


def required_digest(justification: TimeoutCertificate | None) -> bytes | None:
    """The block that must be proposed again, if the time-outs carry a prepare certificate."""
    if justification is None or justification.prepared is None:
        return None
    return justification.prepared.digest


def unjustified(view: View, digest: bytes, justification: TimeoutCertificate | None) -> str | None:
    """Rule 2: why this block must not be prepared in this view; None if it may be. (That the
    certificate itself is valid and of this height was checked when it was received.)"""
    if view == 0:
        return None if justification is None else "view 0 needs no time-outs"
    if justification is None or justification.view != view - 1:
        return "lacks the time-outs of the view before"
    required = required_digest(justification)
    if required is not None and required != digest:
        return "differs from the block that the time-outs carry"
    return None


def contradict(first: Vote, second: Vote) -> bool:
    """Whether no honest validator signs both: two different votes in one slot, or a finalize vote
    in v and a time-out of a view ≥ v that denies the prepare certificate of v."""
    if (first.author, first.height) != (second.author, second.height):
        return False
    if first.slot == second.slot:
        return (first.digest, first.high) != (second.digest, second.high)
    return _denies(first, second) or _denies(second, first)


def _denies(vote: Vote, timeout: Vote) -> bool:
    return (
        vote.kind is Kind.FINALIZE
        and timeout.kind is Kind.TIME_OUT
        and timeout.view >= vote.view
        and timeout.high <= vote.view
    )
