"""Who is at the other end of a connection in clear (``encrypt_payloads = false``).

    dialer   -> magic (16) | dialer's name (32, padded with 0) | nonce (32)
    listener -> nonce (32) | signature over the transcript (64)
    dialer   -> signature over the transcript (64)
    transcript = sha256(run_id, dialer, listener, dialer's nonce, listener's nonce)

Both signatures name their side, so neither can be reflected (ISO/IEC 9798-3, three-pass mutual
authentication). It keeps strangers out and binds the connection's start to the members; it does not
protect the bytes that follow. Those are checked chunk by chunk against a root from the ledger, so
somebody on the path can read or cut them, and cannot change what is stored.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Mapping

from torchbft.primitives.digests import sha256
from torchbft.primitives.errors import DecodeError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SIGNATURE_BYTES, SigningKey, verify

MAGIC = b"torchbft-clear/1"
NAME_BYTES = 32
NONCE_BYTES = 32
_DIALER, _LISTENER = "clear/dialer", "clear/listener"


def _transcript(
    run_id: bytes, dialer: str, listener: str, dialer_nonce: bytes, listener_nonce: bytes
) -> bytes:
    parts = (run_id, dialer.encode(), listener.encode(), dialer_nonce, listener_nonce)
    return sha256("clear/transcript", *parts)


async def exactly(sock: socket.socket, count: int) -> bytes:
    """Read no byte beyond: what follows belongs to the connection's protocol."""
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < count:
        piece = await loop.sock_recv(sock, count - len(data))
        if not piece:
            raise DecodeError("it closed the connection during the challenge")
        data += piece
    return data


async def prove_as_dialer(
    sock: socket.socket, me: PeerId, key: SigningKey, run_id: bytes, peer: PeerId, public: bytes
) -> None:
    """Prove who we are, and that the listener is ``peer``. Raises DecodeError, OSError."""
    loop = asyncio.get_running_loop()
    nonce = secrets.token_bytes(NONCE_BYTES)
    await loop.sock_sendall(sock, MAGIC + me.encode().ljust(NAME_BYTES, b"\0") + nonce)
    answer = await exactly(sock, NONCE_BYTES + SIGNATURE_BYTES)
    transcript = _transcript(run_id, me, peer, nonce, answer[:NONCE_BYTES])
    if not verify(public, _LISTENER, transcript, answer[NONCE_BYTES:]):
        raise DecodeError(f"it did not prove that it is {peer}")
    await loop.sock_sendall(sock, key.sign(_DIALER, transcript))


async def check_as_listener(
    sock: socket.socket, me: PeerId, key: SigningKey, run_id: bytes, roster: Mapping[PeerId, bytes]
) -> PeerId:
    """Find out which member dialled, and prove who we are. Raises DecodeError, OSError."""
    loop = asyncio.get_running_loop()
    hello = await exactly(sock, len(MAGIC) + NAME_BYTES + NONCE_BYTES)
    name = hello[len(MAGIC) : -NONCE_BYTES].rstrip(b"\0").decode("ascii", "replace")
    public = roster.get(PeerId(name))
    if not hello.startswith(MAGIC) or public is None or name == me:
        raise DecodeError("it is not a member")
    nonce = secrets.token_bytes(NONCE_BYTES)
    transcript = _transcript(run_id, name, me, hello[-NONCE_BYTES:], nonce)
    await loop.sock_sendall(sock, nonce + key.sign(_LISTENER, transcript))
    if not verify(public, _DIALER, transcript, await exactly(sock, SIGNATURE_BYTES)):
        raise DecodeError(f"it did not prove that it is {name}")
    return PeerId(name)
