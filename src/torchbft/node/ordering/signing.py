"""Which votes and proposals of CometBFT a key signs: at most one for each height, round and step.

Source: CometBFT v0.40, ``privval/file.go``. The same rules: never back; for the same slot the same
bytes get the signature that they got; bytes that differ in nothing but their time get the old time
and its signature; anything else is refused. Vote extensions are never signed: our runs have none.
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError as ProtobufError
from google.protobuf.timestamp_pb2 import Timestamp

from torchbft.node.ordering.delimited import framed
from torchbft.node.ordering.proto import privval_pb2 as pb
from torchbft.node.ordering.signstate import SignState
from torchbft.primitives.errors import DecodeError, StorageError
from torchbft.primitives.keys import SigningKey

PREVOTE, PRECOMMIT, PROPOSAL = 1, 2, 32
STEPS = {PROPOSAL: 1, PREVOTE: 2, PRECOMMIT: 3}
REFUSED, PASSED = 1, 2
"""Codes of an answer without a signature."""
MAX_REQUEST_BYTES = 16 * 1024
"""A vote without extension has 250 bytes."""
MAX_HEIGHT, MAX_ROUND = 2**62, 2**31 - 1
HASH_BYTES = 32
NANOSECONDS = 10**9

Canonical = pb.CanonicalVote | pb.CanonicalProposal
_C = TypeVar("_C", pb.CanonicalVote, pb.CanonicalProposal)


class RefusedError(Exception):
    """This must not be signed; the text says why and holds nothing secret."""


class PassedError(RefusedError):
    """The slot is behind what is signed: no harm, an engine that replays its log asks so."""


class Signer:
    """Answers the engine's requests with one key. ``use`` changes the key between two heights."""

    def __init__(self, chain_id: str, key: SigningKey, state: SignState) -> None:
        self._chain_id, self._key, self.state = chain_id, key, state

    def use(self, key: SigningKey, state: SignState) -> None:
        """Sign with another key from now on; the engine asks for it at the next height."""
        self.state.close()
        self._key, self.state = key, state

    def answer(self, request: pb.Message) -> pb.Message:
        """The answer to a request. A refusal is an answer too. Raises DecodeError for a message
        that is no request."""
        kind = request.WhichOneof("sum")
        if kind == "ping_request":
            return pb.Message(ping_response=pb.Ping())
        if kind == "pub_key_request":
            return self._public(request.pub_key_request)
        if kind == "sign_vote_request":
            return self._vote(request.sign_vote_request)
        if kind == "sign_proposal_request":
            return self._proposal(request.sign_proposal_request)
        raise DecodeError(f"the engine sent {kind or 'nothing'} to its signer")

    def _public(self, request: pb.PubKeyRequest) -> pb.Message:
        response = pb.PubKeyResponse()
        if request.chain_id != self._chain_id:
            response.error.description = "this key is for another chain"
        else:
            response.pub_key.ed25519 = self._key.public
        return pb.Message(pub_key_response=response)

    def _vote(self, request: pb.SignVoteRequest) -> pb.Message:
        response = pb.SignedVoteResponse(vote=request.vote)
        try:
            asked = canonical_vote(request.vote, request.chain_id)
            signature, time = self._sign(asked, STEPS[request.vote.type])
            response.vote.signature = signature
            response.vote.timestamp.CopyFrom(time)
        except (RefusedError, StorageError) as error:
            return pb.Message(signed_vote_response=pb.SignedVoteResponse(error=_refusal(error)))
        return pb.Message(signed_vote_response=response)

    def _proposal(self, request: pb.SignProposalRequest) -> pb.Message:
        response = pb.SignedProposalResponse(proposal=request.proposal)
        try:
            asked = canonical_proposal(request.proposal, request.chain_id)
            signature, time = self._sign(asked, STEPS[PROPOSAL])
            response.proposal.signature = signature
            response.proposal.timestamp.CopyFrom(time)
        except (RefusedError, StorageError) as error:
            refused = pb.SignedProposalResponse(error=_refusal(error))
            return pb.Message(signed_proposal_response=refused)
        return pb.Message(signed_proposal_response=response)

    def _sign(self, asked: Canonical, step: int) -> tuple[bytes, Timestamp]:
        """Signature and the time under it. Raises RefusedError, StorageError."""
        if asked.chain_id != self._chain_id:
            raise RefusedError("this key is for another chain")
        slot, last = (asked.height, asked.round, step), self.state.last
        if slot < last.slot:
            raise PassedError(f"{slot} is before {last.slot}, which is signed")
        if slot == last.slot:
            return last.signature, _signed_before(asked, last.signed)
        signed = framed(asked)
        signature = self._key.sign_foreign(signed)
        self.state.save(slot, signed, signature)
        return signature, asked.timestamp


def _signed_before(asked: Canonical, signed: bytes) -> Timestamp:
    """The time under the signature that this slot has. Raises RefusedError unless everything else
    is what is asked for."""
    old = type(asked)()
    old.ParseFromString(signed[1 + (len(signed) > 128) :])  # behind the length
    time = Timestamp()
    time.CopyFrom(old.timestamp)
    old.timestamp.CopyFrom(asked.timestamp)
    if not signed or old.SerializeToString() != asked.SerializeToString():
        raise RefusedError("another one is signed for this height, round and step")
    return time


def canonical_vote(vote: pb.Vote, chain_id: str) -> pb.CanonicalVote:
    """What a vote's signature covers. Raises RefusedError for what no engine of ours sends."""
    if vote.type not in (PREVOTE, PRECOMMIT):
        raise RefusedError(f"{vote.type} is no type of vote")
    if vote.extension:
        raise RefusedError("votes of this run have no extension")
    return _common(vote, pb.CanonicalVote(type=vote.type, chain_id=chain_id))


def canonical_proposal(proposal: pb.Proposal, chain_id: str) -> pb.CanonicalProposal:
    """What a proposal's signature covers. Raises RefusedError for what no engine of ours sends."""
    if proposal.type != PROPOSAL or not proposal.block_id.hash:
        raise RefusedError("this is no proposal of a block")
    if proposal.pol_round != -1 and not 0 <= proposal.pol_round < proposal.round:
        raise RefusedError("its proof of lock is of no earlier round")
    asked = pb.CanonicalProposal(type=PROPOSAL, chain_id=chain_id, pol_round=proposal.pol_round)
    return _common(proposal, asked)


def _common(source: pb.Vote | pb.Proposal, asked: _C) -> _C:
    """Fill in the fields of both, one by one: nothing unknown comes along."""
    if not 1 <= source.height <= MAX_HEIGHT or not 0 <= source.round <= MAX_ROUND:
        raise RefusedError(f"no height {source.height} or round {source.round} can be signed")
    if not 0 <= source.timestamp.nanos < NANOSECONDS:
        raise RefusedError("its time has no second")
    asked.height, asked.round = source.height, source.round
    asked.timestamp.seconds = source.timestamp.seconds
    asked.timestamp.nanos = source.timestamp.nanos
    asked.timestamp.SetInParent()
    block, parts = source.block_id, source.block_id.part_set_header
    if not block.hash and not parts.hash and not parts.total:
        return asked  # a vote for no block
    if len(block.hash) != HASH_BYTES or len(parts.hash) != HASH_BYTES or not parts.total:
        raise RefusedError("its block id is no block's")
    asked.block_id.hash = block.hash
    asked.block_id.part_set_header.total = parts.total
    asked.block_id.part_set_header.hash = parts.hash
    return asked


def parse(data: bytes) -> pb.Message:
    """A message of the engine. Raises DecodeError."""
    if len(data) > MAX_REQUEST_BYTES:
        raise DecodeError(f"{len(data)} bytes where at most {MAX_REQUEST_BYTES} are allowed")
    try:
        return pb.Message.FromString(data)
    except ProtobufError as error:
        raise DecodeError(f"not a message to a signer: {error}") from None


def _refusal(error: Exception) -> pb.RemoteSignerError:
    code = PASSED if isinstance(error, PassedError) else REFUSED
    return pb.RemoteSignerError(code=code, description=str(error))
