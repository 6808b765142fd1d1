"""Which samples a contributor trains on: from the ledger's randomness, each sample once a pass.

A pass is one permutation of the N samples: the generalised Feistel network of Black and Rogaway
2002 (method 3), ``FEISTEL_ROUNDS`` rounds on pairs in Z_a × Z_b with a = ⌈√N⌉ and b = ⌈N/a⌉. Fewer
than one pair in √N stand for a number beyond N; they are walked along their cycle into [0, N)
(method 2). The network is keyed by the beacon at the pass's start. A round takes the next
positions, after those whose contribution did not count before; the round's beacon decides who gets
which share. All of it is a function of the ledger.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from torchbft.primitives.digests import sha256
from torchbft.primitives.wire import Bytes32, Count, Name, Wire

FEISTEL_ROUNDS = 8
"""Four suffice against chosen inputs and outputs (Luby and Rackoff); doubled for weak mixers.
Even, so that both halves end on their own side."""

_MIX_1, _MIX_2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_SHIFT = np.uint64(33)
"""Of MurmurHash3's 64-bit finalizer (Appleby 2011), the round function's mixer."""

Words = NDArray[np.uint64]


class Slice(Wire, frozen=True):
    """``count`` positions from ``start`` in one pass over ``samples`` samples."""

    pass_key: Bytes32
    pass_index: Count
    samples: Count
    start: Count
    count: Count


Share = tuple[Slice, ...]
"""A contributor's samples in a round; more than one slice where a pass ends inside."""


class Cursor(Wire, frozen=True):
    """The next position to hand out: ``start`` in pass ``pass_index``, permuted by ``pass_key``."""

    pass_key: Bytes32
    pass_index: Count
    start: Count


class Deal(Wire, frozen=True):
    """The outcome of ``deal``: who trains on what, and what is left."""

    shares: tuple[tuple[Name, Share], ...]
    cursor: Cursor
    requeue: tuple[Share, ...]


def _mixed(words: Words, key: int) -> Words:
    x = words ^ np.uint64(key)
    x = (x ^ (x >> _SHIFT)) * _MIX_1
    x = (x ^ (x >> _SHIFT)) * _MIX_2
    return x ^ (x >> _SHIFT)


def _feistel(words: Words, keys: Sequence[int], sides: tuple[int, int]) -> Words:
    """Permute [0, a·b), a word being (left, right) = (word mod a, word div a)."""
    right, left = np.divmod(words, np.uint64(sides[0]))
    for number, key in enumerate(keys):
        side = np.uint64(sides[number % 2])
        left, right = right, (left + _mixed(right, key) % side) % side
    return left + right * np.uint64(sides[0])


def _round_keys(pass_key: bytes) -> list[int]:
    """One 64-bit key for each round, four from a digest."""
    material = [sha256("round/feistel", pass_key, bytes([i])) for i in range(FEISTEL_ROUNDS // 4)]
    return [word for digest in material for word in struct.unpack(">4Q", digest)]


def positions(part: Slice) -> list[int]:
    """Sample indices in [0, samples) of a slice, in order; distinct for distinct positions."""
    side = math.isqrt(part.samples - 1) + 1
    sides, keys = (side, -(-part.samples // side)), _round_keys(part.pass_key)
    words = _feistel(np.arange(part.start, part.start + part.count, dtype=np.uint64), keys, sides)
    while len(outside := np.flatnonzero(words >= part.samples)):
        words[outside] = _feistel(words[outside], keys, sides)
    return [int(word) for word in words.tolist()]


def pass_key(beacon: bytes, run_id: bytes, pass_index: int) -> bytes:
    """Key of a pass's permutation: the beacon at its start, the run and the pass."""
    return sha256("round/pass", beacon, run_id, pass_index.to_bytes(8, "big"))


def genesis_beacon(seed: bytes, run_id: bytes) -> bytes:
    """The beacon of round 0, before any member could add to it."""
    return sha256("round/beacon/genesis", seed, run_id)


def mix_beacon(previous: bytes, secrets: Iterable[tuple[str, bytes]], need: int) -> bytes:
    """The next beacon: the previous one mixed with the opened secrets, in order of author.

    With fewer than ``need`` (f+1) secrets, the previous one's hash (ROUND.md 15).
    """
    opened = sorted(secrets)
    if len(opened) < need:
        return sha256("round/beacon/fallback", previous)
    parts = [part for name, secret in opened for part in (name.encode(), secret)]
    return sha256("round/beacon/mixed", previous, *parts)


def _take(
    cursor: Cursor, size: int, samples: int, beacon: bytes, run_id: bytes
) -> tuple[Share, Cursor]:
    slices: list[Slice] = []
    while size > 0:
        count = min(size, samples - cursor.start)
        slices.append(Slice(cursor.pass_key, cursor.pass_index, samples, cursor.start, count))
        size -= count
        cursor = Cursor(cursor.pass_key, cursor.pass_index, cursor.start + count)
        if cursor.start == samples:
            following = cursor.pass_index + 1
            cursor = Cursor(pass_key(beacon, run_id, following), following, 0)
    return tuple(slices), cursor


def deal(
    names: Sequence[str],
    cursor: Cursor,
    requeue: Sequence[Share],
    *,
    share_size: int,
    samples: int,
    beacon: bytes,
    run_id: bytes,
) -> Deal:
    """One share of ``share_size`` samples for each name: shares to assign again come first.

    ``samples`` ≥ 1. A share larger than a pass runs over as many passes as it needs.
    """
    shares = list(requeue[: len(names)])
    while len(shares) < len(names):
        share, cursor = _take(cursor, share_size, samples, beacon, run_id)
        shares.append(share)
    drawn = sorted(names, key=lambda name: sha256("round/who", beacon, name.encode()))
    dealt = tuple(sorted(zip(drawn, shares, strict=True)))
    return Deal(dealt, cursor, tuple(requeue[len(names) :]))
