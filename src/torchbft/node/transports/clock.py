"""How far this machine's clock is off, by what other members say of theirs.

    asker    -> introduction (``introduction.py``) | nonce (32)
    listener -> its time, ns since 1970 (8) | signature over (run_id, listener, nonce, time) (64)

The signature keeps somebody on the path from setting a clock. Agreement of the embedded ledger
needs no clock; CometBFT takes the time of its blocks from the votes, and a validator whose clock
lags by a minute panics.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torchbft.node.transports.challenge import exactly
from torchbft.node.transports.introduction import introduction
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SIGNATURE_BYTES, SigningKey, verify
from torchbft.primitives.runspec import Member, RunSpec
from torchbft.primitives.wire import encode

SERVICE = 4
"""In an introduction."""
NONCE_BYTES, TIME_BYTES = 32, 8
DOMAIN = "clock/answer"
TOLERANCE = 10.0
"""Seconds. Clocks that are set by the network differ by a tenth of one; the engine's own bound
is 60."""
ASK_SECONDS = 3.0
"""For one member: a connection and a question round the globe take under one."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One member's clock: ``offset`` seconds ahead of ours, right to half the ``round_trip``."""

    member: Member
    offset: float
    round_trip: float


def _body(run_id: bytes, listener: str, nonce: bytes, now: bytes) -> bytes:
    return encode((run_id, listener, nonce, now))


async def answer(sock: socket.socket, me: PeerId, key: SigningKey, run_id: bytes) -> None:
    """Tell an asker our time, and close. Raises DecodeError, OSError."""
    loop = asyncio.get_running_loop()
    nonce = await exactly(sock, NONCE_BYTES)
    now = time.time_ns().to_bytes(TIME_BYTES, "big")
    signature = key.sign(DOMAIN, _body(run_id, me, nonce, now))
    await loop.sock_sendall(sock, now + signature)
    sock.close()


async def ask(member: Member, run_id: bytes, key: SigningKey) -> Reading | None:
    """A member's clock; None if it does not answer, or not with its own signature.

    key: the asker's identity.
    """
    public = bytes.fromhex(member.identity)
    nonce = secrets.token_bytes(NONCE_BYTES)
    try:
        async with asyncio.timeout(ASK_SECONDS):
            reader, writer = await asyncio.open_connection(member.host, member.port)
            try:
                before = time.time_ns()
                writer.write(introduction(key, public, SERVICE) + nonce)
                told = await reader.readexactly(TIME_BYTES + SIGNATURE_BYTES)
                after = time.time_ns()
            finally:
                writer.close()
    except (OSError, EOFError, TimeoutError):
        return None
    now, signature = told[:TIME_BYTES], told[TIME_BYTES:]
    body = _body(run_id, member.name, nonce, now)
    if not verify(public, DOMAIN, body, signature):
        return None
    offset = int.from_bytes(now, "big") - (before + after) // 2
    return Reading(member, offset / 1e9, max(after - before, 0) / 1e9)


async def readings(run: RunSpec, me: PeerId, key: SigningKey) -> list[Reading]:
    """The clocks of all other validators that answer. key: of our identity."""
    others = [member for member in run.validators if member.name != me]
    found = await asyncio.gather(*(ask(member, run.run_id, key) for member in others))
    return [reading for reading in found if reading is not None]


def off_by(run: RunSpec, found: Sequence[Reading]) -> float | None:
    """Seconds that our clock is ahead of the others' (negative: behind), if they say that it is
    off; None if not.

    Said by more than f, in power, and by more than say that it is right: f liars set no clock.
    """

    def power(some: Sequence[Reading]) -> int:
        return sum(reading.member.power for reading in some)

    ahead = [r for r in found if -r.offset - r.round_trip / 2 > TOLERANCE]
    behind = [r for r in found if r.offset - r.round_trip / 2 > TOLERANCE]
    right = power(found) - power(ahead) - power(behind)
    for said in (ahead, behind):
        if power(said) > max(run.validator_faults.f, right):
            return -min((r.offset for r in said), key=abs)
    return None


def words(seconds: float) -> str:
    """``61 s behind``, for a line that says what is wrong."""
    return f"{abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} the other members'"
