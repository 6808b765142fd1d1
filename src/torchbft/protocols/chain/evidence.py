"""Double votes under CometBFT as our ``Evidence``: two signatures of one key for one slot.

A slot is a kind of vote, a height and a round of one chain; two votes in it contradict each other
when they name different blocks, one of which may be none. Times do not count: an honest validator
that restarts may sign the same vote with another time. What the engine calls amnesia (votes in
different rounds) and lunatic attacks (a false header that a third signed) name nobody by two
signatures for one slot, so they convict nobody here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from torchbft.primitives.abci import Misbehaviour
from torchbft.primitives.errors import DecodeError
from torchbft.primitives.evidence import Evidence, Fault
from torchbft.primitives.ids import Height, PeerId
from torchbft.primitives.wire import Wire, decode, encode
from torchbft.primitives.zip215 import verify_zip215
from torchbft.protocols.chain.hashes import sign_bytes
from torchbft.protocols.chain.messages import (
    ChainId,
    ChainRecord,
    Commit,
    DuplicateVote,
    Flag,
    Vote,
    VoteKind,
    address_of,
)


class SignedVote(Wire, frozen=True):
    """A vote with the chain it counts on: one statement of an ``Evidence``. What is not signed
    (``index``, extensions) is blank, so that equal votes are equal bytes."""

    chain_id: ChainId
    vote: Vote


def _bare(vote: Vote) -> Vote:
    return msgspec.structs.replace(vote, index=0, extension=b"", extension_signature=b"")


def vote_is_signed(vote: Vote, public: bytes, chain_id: str) -> bool:
    """Whether the key signed this vote on this chain, by the engine's rule (ZIP-215)."""
    kind = VoteKind(vote.kind)
    text = sign_bytes(chain_id, kind, vote.height, vote.round, vote.block_id, vote.time)
    return verify_zip215(public, text, vote.signature)


def contradict(one: Vote, two: Vote) -> bool:
    """Whether these fill one slot of one validator with different blocks."""
    slots = [(vote.address, vote.kind, vote.height, vote.round) for vote in (one, two)]
    return slots[0] == slots[1] and one.block_id != two.block_id


def double_vote(chain_id: str, accused: PeerId, one: Vote, two: Vote) -> Evidence:
    """Evidence of two contradicting votes, in the one order that all finders write."""
    statements = sorted(encode(SignedVote(chain_id, _bare(vote))) for vote in (one, two))
    return Evidence(Fault.DOUBLE_VOTE, accused, one.height, tuple(statements))


def check_double_vote(evidence: Evidence, public: bytes, chain_id: str) -> bool:
    """Whether this proves that the key signed two votes of one slot on this chain. Total."""
    if evidence.fault != Fault.DOUBLE_VOTE or len(evidence.statements) != 2:
        return False
    try:
        one, two = (decode(data, SignedVote) for data in evidence.statements)
    except DecodeError:
        return False
    return (
        one.chain_id == two.chain_id == chain_id
        and one.vote.address == address_of(public)
        and one.vote.height == evidence.round
        and contradict(one.vote, two.vote)
        and all(said.vote == _bare(said.vote) for said in (one, two))
        and all(vote_is_signed(said.vote, public, chain_id) for said in (one, two))
    )


def evidence_fault(duplicate: DuplicateVote, at: ChainRecord) -> str | None:
    """Why evidence in a block is not two votes of one slot, exactly as it says. ``at``: the checked
    record of the height of these votes."""
    one, two = duplicate.first, duplicate.second
    public = {v.address: v for v in at.validators}.get(one.address)
    if public is None or one.height != at.header.height or not contradict(one, two):
        return "is not two contradicting votes of a validator in one slot"
    if not all(vote_is_signed(vote, public.public, at.header.chain_id) for vote in (one, two)):
        return "holds a vote with a false signature"
    total = sum(v.power for v in at.validators)
    told = (duplicate.power, duplicate.total_power, duplicate.time)
    exact = told == (public.power, total, at.header.time)
    return None if exact else "names false powers or a false time"


def evidence_in(record: ChainRecord, names: Mapping[bytes, PeerId]) -> list[Evidence]:
    """The double votes in a block as evidence of ours, against members that ``names`` knows by the
    address of their key. To be checked like any other (``check_double_vote``)."""
    return [
        double_vote(record.header.chain_id, names[one.first.address], one.first, one.second)
        for one in record.evidence
        if one.first.address in names
    ]


def misbehaviour_in(record: ChainRecord, keys: Mapping[bytes, bytes]) -> tuple[Misbehaviour, ...]:
    """What the engine reports to the application with a block: double votes of the keys that
    ``keys`` gives by address."""
    return tuple(
        Misbehaviour(keys[one.first.address], Height(one.first.height))
        for one in record.evidence
        if one.first.address in keys
    )


def votes_of(commit: Commit) -> list[Vote]:
    """The votes that a commit holds, those for no block included."""
    return [
        Vote(
            VoteKind.PRECOMMIT,
            commit.height,
            commit.round,
            commit.block_id if one.flag == Flag.COMMIT else None,
            one.time,
            one.address,
            index,
            one.signature,
        )
        for index, one in enumerate(commit.signatures)
        if one.flag != Flag.ABSENT
    ]


def convict(
    first: ChainRecord, second: ChainRecord, names: Mapping[bytes, PeerId]
) -> list[Evidence]:
    """Evidence from two checked records of one height that differ. Commits of one round convict
    f+1 of power by themselves; of commits in different rounds nobody is convicted (amnesia)."""
    return _contradictions(votes_of(first.commit), votes_of(second.commit), first, names)


def _contradictions(
    some: Iterable[Vote], others: Iterable[Vote], at: ChainRecord, names: Mapping[bytes, PeerId]
) -> list[Evidence]:
    theirs = {vote.address: vote for vote in others}
    found = []
    for vote in some:
        other, name = theirs.get(vote.address), names.get(vote.address)
        if other is not None and name is not None and contradict(vote, other):
            found.append(double_vote(at.header.chain_id, name, vote, other))
    return found
