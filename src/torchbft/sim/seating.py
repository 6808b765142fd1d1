"""Who has which seat when, as the checkers see it: from what honest peers read, and one rule."""

from __future__ import annotations

from collections.abc import Iterable

from torchbft.primitives.faults import FaultModel
from torchbft.primitives.ids import Height
from torchbft.protocols.round.state import LedgerState, Seat

IN_FORCE_AFTER = 2
"""Heights from the block that ends an epoch to the first that the next one's validators sign."""


class Seating:
    """Validators by height and seats by round; ``seats``: those that a run begins with.

    Independent of the ledger's own book-keeping: only the reader's state is looked at, which has a
    second reading in the tests, and the rule of two heights is applied here once more.
    """

    def __init__(self, seats: Iterable[Seat]) -> None:
        first = tuple(seats)
        self._rounds: dict[int, tuple[Seat, ...]] = {}
        self._sets = [(0, first)]
        self._newest, self._epoch = first, 0

    def note(self, height: Height, state: LedgerState) -> None:
        """An honest peer stands so after a block."""
        self._rounds.setdefault(state.current.number, state.current.seats)
        if state.epoch > self._epoch:
            self._epoch, self._newest = state.epoch, state.current.seats
            self._sets.append((height + IN_FORCE_AFTER, state.current.seats))

    def seats(self, number: int) -> tuple[Seat, ...]:
        """Of a round, in order of name."""
        return self._rounds.get(number, self._newest)

    def validators(self, height: int) -> tuple[Seat, ...]:
        """Those who sign a height's block, in order of name."""
        seats = next(seats for since, seats in reversed(self._sets) if since <= height)
        return tuple(seat for seat in seats if seat.validator)


def power(seats: Iterable[Seat], names: Iterable[str] | None = None) -> int:
    """Power of the validators among these seats, or of those named."""
    chosen = None if names is None else set(names)
    return sum(s.power for s in seats if s.validator and (chosen is None or s.name in chosen))


def quorum(seats: Iterable[Seat]) -> int:
    """Power that any decision of these validators needs."""
    return FaultModel(power(seats)).quorum
