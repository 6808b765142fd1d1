"""Messages of CometBFT on a stream: each behind its length, an unsigned varint."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import Message

from torchbft.primitives.errors import DecodeError
from torchbft.protocols.chain.hashes import varint

MAX_REQUEST_BYTES = 4 * 1024 * 1024
"""A block of 1 MiB and what the engine tells of its votes, or a chunk of a snapshot, with room."""

MAX_LENGTH_BYTES = 4
"""Of the varint before a message; 4 of them reach far beyond ``MAX_REQUEST_BYTES``."""


class Frames:
    """Cuts a stream into messages of at most ``limit`` bytes. Sans-I/O; after a DecodeError the
    stream is of no more use."""

    def __init__(self, limit: int = MAX_REQUEST_BYTES) -> None:
        self._data, self._limit = bytearray(), limit

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are complete now. Raises DecodeError at a length out of bounds."""
        self._data += data
        while (head := self._head()) is not None:
            start, length = head
            if len(self._data) < start + length:
                return
            body = bytes(self._data[start : start + length])
            del self._data[: start + length]
            yield body

    def _head(self) -> tuple[int, int] | None:
        """Where the first message begins, and its length; None while that is not known."""
        length = 0
        for index, byte in enumerate(self._data[:MAX_LENGTH_BYTES]):
            length |= (byte & 0x7F) << 7 * index
            if byte < 0x80:
                if length > self._limit:
                    break
                return index + 1, length
        else:
            if len(self._data) < MAX_LENGTH_BYTES:
                return None
        raise DecodeError(f"a message of more than {self._limit} bytes", where="CometBFT")


def framed(message: Message) -> bytes:
    """A message as it stands on the wire, and under a signature."""
    body = message.SerializeToString()
    return varint(len(body)) + body
