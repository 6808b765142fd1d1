"""What a protocol machine hears from its host and asks of it: values, whose order is a contract.

A machine is ``handle(input, now) -> list[Effect]`` and ``deadline() -> float | None``. The host
carries effects out in order, and makes everything persisted so far durable before the next send.
The two inputs of every machine are here; each room adds its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchbft.primitives.ids import PeerId


@dataclass(frozen=True, slots=True)
class Received:
    """Input: control-channel bytes from a peer, whom the channel authenticated."""

    sender: PeerId
    message: bytes


@dataclass(frozen=True, slots=True)
class Tick:
    """Input: the deadline passed, and nothing else happened."""


@dataclass(frozen=True, slots=True)
class Persist:
    """Append this record to the named log, durably, before any later effect is carried out."""

    log: str
    """``votes``, ``blocks`` or ``statements``; a machine gets them back in order at restart."""

    record: bytes


@dataclass(frozen=True, slots=True)
class Send:
    """Send control-channel bytes to one peer. Delivery is best effort; machines send again."""

    to: PeerId
    message: bytes


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send control-channel bytes to every other member."""

    message: bytes


Effect = object
"""``Persist | Send | Broadcast`` or a machine's own *apply* effects, which its room declares."""
