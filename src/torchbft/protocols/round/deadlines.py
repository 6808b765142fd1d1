"""Local time-outs that follow what was measured (ROUND.md 16). They decide only when a peer sends.

A phase's time-out is a constant times the (n−f)-th fastest arrival of recent rounds, at least a
floor that grows with the bytes to move, doubled after each void round. Before a phase was ever
measured, its first n−f arrivals set it. A liar can stretch each window to this and never be absent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from torchbft.primitives.runspec import Timing

RECENT_ROUNDS = 4
"""Rounds whose slowest counts: enough for a round that evaluates, few enough to forget a spell."""

MAX_DOUBLINGS = 6
"""Time-outs grow to 64 times at most; so many void rounds in a row halt the run anyway."""

MAX_SECONDS = 3600.0
"""No phase waits longer than an hour for a member, whatever was measured."""

UNMEASURED = 4.0
"""Floors are multiplied by this until a phase was measured once."""

SLOWEST_LINK = 1_000_000.0
"""Bytes per second that a member's link must move at least (10 Mbit/s, less its overheads)."""


@dataclass(frozen=True, slots=True)
class _Phase:
    floor: float
    first: float


class Deadlines:
    """Time-outs of the phases ``commit``, ``open``, ``attest`` and ``root``, in seconds."""

    def __init__(self, timing: Timing) -> None:
        self._factor = timing.factor
        self._phases = {
            "commit": _Phase(timing.commit_floor, timing.first_round),
            "open": _Phase(timing.open_floor, UNMEASURED * timing.open_floor),
            "attest": _Phase(timing.attest_floor, UNMEASURED * timing.attest_floor),
            "root": _Phase(timing.root_floor, UNMEASURED * timing.root_floor),
        }
        self._recent: dict[str, deque[float]] = {
            name: deque(maxlen=RECENT_ROUNDS) for name in self._phases
        }
        self._voids = 0

    def observe(self, phase: str, arrivals: Iterable[float], need: int, lasted: float) -> None:
        """Note a phase that ended ``lasted`` seconds after its start, in a round that is not void.
        With fewer than ``need`` = n − f arrivals it was too short, and the next is twice as long.
        """
        ordered = sorted(arrivals)
        short = len(ordered) < need
        self._recent[phase].append(2 * lasted / self._factor if short else ordered[need - 1])

    def round_ended(self, *, void: bool) -> None:
        self._voids = min(self._voids + 1, MAX_DOUBLINGS) if void else 0

    def timeout(
        self, phase: str, *, size: int = 0, arrivals: Iterable[float] = (), need: int = 0
    ) -> float:
        """Seconds from the phase's start. ``size``: bytes to move in it; ``arrivals``: offsets of
        those who came so far, which count only while the phase was never measured."""
        spec = self._phases[phase]
        moved = size / SLOWEST_LINK
        if self._recent[phase]:
            measured = self._factor * max(self._recent[phase])
        else:
            ordered = sorted(arrivals)
            enough = need and len(ordered) >= need
            measured = self._factor * ordered[need - 1] if enough else spec.first
        return min((max(measured, spec.floor) + moved) * 2.0**self._voids, MAX_SECONDS)
