"""A pretend network: when, how often and whether a message arrives.

Latency (how long a bit is under way) is apart from transmission (how long a link is busy with a
message). A peer's uplink and downlink are each shared by everything it sends and receives, so that
a large message delays the small ones behind it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from random import Random

from torchbft.primitives.ids import PeerId

REORDER_SECONDS = 0.25
"""How much later than usual a delayed message may arrive: beyond a few round trips."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a network does. Seconds, bytes per second, probabilities per message."""

    latency: float = 0.02
    jitter: float = 0.005
    """Mean of an exponential part added to the latency; reorders messages."""
    bandwidth: float = 12.5e6
    """Of each peer's uplink, and the same of its downlink."""
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0


class Network:
    """Decides the arrival times of messages between named peers."""

    def __init__(self, random: Random, conditions: Conditions) -> None:
        self._random = random
        self.conditions = conditions
        self._lossy: dict[tuple[PeerId, PeerId], float] = {}
        self._group: dict[PeerId, int] = {}
        self._up_busy: dict[PeerId, float] = {}
        self._down_busy: dict[PeerId, float] = {}

    def degrade(self, sender: PeerId, to: PeerId, loss: float) -> None:
        """Lose this share of what goes one way on a link; the other way is untouched."""
        self._lossy[sender, to] = loss

    def partition(self, *groups: Collection[PeerId]) -> None:
        """Messages between different groups are lost; peers in no group form one of their own."""
        self._group = {peer: i for i, group in enumerate(groups) for peer in group}

    def heal(self, conditions: Conditions) -> None:
        """No partitions, no bad links; these conditions from now on."""
        self._group, self._lossy, self.conditions = {}, {}, conditions

    def cut(self, sender: PeerId, to: PeerId) -> bool:
        """Whether a partition lies between two peers."""
        return self._group.get(sender, -1) != self._group.get(to, -1)

    def arrivals(self, sender: PeerId, to: PeerId, size: int, now: float) -> list[float]:
        """Times at which a message of ``size`` bytes has come through the network: none, one, or
        two. Then ``downlink`` says when the receiver has it."""
        random, conditions = self._random, self.conditions
        sent = max(now, self._up_busy.get(sender, 0.0)) + size / conditions.bandwidth
        self._up_busy[sender] = sent
        loss = self._lossy.get((sender, to), conditions.loss)
        if self.cut(sender, to) or random.random() < loss:
            return []
        copies = 2 if random.random() < conditions.duplicate else 1
        return [sent + self._delay() for _ in range(copies)]

    def downlink(self, to: PeerId, size: int, now: float) -> float:
        """When a message whose last byte could arrive now has passed the receiver's downlink,
        behind those that came before it."""
        busy = self._down_busy.get(to, 0.0)
        self._down_busy[to] = done = max(now, busy + size / self.conditions.bandwidth)
        return done

    def _delay(self) -> float:
        random, conditions = self._random, self.conditions
        delay = conditions.latency + random.expovariate(1 / max(conditions.jitter, 1e-9))
        late = random.random() < conditions.reorder
        return delay + random.random() * REORDER_SECONDS if late else delay
