"""What is said on a data connection, and how large each frame may be.

OFFER   pusher   -> receiver   I hold this payload of mine; small ones follow at once
WANT    receiver -> holder     send it, from this offset
START   holder   -> receiver   root, length, offset and all chunk digests; then DATA to the end
DATA    holder   -> receiver   the next segment, whole chunks
DONE    receiver -> pusher     stored durably
REFUSE  either   -> either     not held, not wanted, or no longer; with the reason
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from torchbft.primitives.digests import CHUNK_BYTES, DIGEST_BYTES
from torchbft.primitives.wire import Bytes32, Count, Wire

OFFER, WANT, START, DATA, DONE, REFUSE = 1, 2, 3, 4, 5, 6

SEGMENT_BYTES = 16 * CHUNK_BYTES
"""1 MiB: large enough that Python's work per segment vanishes, small enough for a core's cache."""

EAGER_BYTES = SEGMENT_BYTES
"""Payloads up to this follow their offer without a round trip; the waste, if unwanted, is small."""

SMALL_BYTES = 512


class Offer(Wire, frozen=True):
    root: Bytes32
    length: Count
    round: Count


class Want(Wire, frozen=True):
    root: Bytes32
    offset: Count


class Start(Wire, frozen=True):
    root: Bytes32
    length: Count
    offset: Count
    chunks: bytes


class Done(Wire, frozen=True):
    root: Bytes32


class Refuse(Wire, frozen=True):
    root: Bytes32
    reason: Annotated[str, msgspec.Meta(max_length=200)]


def chunk_count(length: int) -> int:
    """Number of 64 KiB chunks of a payload."""
    return -(-length // CHUNK_BYTES)


def frame_limits(max_payload: int) -> dict[int, int]:
    """Greatest body of each kind, for payloads of at most ``max_payload`` bytes."""
    small = dict.fromkeys((OFFER, WANT, DONE, REFUSE), SMALL_BYTES)
    digests = chunk_count(max_payload) * DIGEST_BYTES
    return {**small, START: SMALL_BYTES + digests, DATA: SEGMENT_BYTES}
