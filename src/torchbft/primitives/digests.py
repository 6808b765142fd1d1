"""Domain-separated, length-prefixed digests: sha256 for small things, blake3 for tensors.

Every digest names its domain and the version, so that bytes of one kind never pass for another,
and prefixes each part with its length, so that parts cannot be shifted into one another.
"""

from __future__ import annotations

import hashlib
from functools import cache

from blake3 import blake3

DIGEST_BYTES = 32
DOMAIN_PREFIX = "torchbft/1/"
CHUNK_BYTES = 64 * 1024
"""Unit of transfer and of a payload's hash tree: small enough to refuse a bad peer early."""

_JOINED_BYTES = CHUNK_BYTES
"""Up to here parts are copied into one buffer first. Hashing each where the one before it ends, off
blake3's own blocks, takes up to three times as long."""

Buffer = bytes | bytearray | memoryview


@cache
def _opening(domain: str) -> bytes:
    """What every digest of a domain starts with. Domains are literals of this program: few."""
    name = (DOMAIN_PREFIX + domain).encode()
    return len(name).to_bytes(2, "big") + name


def _framed(domain: str, parts: tuple[Buffer, ...]) -> tuple[list[Buffer], int]:
    """What is hashed, piece after piece, and the size of the parts together."""
    framed: list[Buffer] = [_opening(domain)]
    total = 0
    for part in parts:
        size = part.nbytes if isinstance(part, memoryview) else len(part)
        framed += (size.to_bytes(8, "big"), part)
        total += size
    return framed, total


def sha256(domain: str, *parts: Buffer) -> bytes:
    """Digest of small things: statements, blocks, transactions. 32 bytes."""
    return hashlib.sha256(b"".join(_framed(domain, parts)[0])).digest()


def blake3_digest(domain: str, *parts: Buffer) -> bytes:
    """Digest of large things: tensors, chunks. 32 bytes."""
    framed, size = _framed(domain, parts)
    if size <= _JOINED_BYTES:
        return blake3(b"".join(framed)).digest()
    digest = blake3()
    for piece in framed:
        digest.update(piece)
    return digest.digest()


_CHUNK_KEY = blake3_digest("payload/chunk")
"""Keyed blake3 keeps the domain apart without a prefix, which would shift 64 KiB off the hash
tree's boundaries and halve its speed; the root binds the length."""


def chunk_digests(payload: Buffer) -> list[bytes]:
    """One digest per 64 KiB chunk of a payload, in order; the last chunk may be shorter."""
    view = memoryview(payload).cast("B")
    return [
        blake3(view[start : start + CHUNK_BYTES], key=_CHUNK_KEY).digest()
        for start in range(0, view.nbytes, CHUNK_BYTES)
    ]


def root_of_chunks(length: int, chunks: list[bytes]) -> bytes:
    """``payload_root``: binds the payload's length and its chunk digests."""
    return blake3_digest("payload/root", length.to_bytes(8, "big"), b"".join(chunks))


def payload_root(payload: Buffer) -> bytes:
    """Root of a payload's two-level hash tree over 64 KiB chunks (DESIGN §3, step 3)."""
    return root_of_chunks(memoryview(payload).nbytes, chunk_digests(payload))


_DIGEST_LENGTH = DIGEST_BYTES.to_bytes(8, "big")


def merkle_root(domain: str, leaves: list[bytes]) -> bytes:
    """Root of a binary Merkle tree over 32-byte leaves (RFC 6962 shape, leaf and node domains)."""
    if not leaves:
        return blake3_digest(domain + "/empty")
    leaf, node = (_opening(domain + kind) + _DIGEST_LENGTH for kind in ("/leaf", "/node"))
    level = [blake3(leaf + digest).digest() for digest in leaves]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        above = [blake3(node + left + _DIGEST_LENGTH + right).digest() for left, right in pairs]
        level = above + level[len(level) - len(level) % 2 :]
    return level[0]
