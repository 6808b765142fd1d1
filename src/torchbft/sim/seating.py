"""Who has which seat when, as the checkers see it: from what honest peers read, and one rule."""

from __future__ import annotations

from collections.abc import Iterable

from torchbft.primitives.faults import FaultModel
from torchbft.primitives.ids import Height
from torchbft.protocols.round.events import MembershipChanged
from torchbft.protocols.round.state import Seat

IN_FORCE_AFTER = 2
"""Heights from the block that ends an epoch to the first that the next one's validators sign."""


class Seating:
    """Validators by height and seats by round; ``seats``: those that a run begins with.

    Independent of the ledger's own book-keeping: only what readers tell counts, which have a second
    reading in the tests, and the rule of two heights is applied here once more.
    """

    def __init__(self, seats: Iterable[Seat]) -> None:
        first = tuple(seats)
        self._rounds, self._heights = {0: first}, {0: first}
        self._epoch = 0

    def note(self, height: Height, told: Iterable[object]) -> None:
        """Events of a block, as an honest peer read it."""
        for event in told:
            if isinstance(event, MembershipChanged):
                self._rounds.setdefault(event.round, event.seats)
                if event.epoch > self._epoch:
                    self._epoch = event.epoch
                    self._heights[height + IN_FORCE_AFTER] = event.seats

    def seats(self, number: int) -> tuple[Seat, ...]:
        """Of a round, in order of name."""
        return _newest(self._rounds, number)

    def validators(self, height: int) -> tuple[Seat, ...]:
        """Those who sign a height's block, in order of name."""
        return tuple(seat for seat in _newest(self._heights, height) if seat.validator)


def _newest(known: dict[int, tuple[Seat, ...]], at: int) -> tuple[Seat, ...]:
    return known[max(since for since in known if since <= at)]


def power(seats: Iterable[Seat], names: Iterable[str] | None = None) -> int:
    """Power of the validators among these seats, or of those named."""
    chosen = None if names is None else set(names)
    return sum(s.power for s in seats if s.validator and (chosen is None or s.name in chosen))


def quorum(seats: Iterable[Seat]) -> int:
    """Power that any decision of these validators needs."""
    return FaultModel(power(seats)).quorum
