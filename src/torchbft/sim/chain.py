"""Makes chains as CometBFT would, without it: blocks of given transactions, signed by given keys.

For tests of everything that reads such chains (verifier, follower, evidence), and of what liars who
hold keys may do to one. The order of time is fixed: a block a second, votes a millisecond apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec
from nacl import bindings

from torchbft.primitives.abci import Application
from torchbft.primitives.digests import sha256
from torchbft.primitives.ids import Height
from torchbft.primitives.keys import SigningKey
from torchbft.protocols.chain.checks import (
    BLOCK_VERSION,
    Expected,
    Genesis,
    expected_after,
    expected_at_start,
    median_time,
)
from torchbft.protocols.chain.hashes import (
    commit_hash,
    data_hash,
    evidence_hash,
    header_hash,
    sign_bytes,
    validators_hash,
)
from torchbft.protocols.chain.messages import (
    NO_TIME,
    BlockId,
    ChainRecord,
    Commit,
    CommitSig,
    DuplicateVote,
    Flag,
    Header,
    Timestamp,
    Validator,
    Vote,
    VoteKind,
)

MILLISECOND = 1_000_000
_ORDER = 2**252 + 27742317777372353535851937790883648493
_ORDER_8 = bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05")
"""A point whose eighth multiple is the first to be zero (RFC 8032's curve)."""


def crafted_signature(key: SigningKey, message: bytes) -> bytes:
    """A signature as only the key's holder can make it, with a point of order 8 added to R: the
    engine and ZIP-215 accept it, and no check without the cofactor does."""
    spread = hashlib.sha512(key.seed()).digest()
    secret = int.from_bytes(spread[:32], "little") & (2**254 - 8) | 2**254
    nonce = int.from_bytes(hashlib.sha512(spread[32:] + message).digest(), "little") % _ORDER
    point = bindings.crypto_scalarmult_ed25519_base_noclamp(nonce.to_bytes(32, "little"))
    shifted = bytes(bindings.crypto_core_ed25519_add(point, _ORDER_8))
    digest = hashlib.sha512(shifted + key.public + message).digest()
    s = (nonce + int.from_bytes(digest, "little") * secret) % _ORDER
    return shifted + s.to_bytes(32, "little")


class ChainMaker:
    """Makes one record after another, in ``records``, with the voting keys that it is given."""

    def __init__(self, genesis: Genesis, keys: Iterable[SigningKey]) -> None:
        self.genesis = genesis
        self.keys: Mapping[bytes, SigningKey] = {key.public: key for key in keys}
        self.expected = expected_at_start(genesis)
        self.validators = self.expected.next_validators
        self.records: list[ChainRecord] = []
        self.sign: dict[bytes, Callable[[SigningKey, bytes], bytes]] = {}
        """How a public key's holder signs, where not honestly."""

    def block(
        self,
        txs: Sequence[bytes] = (),
        *,
        evidence: Sequence[DuplicateVote] = (),
        absent: Collection[int] = (),
        nil: Collection[int] = (),
        **header: object,
    ) -> ChainRecord:
        """The next block. ``absent`` and ``nil`` are places in the set; ``header`` sets fields of
        the header to what no honest proposer would write."""
        made = msgspec.structs.replace(self._header(txs, evidence), **header)
        commit = self.commit(made, self.validators, absent=absent, nil=nil)
        last = self.records[-1].commit if self.records else None
        record = ChainRecord(made, tuple(txs), tuple(evidence), last, commit, self.validators)
        self.records.append(record)
        self.validators = self.expected.next_validators
        return record

    def drive(self, application: Application, blocks: Iterable[Sequence[bytes]]) -> None:
        """One block after another through an application, whose hashes the headers carry."""
        for txs in blocks:
            record = self.block(txs)
            result = application.finalize_block(Height(record.header.height), txs)
            application.commit()
            self.expected = expected_after(self.expected, result)

    def expect(self, **fields: object) -> None:
        """Set what the next header carries for the application."""
        told = {name: getattr(self.expected, name) for name in Expected.__slots__}
        self.expected = Expected(**(told | fields))

    def _header(self, txs: Sequence[bytes], evidence: Sequence[DuplicateVote]) -> Header:
        before = self.records[-1] if self.records else None
        last = before.commit if before else None
        time = median_time(last, before.validators) if last and before else self.genesis.time
        return Header(
            BLOCK_VERSION,
            self.genesis.app_version,
            self.genesis.chain_id,
            len(self.records) + 1,
            time,
            last.block_id if last else None,
            commit_hash(last),
            data_hash(txs),
            validators_hash(self.validators),
            validators_hash(self.expected.next_validators),
            self.genesis.consensus_hash,
            self.expected.app_hash,
            self.expected.results_hash,
            evidence_hash(evidence),
            self.validators[0].address,
        )

    def commit(
        self,
        header: Header,
        validators: Sequence[Validator],
        *,
        absent: Collection[int] = (),
        nil: Collection[int] = (),
        round_: int = 0,
    ) -> Commit:
        """The commit of a header by these validators, as far as their keys are known."""
        hash_ = header_hash(header)
        id_ = BlockId(hash_, 1, sha256("sim/parts", hash_))
        places = []
        for place, validator in enumerate(validators):
            if place in absent or validator.public not in self.keys:
                places.append(CommitSig(Flag.ABSENT, b"", NO_TIME, b""))
                continue
            flag = Flag.NIL if place in nil else Flag.COMMIT
            time = Timestamp(header.time.seconds + 1, (place + 1) * MILLISECOND)
            vote = self.vote(validator, header.height, round_, None if place in nil else id_, time)
            places.append(CommitSig(flag, validator.address, time, vote.signature))
        return Commit(header.height, round_, id_, tuple(places))

    def vote(
        self,
        validator: Validator,
        height: int,
        round_: int,
        id_: BlockId | None,
        time: Timestamp,
        kind: VoteKind = VoteKind.PRECOMMIT,
    ) -> Vote:
        """A signed vote of a validator whose key is known."""
        text = sign_bytes(self.genesis.chain_id, kind, height, round_, id_, time)
        sign = self.sign.get(validator.public, SigningKey.sign_foreign)
        signature = sign(self.keys[validator.public], text)
        return Vote(kind, height, round_, id_, time, validator.address, 0, signature)

    def double_vote(self, validator: Validator, height: int) -> DuplicateVote:
        """Evidence that a validator signed two prevotes in round 0 of a height that is made."""
        at = self.records[height - 1]
        ids = [BlockId(bytes([k]) * 32, 1, bytes([k]) * 32) for k in (1, 2)]
        one, two = (
            self.vote(validator, height, 0, id_, at.header.time, VoteKind.PREVOTE) for id_ in ids
        )
        total = sum(v.power for v in at.validators)
        return DuplicateVote(one, two, total, validator.power, at.header.time)
