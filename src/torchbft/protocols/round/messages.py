"""Statements of the round: what members sign, and what the ledger orders.

A transaction is ``Signed``: the canonical bytes of one statement and a signature over them by the
author's voting key. Every statement starts with (kind, version, run, epoch, round, author), so that
no signature can be shown in another place (ROUND.md 1). Two transactions over equal statement
bytes are one statement, whatever their signatures.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal, cast

import msgspec

from torchbft.primitives.digests import DOMAIN_PREFIX, sha256
from torchbft.primitives.errors import DecodeError
from torchbft.primitives.evidence import Evidence
from torchbft.primitives.keys import SIGNATURE_BYTES, SigningKey, verify
from torchbft.primitives.runspec import MAX_MEMBERS
from torchbft.primitives.wire import (
    MAX_ITEM_BYTES,
    WIRE_VERSION,
    Bytes32,
    Bytes64,
    Count,
    Name,
    Wire,
    decode,
    encode,
)
from torchbft.protocols.round.changes import Change

SIGN_DOMAIN = "round/statement"

MAX_REASON_BYTES = 120
"""A reason is one short line for people."""

PARSE_CACHE = 2048
"""Decoded transactions remembered (8 MiB at most): each is looked at three times."""

MAX_MAP_BYTES = MAX_MEMBERS // 8
Secret = Annotated[bytes, msgspec.Meta(max_length=32)]
"""32 secret bytes, or empty where the author has none to open."""
Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON_BYTES)]
SeatMap = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_MAP_BYTES)]
"""A bit per seat of the round in order of peer id; bit 0 is the lowest bit of the first byte."""

Window = Literal["commit", "open"]

MEMBER_SLOT = "member-"
"""What the slot of each vote for a change begins with."""


class _Head(Wire, frozen=True):
    """What every statement begins with, after its kind."""

    version: Count
    run_id: Bytes32
    epoch: Count
    round: Count
    author: Name


class Ready(_Head, frozen=True, tag="ready"):
    """A validator of this epoch is up."""


class Commitment(_Head, frozen=True, tag="commit"):
    """Fixes a contribution unseen. ``audit_secret`` opens the one that served the last round."""

    digest: Bytes32
    audit_secret: Secret


class Opening(_Head, frozen=True, tag="open"):
    """Opens this round's commitment, and the beacon secret that the last one bound."""

    salt: Bytes32
    payload_length: Count
    payload_root: Bytes32
    trace_root: Bytes32
    share_commit: Bytes32
    beacon_secret: Secret
    audit_hash: Secret


class Attestation(_Head, frozen=True, tag="attest"):
    """One byte per seat in order of peer id, a ``Status`` each."""

    statuses: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]


class Closing(_Head, frozen=True, tag="close"):
    """At its time-out a validator lists the authors whose items of a window it holds."""

    window: Window
    authors: SeatMap


class RootVote(_Head, frozen=True, tag="root"):
    """A validator applied the round and has this root. Control channel only."""

    root: Bytes32


class RootCertificate(_Head, frozen=True, tag="rooted"):
    """A quorum of root votes: the signers' seats and their signatures in that order."""

    root: Bytes32
    signers: SeatMap
    signatures: Annotated[bytes, msgspec.Meta(max_length=MAX_ITEM_BYTES)]


class VoidVote(_Head, frozen=True, tag="void"):
    """A validator would rather void the fixed round, whose root no quorum signs."""

    reason: Reason


class EvidenceTx(_Head, frozen=True, tag="evidence"):
    """Evidence from outside the ledger's own statements, such as a double vote."""

    evidence: Evidence


class MembershipVote(_Head, frozen=True, tag="member"):
    """A validator is for this change of the membership. It counts in this round only: who still
    wants a change that has not passed votes again in the next."""

    change: Change


Statement = (
    Ready
    | Commitment
    | Opening
    | Attestation
    | Closing
    | RootVote
    | RootCertificate
    | VoidVote
    | EvidenceTx
    | MembershipVote
)


class Signed(Wire, frozen=True):
    """A transaction: canonical bytes of a ``Statement`` and the author's signature over them."""

    statement: Annotated[bytes, msgspec.Meta(max_length=MAX_ITEM_BYTES)]
    signature: Bytes64


class Status:
    """What an attestation says of one seat's opening."""

    NONE = 0
    HELD = 1
    MISSING = 2
    MALFORMED = 3
    ALL = frozenset((NONE, HELD, MISSING, MALFORMED))


@dataclass(frozen=True, slots=True)
class Parsed:
    """A decoded transaction. ``slot`` is what its author may fill once in the round."""

    statement: Statement
    body: bytes
    signature: bytes
    slot: str

    def signed_by(self, public: bytes) -> bool:
        return verify(public, SIGN_DOMAIN, self.body, self.signature)


def slot_of(statement: Statement) -> str:
    """The slot of a statement within (round, author): its kind, a closing's window, whom evidence
    accuses, which change is voted for."""
    if isinstance(statement, Closing):
        return f"close-{statement.window}"
    if isinstance(statement, EvidenceTx):
        return f"evidence-{statement.evidence.accused}"
    if isinstance(statement, MembershipVote):
        return MEMBER_SLOT + sha256("round/change", encode(statement.change)).hex()[:32]
    return kind_of(statement)


def kind_of(statement: Statement) -> str:
    return str(type(statement).__struct_config__.tag)


@lru_cache(maxsize=PARSE_CACHE)
def parse(tx: bytes) -> Parsed:
    """Decode a transaction; its signature is not yet checked. Raises DecodeError, nothing else."""
    signed = decode(tx, Signed)
    statement = cast(Statement, decode(signed.statement, Statement))  # type: ignore[arg-type]
    if statement.version != WIRE_VERSION:
        raise DecodeError(f"a statement of version {statement.version}, not {WIRE_VERSION}")
    return Parsed(statement, signed.statement, signed.signature, slot_of(statement))


def sign(statement: Statement, key: SigningKey) -> bytes:
    """The transaction of a statement."""
    body = encode(statement)
    return encode(Signed(body, key.sign(SIGN_DOMAIN, body)))


def beacon_hash(secret: bytes) -> bytes:
    return sha256("round/beacon-secret", secret)


def audit_hash(secret: bytes) -> bytes:
    return sha256("round/audit-secret", secret)


def share_commit(beacon_digest: bytes, audit_digest: bytes) -> bytes:
    """Binds two secrets so that either opens alone beside the other's hash (ROUND.md 15)."""
    return sha256("round/share", beacon_digest, audit_digest)


def commitment_digest(opening: Opening) -> bytes:
    """The digest that commits to an opening (DESIGN §3, step 3); beacon and audit fields apart."""
    bound = (
        opening.version,
        opening.run_id,
        opening.epoch,
        opening.round,
        opening.author,
        opening.salt,
        opening.payload_length,
        opening.payload_root,
        opening.trace_root,
        opening.share_commit,
    )
    return sha256("round/commitment", encode(bound))


def secret_for(seed: bytes, purpose: str, run_id: bytes, number: int) -> bytes:
    """PRF of a peer's secret seed (HMAC-SHA256): salts and shares need no storage. 32 bytes."""
    message = encode((DOMAIN_PREFIX + "round/secret", purpose, run_id, number))
    return hmac.digest(seed, message, "sha256")


def seat_map(indices: frozenset[int] | set[int], seats: int) -> bytes:
    """A bit map of ``seats`` bits with these set."""
    return sum(1 << index for index in indices).to_bytes((seats + 7) // 8, "little")


def seats_in(bits: bytes, seats: int) -> tuple[int, ...] | None:
    """Indices of the set bits, or None unless the map is exactly one for ``seats`` seats."""
    value = int.from_bytes(bits, "little")
    if len(bits) != (seats + 7) // 8 or value >> seats:
        return None
    return tuple(index for index in range(seats) if value >> index & 1)


def split_signatures(signatures: bytes) -> tuple[bytes, ...]:
    return tuple(
        signatures[at : at + SIGNATURE_BYTES] for at in range(0, len(signatures), SIGNATURE_BYTES)
    )
