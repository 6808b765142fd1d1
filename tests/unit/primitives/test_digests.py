"""Digests separate domains and cannot be confused by shifting bytes between parts."""

import pytest

from torchbft.primitives.digests import (
    CHUNK_BYTES,
    blake3_digest,
    chunk_digests,
    merkle_root,
    payload_root,
    root_of_chunks,
    sha256,
)


@pytest.mark.parametrize("digest", [sha256, blake3_digest])
def test_domains_and_parts_are_kept_apart(digest) -> None:
    values = {
        digest("a", b"bc"),
        digest("ab", b"c"),
        digest("a", b"b", b"c"),
        digest("a", b"", b"bc"),
        digest("a", b"bc", b""),
        digest("a"),
    }
    assert len(values) == 6


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_the_root_binds_every_byte_and_the_length(size: int) -> None:
    payload = bytes(range(256)) * (size // 256 + 1)
    payload = payload[:size]
    root = payload_root(payload)
    assert root == root_of_chunks(size, chunk_digests(payload))
    assert root != payload_root(payload + b"\0")
    for place in {0, size // 2, size - 1} & set(range(size)):
        flipped = payload[:place] + bytes([payload[place] ^ 1]) + payload[place + 1 :]
        assert payload_root(flipped) != root


def test_merkle_roots_differ_by_order_count_and_content() -> None:
    leaves = [bytes([i]) * 32 for i in range(5)]
    roots = {merkle_root("t", leaves[:k]) for k in range(6)}
    assert len(roots) == 6
    assert merkle_root("t", leaves[::-1]) not in roots
    # A node's digest is no leaf: two levels are not taken for one.
    assert merkle_root("t", [merkle_root("t", leaves[:2])]) != merkle_root("t", leaves[:2])
