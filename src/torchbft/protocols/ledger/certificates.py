"""Validator sets, certificates and evidence: pure checks that an outsider can repeat offline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torchbft.primitives.abci import ValidatorUpdate
from torchbft.primitives.digests import sha256
from torchbft.primitives.errors import DecodeError, PreconditionError
from torchbft.primitives.evidence import Evidence, Fault
from torchbft.primitives.faults import FaultModel
from torchbft.primitives.ids import Height, PeerId, View
from torchbft.primitives.wire import WIRE_VERSION, decode, encode
from torchbft.protocols.ledger.messages import (
    MAX_VALIDATORS,
    NO_DIGEST,
    Block,
    Certificate,
    FinalizedBlock,
    Kind,
    SignedVote,
    TimeoutCertificate,
    Vote,
    block_digest,
    vote_is_signed,
)
from torchbft.protocols.ledger.safety import contradict


@dataclass(frozen=True, slots=True, order=True)
class Validator:
    """A name, its Ed25519 voting key (32 bytes) and its power (≥ 1)."""

    name: PeerId
    public: bytes
    power: int = 1


class ValidatorSet:
    """The validators of a height, sorted by name; counts are sums of power.

    ``faults`` may be given to test what a wrong quorum does; the default is the only sound one.
    """

    def __init__(self, validators: Iterable[Validator], faults: FaultModel | None = None) -> None:
        self.validators = tuple(sorted(validators))
        self.names = tuple(v.name for v in self.validators)
        self.publics = {v.name: v.public for v in self.validators}
        self.powers = {v.name: v.power for v in self.validators}
        count = len(self.validators)
        if count != len(self.publics) or count != len(set(self.publics.values())):
            raise PreconditionError("two validators share a name or a key")
        if count > MAX_VALIDATORS or any(v.power < 1 for v in self.validators):
            raise PreconditionError(f"1 to {MAX_VALIDATORS} validators with power ≥ 1 are needed")
        self.faults = faults or FaultModel(sum(self.powers.values()))
        self.digest = sha256("ledger/validators", encode(self._fields()))

    def _fields(self) -> list[tuple[str, bytes, int]]:
        return [(v.name, v.public, v.power) for v in self.validators]

    def __repr__(self) -> str:
        return f"ValidatorSet({', '.join(self.names)}; quorum {self.faults.quorum})"

    def power_of(self, names: Iterable[str]) -> int:
        """Sum of the power of these names; strangers have none."""
        return sum(self.powers.get(PeerId(name), 0) for name in names)

    def updated(
        self, updates: Sequence[ValidatorUpdate], names: Mapping[bytes, PeerId]
    ) -> ValidatorSet:
        """The set after an application's updates; ``names`` gives new keys their peer names."""
        if not updates:
            return self
        now = {v.public: v for v in self.validators}
        for update in updates:
            known = now.pop(update.public, None)
            if update.power > 0:
                stranger = PeerId("key-" + update.public.hex()[:28])
                name = known.name if known else names.get(update.public, stranger)
                now[update.public] = Validator(name, update.public, update.power)
        return ValidatorSet(now.values())


def make_certificate(votes: Mapping[PeerId, Vote], validators: ValidatorSet) -> Certificate:
    """The certificate of equal, checked votes of a quorum."""
    chosen = [(i, votes[name]) for i, name in enumerate(validators.names) if name in votes]
    first = chosen[0][1]
    return Certificate(
        first.kind,
        first.height,
        first.view,
        first.digest,
        tuple(i for i, _ in chosen),
        tuple(vote.signature for _, vote in chosen),
    )


def make_timeout_certificate(
    votes: Mapping[PeerId, Vote], validators: ValidatorSet, high: Certificate | None
) -> TimeoutCertificate:
    """The certificate of checked time-outs of a quorum. ``high``: a prepare certificate at least as
    high as any of them speaks of."""
    chosen = [(i, votes[name]) for i, name in enumerate(validators.names) if name in votes]
    return TimeoutCertificate(
        chosen[0][1].height,
        chosen[0][1].view,
        tuple(i for i, _ in chosen),
        tuple(vote.high for _, vote in chosen),
        tuple(vote.signature for _, vote in chosen),
        high,
    )


def _wrong_signers(signers: Sequence[int], validators: ValidatorSet) -> str | None:
    if any(a >= b for a, b in pairwise(signers)):
        return "signers are not in increasing order"
    if signers and signers[-1] >= len(validators.names):
        return "a signer is not a validator"
    if validators.power_of(validators.names[i] for i in signers) < validators.faults.quorum:
        return "fewer votes than a quorum"
    return None


def _unsigned(votes: Iterable[Vote], validators: ValidatorSet, run_id: bytes) -> str | None:
    for vote in votes:
        if not vote_is_signed(validators.publics[PeerId(vote.author)], run_id, vote):
            return f"the signature of {vote.author} is false"
    return None


def check_certificate(
    certificate: Certificate, kind: Kind, validators: ValidatorSet, run_id: bytes
) -> str | None:
    """Why this is not a quorum's certificate of this kind; None if it is."""
    if certificate.kind is not kind:
        return f"expected a {kind.name} certificate"
    if len(certificate.signers) != len(certificate.signatures):
        return "signers and signatures differ in number"
    wrong = _wrong_signers(certificate.signers, validators)
    return wrong or _unsigned(votes_of(certificate, validators), validators, run_id)


def votes_of(certificate: Certificate, validators: ValidatorSet) -> list[Vote]:
    """The votes that a certificate holds, each with its author's name."""
    c = certificate
    return [
        Vote(c.kind, c.height, c.view, View(0), c.digest, validators.names[i], signature)
        for i, signature in zip(c.signers, c.signatures, strict=True)
    ]


def timeouts_of(certificate: TimeoutCertificate, validators: ValidatorSet) -> list[Vote]:
    """The time-out votes that a certificate holds."""
    c = certificate
    return [
        Vote(Kind.TIME_OUT, c.height, c.view, high, NO_DIGEST, validators.names[i], signature)
        for i, high, signature in zip(c.signers, c.highs, c.signatures, strict=True)
    ]


def check_high(
    height: Height,
    view: View,
    high: View,
    prepared: Certificate | None,
    validators: ValidatorSet,
    run_id: bytes,
) -> str | None:
    """Why a prepare certificate is not at least as high as time-outs of this view say."""
    if prepared is None:
        return None if high == 0 else "lacks the prepare certificate it speaks of"
    if prepared.height != height or not high <= prepared.view + 1 <= view + 1:
        return "carries a lower prepare certificate than it speaks of, or one of another height"
    return check_certificate(prepared, Kind.PREPARE, validators, run_id)


def check_timeouts(
    certificate: TimeoutCertificate, validators: ValidatorSet, run_id: bytes
) -> str | None:
    """Why this is not a quorum's time-outs with their highest prepare certificate."""
    c = certificate
    if not len(c.signers) == len(c.signatures) == len(c.highs):
        return "signers, highs and signatures differ in number"
    wrong = _wrong_signers(c.signers, validators)
    if wrong:
        return wrong
    wrong = check_high(c.height, c.view, max(c.highs), c.prepared, validators, run_id)
    return wrong or _unsigned(timeouts_of(c, validators), validators, run_id)


def check_block(block: Block, run_id: bytes, height: Height) -> str | None:
    """Why a block cannot be one of this run and height, whatever its predecessor."""
    if block.version != WIRE_VERSION or block.run_id != run_id:
        return "of another run or version"
    return None if block.height == height else f"of height {block.height}, not {height}"


def verify_finalized(
    finalized: FinalizedBlock, validators: ValidatorSet, run_id: bytes
) -> str | None:
    """Why a quorum did not finalize this block; None if it did. Pure: used offline.

    ``validators``: the set of the block's height. The chain (``previous``, ``app_hash``) is for
    the caller to check, who has the blocks before.
    """
    block, certificate = finalized.block, finalized.certificate
    wrong = check_block(block, run_id, certificate.height)
    if wrong:
        return wrong
    if certificate.digest != block_digest(block):
        return "the certificate is for another block"
    return check_certificate(certificate, Kind.FINALIZE, validators, run_id)


def double_vote(run_id: bytes, first: Vote, second: Vote) -> Evidence:
    """Evidence of two contradicting votes, in the one order that both finders write."""
    statements = sorted(encode(SignedVote(run_id, vote)) for vote in (first, second))
    return Evidence(Fault.DOUBLE_VOTE, first.author, first.height, tuple(statements))


def check_double_vote(evidence: Evidence, public: bytes, run_id: bytes | None = None) -> bool:
    """Whether this proves that the key signed two votes that contradict each other. Total.

    ``run_id``: the run it must be of; None accepts any run, the same in both votes.
    """
    if evidence.fault != Fault.DOUBLE_VOTE or len(evidence.statements) != 2:
        return False
    try:
        first, second = (decode(data, SignedVote) for data in evidence.statements)
    except DecodeError:
        return False
    if first.run_id != second.run_id or run_id not in (None, first.run_id):
        return False
    named = first.vote.author == evidence.accused and first.vote.height == evidence.round
    return (
        named
        and contradict(first.vote, second.vote)
        and all(vote_is_signed(public, s.run_id, s.vote) for s in (first, second))
    )


def convict(
    first: FinalizedBlock,
    second: FinalizedBlock,
    timeouts: Sequence[TimeoutCertificate],
    validators: ValidatorSet,
    run_id: bytes,
) -> list[Evidence]:
    """Evidence against at least f+1 power, from two finalized blocks of one height that differ.

    Certificates of one view convict by themselves (quorums intersect in f+1). For views v < w the
    time-outs of the views from v on, as found in the proposals of the later views (log ``votes``),
    are needed too: who signed FINALIZE in v and then denied its prepare certificate is convicted
    (Sheng, Wang, Nayak, Kannan and Viswanath 2021, forensic support of PBFT).
    """
    votes = [v for f in (first, second) for v in votes_of(f.certificate, validators)]
    votes += [v for t in timeouts for v in timeouts_of(t, validators)]
    prepared = [t.prepared for t in timeouts if t.prepared is not None]
    votes += [v for certificate in prepared for v in votes_of(certificate, validators)]
    found: dict[str, Evidence] = {}
    for i, one in enumerate(votes):
        other = next((o for o in votes[i + 1 :] if contradict(one, o)), None)
        if other is not None and one.author not in found:
            found[one.author] = double_vote(run_id, one, other)
    return [found[name] for name in sorted(found)]


def encoded_finalized(block: Block, certificate: Certificate) -> bytes:
    """The record of log ``blocks``."""
    return encode(FinalizedBlock(block, certificate))
