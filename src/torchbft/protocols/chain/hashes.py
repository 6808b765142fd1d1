"""The bytes that CometBFT hashes and signs: protobuf in its one canonical form, and Merkle roots.

Only writing is needed: a verifier encodes what it holds and compares digests, so no protobuf from
outside is ever parsed. Fields are written in order of their number; a zero is left out unless
its message is declared non-nullable (gogoproto), as CometBFT's code writes it.
Source: CometBFT v0.40.0, ``proto/tendermint``, ``types/canonical.go``, ``crypto/merkle``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torchbft.primitives.abci import TxResult
from torchbft.protocols.chain.messages import (
    BlockId,
    Commit,
    CommitSig,
    DuplicateVote,
    Header,
    Timestamp,
    Validator,
    Vote,
    VoteKind,
)

_VARINT, _FIXED64, _LENGTH = 0, 1, 2


def varint(number: int) -> bytes:
    """Base-128, lowest group first; negative numbers as 64-bit two's complement."""
    number &= 2**64 - 1
    groups = bytearray()
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def integer(field: int, number: int) -> bytes:
    return varint(field << 3 | _VARINT) + varint(number) if number else b""


def fixed(field: int, number: int) -> bytes:
    return varint(field << 3 | _FIXED64) + number.to_bytes(8, "little") if number else b""


def message(field: int, body: bytes) -> bytes:
    """A message or bytes that is written even when it is empty."""
    return varint(field << 3 | _LENGTH) + varint(len(body)) + body


def some(field: int, body: bytes) -> bytes:
    """Bytes that are left out when empty."""
    return message(field, body) if body else b""


def merkle(leaves: Sequence[bytes]) -> bytes:
    """The root of RFC 6962 over sha256: the left half is the largest power of two below all."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return hashlib.sha256(b"\x01" + merkle(leaves[:half]) + merkle(leaves[half:])).digest()


def timestamp(time: Timestamp) -> bytes:
    return integer(1, time.seconds) + integer(2, time.nanos)


def block_id(id_: BlockId | None) -> bytes:
    if id_ is None:
        return message(2, b"")
    return some(1, id_.hash) + message(2, integer(1, id_.parts) + some(2, id_.parts_hash))


def header_hash(header: Header) -> bytes:
    """The hash of a block: the root of its header's fields, each as a protobuf value."""
    h = header
    return merkle(
        [
            integer(1, h.block_version) + integer(2, h.app_version),
            some(1, h.chain_id.encode()),
            integer(1, h.height),
            timestamp(h.time),
            block_id(h.last_block_id),
            some(1, h.last_commit_hash),
            some(1, h.data_hash),
            some(1, h.validators_hash),
            some(1, h.next_validators_hash),
            some(1, h.consensus_hash),
            some(1, h.app_hash),
            some(1, h.last_results_hash),
            some(1, h.evidence_hash),
            some(1, h.proposer),
        ]
    )


def commit_hash(commit: Commit | None) -> bytes:
    """``last_commit_hash``; None stands for the empty commit of the first block."""
    return merkle([_commit_sig(one) for one in commit.signatures] if commit else [])


def _commit_sig(one: CommitSig) -> bytes:
    return (
        integer(1, one.flag)
        + some(2, one.address)
        + message(3, timestamp(one.time))
        + some(4, one.signature)
    )


def validators_hash(validators: Sequence[Validator]) -> bytes:
    return merkle([message(1, some(1, v.public)) + integer(2, v.power) for v in validators])


def data_hash(txs: Sequence[bytes]) -> bytes:
    return merkle([hashlib.sha256(tx).digest() for tx in txs])


def evidence_hash(evidence: Sequence[DuplicateVote]) -> bytes:
    return merkle([_duplicate(one) for one in evidence])


def _duplicate(evidence: DuplicateVote) -> bytes:
    return (
        message(1, _vote(evidence.first))
        + message(2, _vote(evidence.second))
        + integer(3, evidence.total_power)
        + integer(4, evidence.power)
        + message(5, timestamp(evidence.time))
    )


def _vote(vote: Vote) -> bytes:
    return (
        integer(1, vote.kind)
        + integer(2, vote.height)
        + integer(3, vote.round)
        + message(4, block_id(vote.block_id))
        + message(5, timestamp(vote.time))
        + some(6, vote.address)
        + integer(7, vote.index)
        + some(8, vote.signature)
        + some(9, vote.extension)
        + some(10, vote.extension_signature)
    )


def results_hash(results: Sequence[TxResult]) -> bytes:
    """``last_results_hash`` of the next block: code and data of each result. We use no gas, and
    logs, info and events are not deterministic to the engine."""
    return merkle([integer(1, one.code) + some(2, one.data) for one in results])


def consensus_hash(max_bytes: int, max_gas: int) -> bytes:
    """The hash of the consensus parameters: of these two (``HashedParams``), and no others."""
    return hashlib.sha256(integer(1, max_bytes) + integer(2, max_gas)).digest()


def sign_bytes(
    chain_id: str, kind: VoteKind, height: int, round_: int, id_: BlockId | None, time: Timestamp
) -> bytes:
    """What a validator signs to vote: a length-delimited ``CanonicalVote``. A vote for no block has
    no block ID at all."""
    body = (
        integer(1, kind)
        + fixed(2, height)
        + fixed(3, round_)
        + (message(4, block_id(id_)) if id_ else b"")
        + message(5, timestamp(time))
        + some(6, chain_id.encode())
    )
    return varint(len(body)) + body
