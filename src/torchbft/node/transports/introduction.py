"""The first bytes of every connection: which member dials, and for what.

    magic (16) | service (1) | dialer's public key (32) | signature over listener's public key (64)

Strangers can open connections faster than anybody can finish a TLS handshake. Who brings a member's
signature gets one of that member's own places for the handshake, so strangers take no place from
members, and none of our time beyond looking at these bytes. It proves nothing else: who has watched
a connection can send its introduction again, and then holds that one member's places for a while.
Who it really is the handshake shows. No time is in it, for a wrong clock shall lock nobody out.
"""

from __future__ import annotations

from torchbft.primitives.errors import DecodeError
from torchbft.primitives.keys import SIGNATURE_BYTES, SigningKey, verify

PUBLIC_BYTES = 32
MAGIC = b"torchbft/1 hello"
INTRODUCTION_BYTES = len(MAGIC) + 1 + PUBLIC_BYTES + SIGNATURE_BYTES
_DOMAIN = "endpoint/introduction"


def introduction(key: SigningKey, listener: bytes, service: int) -> bytes:
    """What a dialer sends first; ``listener`` is the 32-byte key of whom it dials."""
    return MAGIC + bytes([service]) + key.public + key.sign(_DOMAIN, listener)


class Introductions:
    """Reads what dialers send to one listener. A member's signature is the same each time, so it is
    verified once and compared from then on: false ones cost no more than their bytes."""

    def __init__(self, listener: bytes, members: frozenset[bytes]) -> None:
        self._listener, self._members = listener, members
        self._proved: dict[bytes, bytes] = {}

    def read(self, data: bytes) -> tuple[bytes, int]:
        """Public key and service of INTRODUCTION_BYTES. Raises DecodeError with a reason."""
        at = len(MAGIC)
        if not data.startswith(MAGIC):
            raise DecodeError("it does not speak torchbft, or another version of it")
        public, signature = data[at + 1 : -SIGNATURE_BYTES], data[-SIGNATURE_BYTES:]
        if public not in self._members:
            raise DecodeError("its key is not in the roster")
        if public == self._listener:
            raise DecodeError("its key is our own")
        if public not in self._proved and verify(public, _DOMAIN, self._listener, signature):
            self._proved[public] = signature
        if self._proved.get(public) != signature:
            raise DecodeError("its introduction is not signed by the member that it names")
        return public, data[at]
