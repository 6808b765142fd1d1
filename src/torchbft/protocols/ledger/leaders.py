"""Who leads a view: rotation over the validators, without those that just failed to lead.

Liveness only; a pure function of the chain. The idea (leaders by what the chain shows they did) is
that of the leader reputation of DiemBFT v4, §3.6, cut down to one rule: a validator whose turn
passed without its block is skipped for a number of heights that doubles with each failure. At most
f units of power are skipped, so honest leaders always remain in the rotation.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchbft.primitives.ids import Height, PeerId, View
from torchbft.protocols.ledger.certificates import ValidatorSet

SKIPPED_HEIGHTS = 16
"""First spell: five rounds. A dead leader then costs a time-out in 16 heights instead of in n."""

MAX_DOUBLINGS = 6
"""Longest spell: 1024 heights, so that a repaired validator leads again within a run."""


@dataclass(slots=True)
class _Absence:
    until: int
    failures: int


class LeaderSchedule:
    """Leaders of all views of the next height; fed with the proposer of each finalized block."""

    def __init__(self, validators: ValidatorSet) -> None:
        self._absences: dict[PeerId, _Absence] = {}
        self._validators = validators
        self._rotation = validators.names

    def leader(self, height: Height, view: View) -> PeerId:
        """The one validator that may propose in this view."""
        return self._rotation[(height + view) % len(self._rotation)]

    def record(self, height: Height, proposer: PeerId, validators: ValidatorSet) -> None:
        """Take note of the block of this height and fix the rotation of the next one."""
        if proposer in self._rotation:
            for view in range(len(self._rotation)):
                leader = self.leader(height, View(view))
                if leader == proposer:
                    break
                self._skip(leader, height)
        self._validators = validators
        self._rotation = self._present(height + 1)

    def _skip(self, name: PeerId, height: int) -> None:
        failures = self._absences[name].failures if name in self._absences else 0
        until = height + SKIPPED_HEIGHTS * 2 ** min(failures, MAX_DOUBLINGS)
        self._absences[name] = _Absence(until, failures + 1)

    def _present(self, height: int) -> tuple[PeerId, ...]:
        latest = sorted(self._absences, key=lambda name: (-self._absences[name].until, name))
        skipped: set[PeerId] = set()
        for name in latest:
            within = self._validators.power_of([*skipped, name]) <= self._validators.faults.f
            if within and self._absences[name].until >= height:
                skipped.add(name)
        return tuple(name for name in self._validators.names if name not in skipped)
