"""Messages of the embedded ledger: every field bounded, one decoder, one byte string per value.

A *vote* is the only signed thing: a leader's proposal, a prepare or finalize vote and a time-out
are votes of four kinds, so "two different votes of one author in one slot" is one rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, TypeVar, cast

import msgspec

from torchbft.primitives.digests import sha256
from torchbft.primitives.errors import DecodeError
from torchbft.primitives.ids import Height, PeerId, View
from torchbft.primitives.keys import SigningKey, verify
from torchbft.primitives.wire import (
    MAX_CONTROL_BYTES,
    WIRE_VERSION,
    Bytes32,
    Bytes64,
    Name,
    Wire,
    decode,
    encode,
)

MAX_VALIDATORS = 128
"""Members of one ledger; a certificate then stays below 10 KiB."""

MAX_BLOCK_TXS = 4096
"""Transactions of a block: 64 members with 64 items each."""

MAX_BLOCK_BYTES = 1024 * 1024
"""Bytes of all transactions of a block; a phase of a round at 64 members needs 256 KiB."""

MAX_TX_BYTES = 64 * 1024
"""One transaction: a statement or evidence (16 KiB) with room."""

BATCH_BLOCKS = 64
"""Finalized blocks in one answer to a laggard: a second of catching up between two requests."""

BATCH_BYTES = 2 * MAX_BLOCK_BYTES
"""Bytes in one answer: at least one full block, well below ``MAX_CONTROL_BYTES``."""

_TOP = 2**62
"""Largest count on the wire; adding to it overflows in no host."""

_T = TypeVar("_T")
WireHeight = Annotated[Height, msgspec.Meta(ge=1, le=_TOP)]
WireView = Annotated[View, msgspec.Meta(ge=0, le=_TOP)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=MAX_VALIDATORS)]
Signers = Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_VALIDATORS)]
Signatures = Annotated[tuple[Bytes64, ...], msgspec.Meta(max_length=MAX_VALIDATORS)]
Tx = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_TX_BYTES)]

NO_DIGEST = bytes(32)
"""The digest of a vote that names no block (a time-out)."""

VOTE_DOMAIN = "ledger/vote"


class Kind(IntEnum):
    """What a vote says; with height and view it is the vote's *slot*."""

    PROPOSE = 0
    PREPARE = 1
    FINALIZE = 2
    TIME_OUT = 3


class Vote(Wire, frozen=True, tag="ledger.vote"):
    """One signed vote. ``high`` is 0 except in a time-out: 1 + the view of the highest prepare
    certificate that the author holds, 0 if it holds none."""

    kind: Kind
    height: WireHeight
    view: WireView
    high: WireView
    digest: Bytes32
    author: Name
    signature: Bytes64

    @property
    def slot(self) -> tuple[Kind, View]:
        return self.kind, self.view


class Block(Wire, frozen=True):
    """What a height agrees on. The digest does not contain the view."""

    version: int
    run_id: Bytes32
    height: WireHeight
    previous: Bytes32
    """Digest of the block before; zero at height 1."""
    app_hash: Bytes32
    """Hash of the application after the previous block (ABCI: results of h are in h+1)."""
    proposer: Name
    txs: Annotated[tuple[Tx, ...], msgspec.Meta(min_length=1, max_length=MAX_BLOCK_TXS)]


class Certificate(Wire, frozen=True):
    """Prepare or finalize votes of a quorum for one block in one view."""

    kind: Kind
    height: WireHeight
    view: WireView
    digest: Bytes32
    signers: Signers
    """Indices in the validator set of this height, strictly increasing."""
    signatures: Signatures


class FinalizedBlock(Wire, frozen=True):
    """What log ``blocks`` holds, what laggards get and what is verified offline."""

    block: Block
    certificate: Certificate


class TimeoutCertificate(Wire, frozen=True, tag="ledger.timeouts"):
    """Time-outs of a quorum in one view, and the highest prepare certificate among them."""

    height: WireHeight
    view: WireView
    signers: Signers
    highs: Annotated[tuple[WireView, ...], msgspec.Meta(max_length=MAX_VALIDATORS)]
    signatures: Signatures
    prepared: Certificate | None


class Proposal(Wire, frozen=True, tag="ledger.proposal"):
    """A leader's block; from view 1 on with the time-outs that ended the view before."""

    vote: Vote
    block: Block
    justification: TimeoutCertificate | None


class Timeout(Wire, frozen=True, tag="ledger.timeout"):
    """A time-out vote and the prepare certificate that its ``high`` speaks of."""

    vote: Vote
    prepared: Certificate | None


class Status(Wire, frozen=True, tag="ledger.status"):
    """The height that the sender works on: who is ahead answers with blocks, who is behind asks."""

    height: WireHeight


class Want(Wire, frozen=True, tag="ledger.want"):
    """A request for the block with a certified digest."""

    height: WireHeight
    digest: Bytes32


class Body(Wire, frozen=True, tag="ledger.body"):
    """The answer to ``Want``."""

    block: Block


class Blocks(Wire, frozen=True, tag="ledger.blocks"):
    """Encoded ``FinalizedBlock`` of consecutive heights, and the height the sender works on."""

    height: WireHeight
    blocks: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=BATCH_BLOCKS)]


class SignerState(Wire, frozen=True, tag="ledger.signer"):
    """First record of log ``votes``: a missing log is told from a new one."""

    run_id: Bytes32
    public: Bytes32


class Prepared(Wire, frozen=True, tag="ledger.prepared"):
    """Record of log ``votes``: the certificate by which the finalize vote after it is bound."""

    certificate: Certificate


class SignedVote(Wire, frozen=True):
    """A vote with the run it belongs to: one statement of a double-vote evidence."""

    run_id: Bytes32
    vote: Vote


Message = Vote | Proposal | Timeout | TimeoutCertificate | Status | Want | Body | Blocks
VoteRecord = SignerState | Proposal | Prepared | Vote | Timeout


@dataclass(frozen=True, slots=True)
class Transaction:
    """Input: a transaction to order; ``sender`` bounds what one peer may have pending."""

    tx: bytes
    sender: PeerId | None = None


def _decode_union(data: bytes, type_: type[_T], name: str) -> _T:
    try:
        return decode(data, type_, limit=MAX_CONTROL_BYTES)
    except DecodeError:
        raise DecodeError(f"{len(data)} bytes that are no {name}") from None


def decode_message(data: bytes) -> Message:
    """A message of the control channel, or DecodeError."""
    return _decode_union(data, cast("type[Message]", Message), "message of the ledger")


def decode_vote_record(data: bytes) -> VoteRecord:
    """A record of log ``votes``, or DecodeError."""
    return _decode_union(data, cast("type[VoteRecord]", VoteRecord), "record of signed votes")


def decode_finalized(data: bytes) -> FinalizedBlock:
    """A record of log ``blocks``, or DecodeError."""
    return decode(data, FinalizedBlock, limit=MAX_CONTROL_BYTES)


def block_digest(block: Block) -> bytes:
    """The 32 bytes that votes name."""
    return sha256("ledger/block", encode(block))


def _signed_bytes(run_id: bytes, vote: Vote) -> bytes:
    fields = (vote.kind, vote.height, vote.view, vote.high, vote.digest, vote.author)
    return encode((WIRE_VERSION, run_id, *fields))


def sign_vote(
    key: SigningKey,
    run_id: bytes,
    author: PeerId,
    kind: Kind,
    height: Height,
    view: View,
    digest: bytes,
    high: View = View(0),  # noqa: B008 - an int
) -> Vote:
    """A vote of this author. Whether it may be signed is decided in ``safety.py``."""
    bare = Vote(kind, height, view, high, digest, author, bytes(64))
    signature = key.sign(VOTE_DOMAIN, _signed_bytes(run_id, bare))
    return msgspec.structs.replace(bare, signature=signature)


def vote_is_signed(public: bytes, run_id: bytes, vote: Vote) -> bool:
    """Whether the vote's signature is this key's for this run."""
    return verify(public, VOTE_DOMAIN, _signed_bytes(run_id, vote), vote.signature)
