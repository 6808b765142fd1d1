"""Reads the engine's RPC answers about a height: plain JSON values to one type, or DecodeError.

Only what hashes and signatures cover is taken over (``protocols/chain/messages.py``). Our own
engine is no liar, but another program may sit at its port, and a height that two of its answers
tell differently must be noticed: everything is bounded and nothing but DecodeError is raised.
Source: CometBFT v0.40.0, ``rpc/openapi/openapi.yaml``; numbers of 64 bits are JSON strings.
"""

from __future__ import annotations

import base64
import binascii
import re
from datetime import UTC, datetime
from typing import Annotated, TypeVar

import msgspec

from torchbft.primitives.errors import DecodeError
from torchbft.primitives.wire import encode
from torchbft.protocols.chain.messages import (
    MAX_RECORD_BYTES,
    BlockId,
    ChainRecord,
    Commit,
    CommitSig,
    DuplicateVote,
    Header,
    Timestamp,
    Validator,
    Vote,
    decode_record,
)

_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?Z", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
ED25519 = "tendermint/PubKeyEd25519"
DUPLICATE_VOTE = "tendermint/DuplicateVoteEvidence"

_Number = Annotated[str, msgspec.Meta(pattern=r"^\d{1,19}\Z")]
_Byte = Annotated[int, msgspec.Meta(ge=0, le=255)]
_Int32 = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class _Json(msgspec.Struct, frozen=True):
    """A JSON object; members that we have no use for are ignored."""


class _Parts(_Json, frozen=True):
    total: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    hash: str


class _BlockId(_Json, frozen=True):
    hash: str
    parts: _Parts


class _Version(_Json, frozen=True):
    block: _Number
    app: _Number = "0"


class _Header(_Json, frozen=True):
    version: _Version
    chain_id: str
    height: _Number
    time: str
    last_block_id: _BlockId
    last_commit_hash: str
    data_hash: str
    validators_hash: str
    next_validators_hash: str
    consensus_hash: str
    app_hash: str
    last_results_hash: str
    evidence_hash: str
    proposer_address: str


class _CommitSig(_Json, frozen=True):
    block_id_flag: _Byte
    validator_address: str
    timestamp: str
    signature: str | None


class _Commit(_Json, frozen=True):
    height: _Number
    round: _Int32
    block_id: _BlockId
    signatures: tuple[_CommitSig, ...]


class _Vote(_Json, frozen=True):
    type: _Byte
    height: _Number
    round: _Int32
    block_id: _BlockId
    timestamp: str
    validator_address: str
    validator_index: _Int32
    signature: str | None
    extension: str | None = None
    extension_signature: str | None = None


class _DuplicateVote(_Json, frozen=True):
    vote_a: _Vote
    vote_b: _Vote
    TotalVotingPower: _Number
    ValidatorPower: _Number
    Timestamp: str


class _Evidence(_Json, frozen=True):
    type: str
    value: object


class _EvidenceList(_Json, frozen=True):
    evidence: tuple[_Evidence, ...] | None = ()


class _Data(_Json, frozen=True):
    txs: tuple[str, ...] | None = ()


class _Block(_Json, frozen=True):
    header: _Header
    data: _Data
    evidence: _EvidenceList
    last_commit: _Commit | None


class _BlockAnswer(_Json, frozen=True):
    block: _Block


class _SignedHeader(_Json, frozen=True):
    commit: _Commit


class _CommitAnswer(_Json, frozen=True):
    signed_header: _SignedHeader


class _Key(_Json, frozen=True):
    type: str
    value: str


class _Validator(_Json, frozen=True):
    pub_key: _Key
    voting_power: _Number


class _ValidatorsAnswer(_Json, frozen=True):
    block_height: _Number
    validators: tuple[_Validator, ...]
    total: _Number


class _SyncInfo(_Json, frozen=True):
    latest_block_height: _Number
    earliest_block_height: _Number


class _StatusAnswer(_Json, frozen=True):
    sync_info: _SyncInfo


_T = TypeVar("_T")


def _read(answer: object, type_: type[_T]) -> _T:
    try:
        return msgspec.convert(answer, type_)
    except (msgspec.ValidationError, UnicodeError, OverflowError, RecursionError) as error:
        raise DecodeError(f"an answer of the ordering engine is not as expected: {error}") from None


def _hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise DecodeError(f"{text[:20]!r} is not hexadecimal") from None


def _base64(text: str | None) -> bytes:
    try:
        return base64.b64decode(text or "", validate=True)
    except (binascii.Error, ValueError):
        raise DecodeError("a value in the ordering engine's answer is not base64") from None


def time_of(text: str) -> Timestamp:
    """The moment of an RFC 3339 text in UTC with up to nine digits of a second."""
    match = _TIME.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        moment = datetime.fromisoformat(match[1]).replace(tzinfo=UTC)
    except ValueError:
        raise DecodeError(f"{text[:40]!r} is not a time") from None
    since = moment - _EPOCH
    return Timestamp(since.days * 86_400 + since.seconds, int((match[2] or "0").ljust(9, "0")))


def _block_id(told: _BlockId) -> BlockId | None:
    if (told.hash, told.parts.total, told.parts.hash) == ("", 0, ""):
        return None
    return BlockId(_hex(told.hash), told.parts.total, _hex(told.parts.hash))


def _header(told: _Header) -> Header:
    return Header(
        int(told.version.block),
        int(told.version.app),
        told.chain_id,
        int(told.height),
        time_of(told.time),
        _block_id(told.last_block_id),
        _hex(told.last_commit_hash),
        _hex(told.data_hash),
        _hex(told.validators_hash),
        _hex(told.next_validators_hash),
        _hex(told.consensus_hash),
        _hex(told.app_hash),
        _hex(told.last_results_hash),
        _hex(told.evidence_hash),
        _hex(told.proposer_address),
    )


def _commit(told: _Commit | None) -> Commit | None:
    """A commit; None for the empty one that the first block holds."""
    id_ = _block_id(told.block_id) if told else None
    if told is None or id_ is None:
        return None
    signatures = [
        CommitSig(
            one.block_id_flag,
            _hex(one.validator_address),
            time_of(one.timestamp),
            _base64(one.signature),
        )
        for one in told.signatures
    ]
    return Commit(int(told.height), told.round, id_, tuple(signatures))


def _vote(told: _Vote) -> Vote:
    return Vote(
        told.type,
        int(told.height),
        told.round,
        _block_id(told.block_id),
        time_of(told.timestamp),
        _hex(told.validator_address),
        told.validator_index,
        _base64(told.signature),
        _base64(told.extension),
        _base64(told.extension_signature),
    )


def _evidence(told: _Evidence) -> DuplicateVote:
    if told.type != DUPLICATE_VOTE:
        raise DecodeError(
            f"evidence of type {told.type[:60]!r} cannot be recorded",
            hint="it takes more than f liars: ask the members what happened",
        )
    said = _read(told.value, _DuplicateVote)
    return DuplicateVote(
        _vote(said.vote_a),
        _vote(said.vote_b),
        int(said.TotalVotingPower),
        int(said.ValidatorPower),
        time_of(said.Timestamp),
    )


def heights_of(status: object) -> tuple[int, int]:
    """The first and the last height that the engine has blocks of, from ``status``; 0 is none."""
    info = _read(status, _StatusAnswer).sync_info
    return int(info.earliest_block_height), int(info.latest_block_height)


def validators_of(answer: object) -> tuple[Validator, ...]:
    """The set of a height from ``validators``, in the engine's order; it must be whole."""
    told = _read(answer, _ValidatorsAnswer)
    if len(told.validators) != int(told.total) or not told.validators:
        raise DecodeError(f"{len(told.validators)} of {told.total} validators in one answer")
    if any(one.pub_key.type != ED25519 for one in told.validators):
        raise DecodeError("a validator has no Ed25519 key")
    return tuple(
        Validator(_base64(one.pub_key.value), int(one.voting_power)) for one in told.validators
    )


def record_of(
    block: object, commit: object, validators: tuple[Validator, ...]
) -> tuple[ChainRecord, bytes]:
    """The record of a height from ``block`` and ``commit``, and its canonical bytes.

    Raises DecodeError if an answer is not as expected, or does not fit the bounds of a record.
    """
    told = _read(block, _BlockAnswer).block
    proof = _commit(_read(commit, _CommitAnswer).signed_header.commit)
    if proof is None:
        raise DecodeError(f"the ordering engine has no commit for block {told.header.height}")
    record = ChainRecord(
        _header(told.header),
        tuple(_base64(tx) for tx in told.data.txs or ()),
        tuple(_evidence(one) for one in told.evidence.evidence or ()),
        _commit(told.last_commit),
        proof,
        validators,
    )
    try:
        data = encode(record)
    except (UnicodeError, OverflowError) as error:
        raise DecodeError(f"block {told.header.height} cannot be encoded: {error}") from None
    if len(data) > MAX_RECORD_BYTES:
        raise DecodeError(f"block {told.header.height} is a record of {len(data)} bytes")
    return decode_record(data), data
