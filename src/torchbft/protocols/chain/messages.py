"""What CometBFT signs and hashes, as canonical values of ours: a block, its commit, its validators.

Every field is covered by a hash or a signature, so that no byte of a record can change unnoticed;
what the engine's own answers hold beside these (names of parts, priorities, sizes) is left out.
Source: CometBFT v0.40.0, ``spec/core/data_structures.md`` and ``proto/tendermint/types``.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum
from typing import Annotated

import msgspec

from torchbft.primitives.runspec import MAX_MEMBERS
from torchbft.primitives.wire import Bytes32, Count, Wire, decode

ADDRESS_BYTES = 20
MAX_CHAIN_ID = 50
"""The engine's own limit (``types.MaxChainIDLen``)."""
CHAIN_ID_DIGITS = 40
MAX_RECORD_BYTES = 8 * 1024 * 1024
"""A block of 1 MiB of transactions and one of evidence, two commits and the validators: with room
for a block limit that is raised later."""
MAX_TXS = 16_384
MAX_EVIDENCE = 1024
MAX_POWER = 2**60
"""The engine's limit on the power of a set (an eighth of 2^63)."""
FIRST_SECOND, LAST_SECOND = -62_135_596_800, 253_402_300_799
"""The years 1 and 9999: the span of protobuf's Timestamp."""

Address = Annotated[bytes, msgspec.Meta(min_length=ADDRESS_BYTES, max_length=ADDRESS_BYTES)]
ChainId = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CHAIN_ID)]
Power = Annotated[int, msgspec.Meta(ge=1, le=MAX_POWER)]
Signature = Annotated[bytes, msgspec.Meta(max_length=64)]
AppHash = Annotated[bytes, msgspec.Meta(max_length=64)]
"""The engine leaves its length to the application; ours is of 32 bytes."""


def chain_id_of(run_id: bytes) -> str:
    """The chain of a run: 40 hexadecimal digits, as many as fit the engine's limit with room."""
    return run_id.hex()[:CHAIN_ID_DIGITS]


def address_of(public: bytes) -> bytes:
    """How the engine names a validator's key: 20 bytes of its sha256."""
    return hashlib.sha256(public).digest()[:ADDRESS_BYTES]


class Flag(IntEnum):
    """What a validator's place in a commit holds (``BlockIDFlag``)."""

    ABSENT = 1
    COMMIT = 2
    NIL = 3


class VoteKind(IntEnum):
    """The kinds of votes (``SignedMsgType``)."""

    PREVOTE = 1
    PRECOMMIT = 2


class Timestamp(Wire, frozen=True, order=True):
    """Seconds since 1970 and nanoseconds after them."""

    seconds: Annotated[int, msgspec.Meta(ge=FIRST_SECOND, le=LAST_SECOND)]
    nanos: Annotated[int, msgspec.Meta(ge=0, le=999_999_999)]


NO_TIME = Timestamp(FIRST_SECOND, 0)
"""Go's zero time: what stands at an absent vote."""


class BlockId(Wire, frozen=True):
    """The hash of a header, and of the parts in which the block travelled. None: no block."""

    hash: Bytes32
    parts: Annotated[int, msgspec.Meta(ge=1, le=2**32 - 1)]
    parts_hash: Bytes32


class Header(Wire, frozen=True):
    """The header of a block; its hash is signed by the commit."""

    block_version: Count
    app_version: Count
    chain_id: ChainId
    height: Count
    time: Timestamp
    last_block_id: BlockId | None
    last_commit_hash: Bytes32
    data_hash: Bytes32
    validators_hash: Bytes32
    next_validators_hash: Bytes32
    consensus_hash: Bytes32
    app_hash: AppHash
    last_results_hash: Bytes32
    evidence_hash: Bytes32
    proposer: Address


class CommitSig(Wire, frozen=True):
    """One validator's place in a commit. Absent: no address, no time, no signature."""

    flag: Annotated[int, msgspec.Meta(ge=1, le=3)]
    address: Annotated[bytes, msgspec.Meta(max_length=ADDRESS_BYTES)]
    time: Timestamp
    signature: Signature


class Commit(Wire, frozen=True):
    """The precommits of one round for one block, a place for each validator, in the set's order."""

    height: Count
    round: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    block_id: BlockId
    signatures: Annotated[tuple[CommitSig, ...], msgspec.Meta(max_length=MAX_MEMBERS)]


class Validator(Wire, frozen=True):
    """An Ed25519 key and its power."""

    public: Bytes32
    power: Power

    @property
    def address(self) -> bytes:
        """How commits and evidence name it."""
        return address_of(self.public)


class Vote(Wire, frozen=True):
    """A signed vote as evidence holds it. ``index`` and what comes after ``signature`` are not
    signed; they stand here because the hash of the evidence covers them."""

    kind: Annotated[int, msgspec.Meta(ge=1, le=2)]
    height: Count
    round: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    block_id: BlockId | None
    time: Timestamp
    address: Address
    index: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    signature: Signature
    extension: bytes = b""
    extension_signature: Signature = b""


class DuplicateVote(Wire, frozen=True):
    """Evidence in a block: two votes of one key in one slot. Powers are of the votes' height,
    ``time`` is that of its header. The engine's other kind, an attack on light clients, takes more
    than f liars; no record can hold it."""

    first: Vote
    second: Vote
    total_power: Count
    power: Count
    time: Timestamp


class ChainRecord(Wire, frozen=True):
    """A height of the chain: one record of the log ``chain``.

    ``last_commit`` stands in the block (None in the first); ``commit`` is the one for this block
    that the engine held when the record was written: both are good, and may differ in whose votes
    had come in time.
    """

    header: Header
    txs: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_TXS)]
    evidence: Annotated[tuple[DuplicateVote, ...], msgspec.Meta(max_length=MAX_EVIDENCE)]
    last_commit: Commit | None
    commit: Commit
    validators: Annotated[tuple[Validator, ...], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]


def decode_record(data: bytes) -> ChainRecord:
    """A record of the log, or DecodeError. Total; its memory is bounded by the record's size."""
    return decode(data, ChainRecord, limit=MAX_RECORD_BYTES)
