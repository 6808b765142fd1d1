"""What a protocol machine asks of its host. Values; their order is part of the contract.

A machine is ``handle(input, now) -> list[Effect]`` and ``deadline() -> float | None``. The host
carries effects out in order, and makes everything persisted so far durable before the next send.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchbft.primitives.ids import PeerId


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
