"""Whom a fetch asks, and when it leaves one holder for another. Knows neither sockets nor a clock.

Some holders of a payload lie about it, and the cheapest lie is to send very slowly: a payload that
trickles in holds up a round as one that never comes does, and looks alive. So nobody is trusted to
be fast. A holder that is slower than the round's time-outs count on is left after one spell while
another was never tried; when all were, the fastest goes on, and is left once its latest spell
shows that another would be twice as fast. What was reached stays, so a change costs a round trip:
f liars cost f spells, and honest holders that are slow together cost nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Container, Iterable
from dataclasses import dataclass

from torchbft.primitives.ids import PeerId

SPELL_SECONDS = 3.0
"""Until a holder is judged, and until one that does not answer is left: two lost packets' repeats.
Payloads near that size decide rounds whose patience is ten minutes: 21 liars cost one of them."""

FAIR_RATE = 1e6
"""Bytes per second that the round's time-outs count on (10 Mbit/s less overheads): nobody is left
who is as fast."""

FLOOR_RATE = 32e3
"""Bytes per second below which a spell failed: a 10 Mbit/s line shared by 39 transfers."""

SLOW_FACTOR = 16.0
"""Nor is anybody left who is within this factor of the best rate that the network has shown."""

TWICE = 2.0
"""A measured holder is preferred to the current one when it was so many times as fast: rates of
equal holders differ by less, and each change costs a round trip."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Back-off after failures: a restarted peer is found at once, an absent one costs little."""

LONGEST_SPELL = 16
"""Spells are stretched with each failure up to so many times: on a line where a chunk of 64 KiB
takes 48 s, something still arrives."""


@dataclass(slots=True)
class _Holder:
    rate: float = math.inf
    """Of its latest spell; infinite before the first, 0 when that failed."""
    failures: int = 0
    not_before: float = 0.0


class Holders:
    """The holders of one payload. ``now`` is any clock's seconds; rates are bytes per second."""

    def __init__(self) -> None:
        self._known: dict[PeerId, _Holder] = {}
        self._liars: set[PeerId] = set()

    def add(self, peers: Iterable[PeerId]) -> None:
        """Peers that are said to hold it. Those known already keep what was measured of them."""
        for peer in peers:
            if peer not in self._liars:
                self._known.setdefault(peer, _Holder())

    def exclude(self, peer: PeerId) -> None:
        """Never ask this one again: it sent bytes that are not the payload's."""
        self._liars.add(peer)
        self._known.pop(peer, None)

    def choose(self, now: float, connected: Container[PeerId]) -> PeerId | None:
        """The holder to ask: the untried first, then the fastest; among equals who failed least,
        connected ones, else by chance. None while all are paused."""
        return max(
            self._able(now),
            key=lambda p: (*self._rank(p), p in connected, random.random()),
            default=None,
        )

    def _able(self, now: float) -> list[PeerId]:
        return [peer for peer, holder in self._known.items() if holder.not_before <= now]

    def _rank(self, peer: PeerId) -> tuple[float, int]:
        holder = self._known[peer]
        return holder.rate, -holder.failures

    def pause(self, now: float) -> float:
        """Seconds until a holder may be asked again."""
        waits = [holder.not_before - now for holder in self._known.values()]
        return max(0.0, min(waits, default=LONGEST_PAUSE))

    def spell(self, peer: PeerId) -> float:
        """Seconds after which this holder is judged."""
        holder = self._known.get(peer)
        return SPELL_SECONDS * min(1 + (holder.failures if holder else 0), LONGEST_SPELL)

    def should_leave(self, peer: PeerId, rate: float, left: int, now: float, best: float) -> bool:
        """Whether to ask another one instead, after a spell at ``rate`` with ``left`` bytes to go.

        best: the fastest transfer that the network has shown.
        """
        if rate >= max(FAIR_RATE, best / SLOW_FACTOR):
            return False
        if rate >= FLOOR_RATE and left <= rate * SPELL_SECONDS:
            return False  # nearly done
        others = [self._known[p].rate for p in self._able(now) if p != peer]
        return bool(others) and (rate < FLOOR_RATE or max(others) > TWICE * rate)

    def ended(self, peer: PeerId, rate: float, now: float) -> None:
        """An attempt with this holder is over, and did not bring the payload."""
        holder = self._known.get(peer)
        if holder is None:
            return
        if rate >= FLOOR_RATE:
            holder.rate, holder.failures, holder.not_before = rate, 0, now
            return
        pause = min(FIRST_PAUSE * 2.0 ** min(holder.failures, 16), LONGEST_PAUSE)
        holder.rate, holder.failures = 0.0, holder.failures + 1
        holder.not_before = now + pause * random.uniform(0.75, 1.25)
