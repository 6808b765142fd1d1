"""Frames on an authenticated connection: kind u8 | length u32 | body, each kind with its limit.

The decoder is total: any bytes give frames or one DecodeError, and its memory is bounded by the
greatest limit plus one read, whatever length a frame claims.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from torchbft.primitives.errors import DecodeError

HEAD = struct.Struct(">BI")
READ_BYTES = 64 * 1024
"""One read from a control connection: many votes at once, little memory for each of 64 peers."""


class OversizedError(DecodeError):
    """A frame that claims more bytes than its kind may have."""


def frame(kind: int, body: bytes = b"") -> bytes:
    """One frame's bytes."""
    return HEAD.pack(kind, len(body)) + body


def check_head(kind: int, length: int, limits: Mapping[int, int]) -> None:
    """Raise DecodeError for an unknown kind and OversizedError for a length beyond its limit."""
    limit = limits.get(kind)
    if limit is None:
        raise DecodeError(f"a frame of unknown kind {kind}")
    if length > limit:
        raise OversizedError(f"a frame of {length} bytes where at most {limit} are allowed")


class FrameDecoder:
    """Turns a byte stream, cut anywhere, into frames. Not usable after an error."""

    def __init__(self, limits: Mapping[int, int]) -> None:
        self._limits = limits
        self._pending = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> list[tuple[int, bytes]]:
        """The frames that these bytes complete, as (kind, body). Raises DecodeError."""
        pending = self._pending
        pending += data
        frames: list[tuple[int, bytes]] = []
        start = 0
        while len(pending) - start >= HEAD.size:
            kind, length = HEAD.unpack_from(pending, start)
            check_head(kind, length, self._limits)
            end = start + HEAD.size + length
            if end > len(pending):
                break
            frames.append((kind, bytes(pending[start + HEAD.size : end])))
            start = end
        del pending[:start]
        return frames

    def unfinished(self) -> int:
        """Bytes of a frame that has not arrived whole."""
        return len(self._pending)
