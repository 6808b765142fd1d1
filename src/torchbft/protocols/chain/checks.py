"""Checks a chain that CometBFT ordered as its full nodes do, by pure functions, without CometBFT.

Source: CometBFT v0.40.0, ``types/validation.go`` (``VerifyCommit``) and ``state/validation.go``;
Buchman, Kwon and Milosevic, "The latest gossip on BFT consensus" (2018).

A *record* is checked by itself (``record_fault``: hashes, and the commit against the validators
that it brings along), against the one before (``link_fault``: the chain and the succession of
validators, which makes of a self-consistent record a proven one), and the first one against
``Genesis``. What only the application knows (its hash, its results, changes of validators) is in
``Expected``.

Stricter than the engine's light client, which stops at the first two thirds and skips votes for no
block: every signature of a commit must hold, surplus and nil ones included, and every place must be
its own validator's. Full nodes ask the same before they accept a commit in a block, so no valid
chain is refused for it. A quorum is n − f of power, the same as strictly more than two thirds.
Not checked: whose turn it was to propose (the engine does not either), and the parts in which a
block travelled, beyond that the quorum signed their hash.

Properties: total (no input raises); a chain that passes from genesis on was signed at each height
by a quorum of the validators that the heights before it named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchbft.primitives.abci import FinalizeResult, ValidatorUpdate
from torchbft.primitives.errors import MisuseError
from torchbft.primitives.faults import FaultModel
from torchbft.primitives.zip215 import verify_zip215
from torchbft.protocols.chain.hashes import (
    commit_hash,
    data_hash,
    evidence_hash,
    header_hash,
    results_hash,
    sign_bytes,
    validators_hash,
)
from torchbft.protocols.chain.messages import (
    MAX_POWER,
    NO_TIME,
    ChainRecord,
    Commit,
    CommitSig,
    Flag,
    Timestamp,
    Validator,
    VoteKind,
)

BLOCK_VERSION = 11
"""The block protocol of CometBFT v0.34 to v0.40 (``version.BlockProtocol``)."""


@dataclass(frozen=True, slots=True)
class Genesis:
    """What all of a chain starts from. ``validators`` need not be in the engine's order."""

    chain_id: str
    time: Timestamp
    validators: tuple[Validator, ...]
    consensus_hash: bytes
    app_hash: bytes
    app_version: int = 0


@dataclass(frozen=True, slots=True)
class Expected:
    """What the header after a block must carry, as the application computed it."""

    app_hash: bytes
    results_hash: bytes
    next_validators: tuple[Validator, ...]


def in_order(validators: Sequence[Validator]) -> tuple[Validator, ...]:
    """The engine's order: by falling power, then by address."""
    return tuple(sorted(validators, key=lambda v: (-v.power, v.address)))


def updated(
    validators: Sequence[Validator], updates: Sequence[ValidatorUpdate]
) -> tuple[Validator, ...]:
    """The set after an application's updates; power 0 removes."""
    powers = {v.public: v.power for v in validators}
    powers.update({update.public: update.power for update in updates})
    return in_order([Validator(public, power) for public, power in powers.items() if power > 0])


def expected_at_start(genesis: Genesis) -> Expected:
    return Expected(genesis.app_hash, results_hash(()), in_order(genesis.validators))


def expected_after(before: Expected, result: FinalizeResult) -> Expected:
    """What the header after a block carries: updates of the block at h show in the
    ``next_validators_hash`` of h+1, and vote from h+2 on."""
    return Expected(
        result.app_hash,
        results_hash(result.tx_results),
        updated(before.next_validators, result.validator_updates),
    )


def set_fault(validators: Sequence[Validator]) -> str | None:
    """Why these are no set of validators as the engine keeps it."""
    if len({v.public for v in validators}) != len(validators):
        return "two validators share a key"
    if tuple(validators) != in_order(validators):
        return "the validators are not in the engine's order"
    if sum(v.power for v in validators) > MAX_POWER:
        return "the validators have more power than an engine allows"
    return None


def commit_fault(
    commit: Commit, validators: Sequence[Validator], chain_id: str, height: int, hash_: bytes
) -> str | None:
    """Why this commit does not prove that a quorum of the set signed this block."""
    if commit.height != height:
        return f"the commit is of height {commit.height}"
    if commit.block_id.hash != hash_:
        return "the commit is for another block"
    if len(commit.signatures) != len(validators):
        return f"{len(commit.signatures)} places in the commit of {len(validators)} validators"
    for validator, one in zip(validators, commit.signatures, strict=True):
        wrong = _place_fault(commit, one, validator, chain_id)
        if wrong:
            return wrong
    power = sum(
        validator.power
        for validator, one in zip(validators, commit.signatures, strict=True)
        if one.flag == Flag.COMMIT
    )
    need = FaultModel(sum(validator.power for validator in validators)).quorum
    return None if power >= need else f"power {power} signed the block where {need} is needed"


def _place_fault(commit: Commit, one: CommitSig, validator: Validator, chain_id: str) -> str | None:
    if one.flag == Flag.ABSENT:
        blank = (one.address, one.time, one.signature) == (b"", NO_TIME, b"")
        return None if blank else "an absent vote in the commit is not blank"
    if one.address != validator.address:
        return f"a vote of {one.address.hex()} stands in the place of {validator.address.hex()}"
    id_ = commit.block_id if one.flag == Flag.COMMIT else None
    text = sign_bytes(chain_id, VoteKind.PRECOMMIT, commit.height, commit.round, id_, one.time)
    if not verify_zip215(validator.public, text, one.signature):
        return f"the signature of {validator.address.hex()} is false"
    return None


def record_fault(record: ChainRecord, chain_id: str) -> str | None:
    """Why a record does not hold by itself, with the validators that it brings along."""
    header = record.header
    if header.chain_id != chain_id:
        return f"is of chain {header.chain_id[:20]!r}"
    if header.block_version != BLOCK_VERSION:
        return f"has block version {header.block_version}, this torchbft knows {BLOCK_VERSION}"
    wrong = set_fault(record.validators) or _hash_fault(record)
    if wrong:
        return wrong
    if header.proposer not in {v.address for v in record.validators}:
        return "its proposer is not a validator"
    return commit_fault(
        record.commit, record.validators, chain_id, header.height, header_hash(header)
    )


def _hash_fault(record: ChainRecord) -> str | None:
    header = record.header
    for what, given, computed in (
        ("validators", header.validators_hash, validators_hash(record.validators)),
        ("transactions", header.data_hash, data_hash(record.txs)),
        ("evidence", header.evidence_hash, evidence_hash(record.evidence)),
        ("last commit", header.last_commit_hash, commit_hash(record.last_commit)),
    ):
        if given != computed:
            return f"its {what} do not fit their hash in the header"
    return None


def first_fault(record: ChainRecord, genesis: Genesis) -> str | None:
    """Why a record that holds by itself is not the first block of this genesis."""
    header = record.header
    if header.height != 1 or header.last_block_id is not None or record.last_commit is not None:
        return f"block {header.height} is no first block"
    if header.time != genesis.time:
        return "its time is not the genesis time"
    if header.app_version != genesis.app_version:
        return f"its application version is {header.app_version}, not {genesis.app_version}"
    if header.consensus_hash != genesis.consensus_hash:
        return "its consensus parameters are not the genesis file's"
    same = record.validators == in_order(genesis.validators)
    return None if same else "its validators are not the genesis file's"


def link_fault(before: ChainRecord, record: ChainRecord) -> str | None:
    """Why a record that holds by itself does not follow another that does."""
    old, new = before.header, record.header
    if new.height != old.height + 1:
        return f"block {new.height} comes after block {old.height}"
    if record.last_commit is None or new.last_block_id != record.last_commit.block_id:
        return "its last commit is for another block than the one it names"
    if new.validators_hash != old.next_validators_hash:
        return "its validators are not those that the block before it announced"
    if (new.app_version, new.consensus_hash) != (old.app_version, old.consensus_hash):
        return "the application version or the consensus parameters changed"
    wrong = commit_fault(
        record.last_commit, before.validators, new.chain_id, old.height, header_hash(old)
    )
    if wrong:
        return f"in its last commit, {wrong}"
    return _time_fault(record.last_commit, before, new.time)


def median_time(commit: Commit, validators: Sequence[Validator]) -> Timestamp:
    """The median of the times at which a checked commit's signers voted for its block, weighted by
    power: the time of the next block (``types/time.WeightedMedian``)."""
    places = zip(validators, commit.signatures, strict=True)
    votes = sorted((one.time, v.power) for v, one in places if one.flag == Flag.COMMIT)
    left = sum(power for _, power in votes) // 2
    for time, power in votes:
        if left <= power:
            return time
        left -= power
    raise MisuseError("a commit in which nobody voted for the block", where="median_time")


def _time_fault(last_commit: Commit, before: ChainRecord, time: Timestamp) -> str | None:
    if time <= before.header.time:
        return "its time is not after that of the block before"
    median = median_time(last_commit, before.validators)
    return None if time == median else "its time is not the median of its last commit's"


def application_fault(record: ChainRecord, expected: Expected) -> str | None:
    """Why a header does not carry what the application computed from the blocks before."""
    header = record.header
    if header.app_hash != expected.app_hash:
        return "carries a false application hash"
    if header.last_results_hash != expected.results_hash:
        return "carries a false hash of the results of the block before"
    if header.next_validators_hash != validators_hash(expected.next_validators):
        return "announces other validators than the application named"
    return None
